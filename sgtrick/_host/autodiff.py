"""Functions that another framework differentiates, and engines made of them."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes
from sgtrick._host.bound_arguments import BoundArguments, Leaf
from sgtrick._host.engine import QUESTIONS, WrongUseError
from sgtrick._host.layout import Layout, Space, check_fills, value_space
from sgtrick._types import DTypeLike, Function, Structure

Leaves = Sequence[Any]  # arrays of NumPy, or tensors of the framework
# The leaves to map over: for each batch dimension in order, for each group of leaves, the axis.
Dims = tuple[tuple[tuple[int | None, ...], ...], ...]


class Framework(Protocol):
    """What a framework must provide: its arrays, here called tensors, are leaves of structures.

    Attributes:
        title: What its users call it.
        recipe: Its gradient of a function, for `from_numpy`.
        takes_text: Whether text of Python may be an argument.
    """

    title: str
    recipe: str
    takes_text: bool

    def vjp(self, f: Function, points: Leaves) -> Any:
        """`(f(points), pullback)`, as `jax.vjp` returns them."""

    def jvp(self, f: Function, points: tuple[Leaves], tangents: tuple[Leaves]) -> Any:
        """`(f(points), tangent)`, as `jax.jvp` returns them."""

    def symmetric(self, gradient: Function, points: Leaves, vs: Leaves) -> Leaves:
        """The derivative of a gradient at these points times `vs`."""

    def like(self, u: Any, y: Any) -> Any:
        """A tensor, or a number for all entries, as a tensor of the shape and dtype of `y`."""

    def probe(self, y: Any) -> Any:
        """A tensor of generic numbers of order 1, of the shape and dtype of `y`."""

    def compiled(self, f: Function, dims: Dims) -> Function:
        """A function of groups of tensors, mapped over these axes, as one of arrays."""

    def raised(self, f: Function, dims: Dims, groups: Sequence[Leaves]) -> Exception | None:
        """What the mapped function raises if its tensors have no values, and so at every point."""

    def shapes(self, f: Function, leaves: Sequence[Any]) -> Structure:
        """The shapes that `f` returns for a list of leaves as `specs_of` returns them."""

    def refusal(self, value: Any) -> str | None:
        """Why what `f` returned is not a tensor that has derivatives; None if it is one."""

    def is_connected(self, value: Any) -> bool:
        """Whether a value depends on the points with respect to which it is differentiated."""

    def advice(self, error: Exception) -> str | None:
        """What to do about an error that is known to be raised at every point; None of others."""


class Differentiable(NamedTuple):
    """A function of one batch member, and its derivatives.

    Attributes:
        framework: What differentiates it.
        name: Its name in errors.
        fn: The caller's function.
        like: The structure of its arguments, with None as their leaves.
        places: The indices of the leaves that have derivatives, the points.
    """

    framework: Framework
    name: str
    fn: Function
    like: Structure
    places: Sequence[int]

    def value(self, xs: Leaves) -> Structure:
        """The value at these leaves, checked."""
        value = self.fn(*tf.nest.pack_sequence_as(self.like, list(xs)))
        for leaf in tf.nest.flatten(value):
            why = self.framework.refusal(leaf)
            if why is not None:
                raise WrongUseError(f"{self.name} must return a value with derivatives, {why}")
        return value

    def value_and_gradient(self, xs: Leaves) -> tuple[Any, Leaves]:
        """The value, one number, and its gradients."""
        value, pull = self.framework.vjp(self._of_points(xs), self._points(xs))
        if tf.nest.is_nested(value):
            raise WrongUseError(
                f"{self.name} must return one number, got {type(value).__name__}. The gradient is "
                "computed by autodiff: use from_numpy for a function that returns its gradient, "
                "and value_shape= for one with several results."
            )
        return value, pull(self.framework.like(1.0, value))[0]

    def vjp(self, xs: Leaves, us: Leaves) -> Leaves:
        """The gradients of the sum of `u * value`."""
        return self._gradient(xs, us)(self._points(xs))

    def jvp(self, xs: Leaves, ts: Leaves) -> tuple[Structure, Any]:
        """The tangent of the value, and nothing else."""
        points = self._points(xs)
        ts = list(map(self.framework.like, ts, points))
        return self.framework.jvp(self._of_points(xs), (points,), (ts,))[1], ()

    def jvp_by_reverse_mode(self, xs: Leaves, ts: Leaves) -> tuple[Structure, Any]:
        """The tangent of what has a rule for reverse mode alone, and whether this is linear.

        It is the transpose of the pullback, by reverse mode again, with the dot-product test.
        """
        points = self._points(xs)
        ts = list(map(self.framework.like, ts, points))
        value, pull = self.framework.vjp(self._of_points(xs), points)
        us = tf.nest.map_structure(self.framework.probe, value)
        # A rule that is not linear differs there: all signs do, and the order.
        far = tf.nest.map_structure(lambda u: -1e3 * u * abs(u), us)
        tangent = self.framework.vjp(lambda us: pull(us)[0], far)[1](ts)[0]
        terms = [y * u for y, u in zip(*map(tf.nest.flatten, (tangent, us)), strict=True)]
        terms += [-t * g for t, g in zip(ts, pull(us)[0], strict=True)]
        difference, size = sum(t.sum() for t in terms), sum(abs(t).sum() for t in terms)
        # Adaptive solvers are linear up to their tolerance. What is not finite passes.
        return tangent, ~(abs(difference) > 1e-3 * size)

    def hessian(self, xs: Leaves, us: Leaves, vs: Leaves) -> Leaves:
        """The Hessian of the sum of `u * value`, or of a number without `us`, times `v`."""
        points = self._points(xs)
        vs = list(map(self.framework.like, vs, points))
        return self.framework.symmetric(self._gradient(xs, us or [1.0]), points, vs)

    def hessian_by_reverse_mode(self, xs: Leaves, us: Leaves, vs: Leaves) -> Leaves:
        """The product with the Hessian of what has a rule for reverse mode alone."""
        points = self._points(xs)
        vs = list(map(self.framework.like, vs, points))
        pull = self.framework.vjp(self._gradient(xs, us or [1.0]), points)[1]
        return pull(vs)[0]  # type: ignore[no-any-return]

    def _points(self, xs: Leaves) -> Leaves:
        return [xs[k] for k in self.places]

    def _of_points(self, xs: Leaves) -> Callable[[Leaves], Structure]:
        """The value as a function of the points, the other leaves being these."""

        def f(points: Leaves) -> Structure:
            own = dict(zip(self.places, points, strict=True))
            value = self.value([own.get(k, x) for k, x in enumerate(xs)])
            if not any(map(self.framework.is_connected, tf.nest.flatten(value))):
                raise WrongUseError(
                    f"{self.name} returns a value that is cut off from its arguments, so that all "
                    "gradients would be zero. The usual causes are .item(), float(), .detach(), "
                    ".numpy(), torch.no_grad(), torch.tensor(...) of a tensor, and casts to "
                    "integers. Remove them; or, if the value is a constant, add 0 * x.sum() to it."
                )
            return value

        return f

    def _gradient(self, xs: Leaves, us: Leaves) -> Callable[[Leaves], Leaves]:
        """The gradients of the sum of `u * value`, as a function of the points."""
        f = self._of_points(xs)

        def gradient(points: Leaves) -> Leaves:
            ys, pull = self.framework.vjp(lambda points: tf.nest.flatten(f(points)), points)
            return pull(list(map(self.framework.like, us, ys)))[0]  # type: ignore[no-any-return]

        return gradient


def is_floating(leaf: object) -> bool:
    """Whether this is an array of floating numbers."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"


def specs_of(leaves: Sequence[Leaf], dtype: DTypeLike) -> list[Any]:
    """The event shape and dtype of each leaf for a framework, or the number of Python itself."""
    return [
        (leaf.event, dtype if leaf.is_floating else leaf.x.dtype.as_numpy_dtype)
        if leaf.is_tensor
        else leaf.x
        for leaf in leaves
    ]


def shapes_of(f: Differentiable, leaves: Sequence[Any]) -> Structure:
    """The shapes that a function returns for leaves as `specs_of` returns them.

    Where some dimensions are unknown, two sizes tell what depends on them.
    """
    first, second = (
        [
            (tuple(size if n is None else n for n in leaf[0]), leaf[1])
            if isinstance(leaf, tuple)
            else leaf
            for leaf in leaves
        ]
        for size in (12, 24)  # which many numbers divide: x.reshape(-1, 3), x[::2]
    )
    try:
        found = f.framework.shapes(f.value, first)
        if first == second:
            return found
        return tf.nest.map_structure(_common, found, f.framework.shapes(f.value, second))
    except WrongUseError:
        raise
    except Exception as error:
        if first != second and isinstance(error, (TypeError, ValueError)):
            return ()  # it takes neither size: one number, unless the caller states a shape
        of_leaves = [leaf[0] for leaf in leaves if isinstance(leaf, tuple)]
        raise of_every_point(f.framework, f.name, error, of_leaves) from error


def _common(a: tf.TensorShape, b: tf.TensorShape) -> tf.TensorShape:
    """Two shapes of one rank as one, in which dimensions that differ are unknown."""
    return tf.TensorShape([n if n == m else None for n, m in zip(a, b, strict=True)])


def check_floats(name: str, leaves: Sequence[Any]) -> None:
    """Raises unless there is a floating argument, as there is nothing to differentiate by."""
    if not any(isinstance(leaf, float) or is_floating(leaf) for leaf in leaves):
        raise WrongUseError(
            f"{name} has no argument of a floating dtype, so it has no gradient. Pass an argument "
            "as a float, or call the function itself."
        )


def of_every_point(
    framework: Framework, name: str, error: Exception, events: Sequence[shapes.Shape]
) -> WrongUseError:
    """The error for a function that raises whatever the values of its arguments are.

    Args:
        framework: What differentiates it.
        name: Its name.
        error: What it raises.
        events: The shapes of its arguments.
    """
    raised, advice = f"{type(error).__name__}: {error}", framework.advice(error)
    if advice is not None:
        return WrongUseError(f"{name} {advice}\n{raised}")
    shown = ", ".join(map(shapes.show, events))
    return WrongUseError(
        f"{name} raised {raised}\n"
        f"It raises this for all arguments of the shapes {shown}, those of one member. If that is "
        f"not what it takes, check event_ndims. If {framework.title} cannot trace, map or "
        f"differentiate it, use from_numpy with a gradient of its own, such as {framework.recipe}."
    )


class MappedFunctions:
    """The functions of an engine, from a function of one batch member and a framework.

    Each is mapped over the batch. Arguments that members share have batch dimensions of size 1, and
    are not mapped over.
    """

    def __init__(
        self, fn: Function, framework: Framework, name: str, instead: float | None
    ) -> None:
        """`instead` is the number that replaces the value where the engine fails."""
        self._fn, self._framework, self._name, self._instead = fn, framework, name, instead
        self._compiled: dict[Any, list[Function]] = {}
        self._raised: dict[Any, type] = {}  # what is raised for tensors without values
        self._spaces: dict[Any, Space] = {}

    @property
    def functions(self) -> Mapping[str, Sequence[Function]]:
        """The functions that answer each question."""
        return {key: [functools.partial(self._answer, key)] for key in QUESTIONS}

    def value_space(self, bound: BoundArguments, dtype: np.dtype[Any]) -> Space:
        """The value for these arguments, if floating ones have this dtype."""
        leaves = specs_of(bound.leaves, dtype)
        self._refuse_text(leaves)
        key = *(s if isinstance(s, tuple) else type(s) for s in leaves), repr(bound.like)
        if key not in self._spaces:
            found = value_space(shapes_of(self._function(bound.like, ()), leaves))
            check_fills(found, self._instead)
            self._spaces[key] = found
        return self._spaces[key]

    def _refuse_text(self, leaves: Sequence[Any]) -> None:
        """Raises for text, in leaves or in their specs."""
        for x in leaves:
            dtype = x[1] if isinstance(x, tuple) else getattr(x, "dtype", None)
            is_refused = isinstance(x, (str, bytes)) and not self._framework.takes_text
            if is_refused or (dtype is not None and np.dtype(dtype).kind == "O"):
                raise WrongUseError(
                    f"{self._name} has an argument that is text, which {self._framework.title} "
                    "does not take. Bind it with functools.partial, or encode it as numbers."
                )

    def _function(self, like: Structure, places: Sequence[int]) -> Differentiable:
        return Differentiable(self._framework, self._name, self._fn, like, places)

    def _answer(self, key: str, layout: Layout, leaves: Leaves) -> Structure:
        """The answer to a question for all members, compiled once for each form of arguments."""
        xs, places, vectors = layout.of_framework(key, leaves)
        self._refuse_text(xs)
        is_alone = key == "value and Jacobian" and not places
        if is_alone:
            check_floats(self._name, xs)
            key = "value"
        batch, _ = layout.batch_and_events(key, leaves)
        groups, dims = _mapped(batch, [xs, *vectors])
        form = key, places, dims, repr(layout.like)
        member = self._function(layout.like, places)
        fs = [getattr(member, method) for method in _METHODS[key]]
        if form not in self._compiled:
            self._compiled[form] = [self._framework.compiled(f, dims) for f in fs]
        try:
            answer = _first(self._compiled[form], groups)
        except WrongUseError:
            raise
        except Exception as error:
            if self._framework.advice(error) is None:
                if form not in self._raised:
                    self._raised[form] = type(self._framework.raised(fs[0], dims, groups))
                if self._raised[form] is not type(error):
                    raise
            events = [x.shape[len(batch) :] for x in xs if isinstance(x, np.ndarray)]
            raise of_every_point(self._framework, self._name, error, events) from error
        if key == "value and Jacobian":
            return answer[0], layout.like_points(answer[1])
        if key == "jvp":
            answer, holds = answer
            if not np.all(holds):
                raise WrongUseError(_NOT_LINEAR.format(self._name))
        if is_alone:
            return answer, None
        return answer if QUESTIONS[key].like_value else layout.like_points(answer)


def _mapped(batch: shapes.Shape, groups: Sequence[Leaves]) -> tuple[list[Leaves], Dims]:
    """The leaves without batch dimensions that members share, and the dimensions to map over."""
    # A number of Python belongs to all members, even if there is one.
    count, alone = len(batch), (None,) * len(batch)
    fronts = [
        [leaf.shape[:count] if isinstance(leaf, np.ndarray) else alone for leaf in group]
        for group in groups
    ]
    dims = tuple(
        tuple(tuple(0 if front[k] == size else None for front in group) for group in fronts)
        for k, size in enumerate(batch)
    )
    squeezed: list[Leaves] = [
        tuple(
            leaf.squeeze(tuple(k for k, size in enumerate(batch) if front[k] != size))
            if isinstance(leaf, np.ndarray)
            else leaf
            for leaf, front in zip(group, own, strict=True)
        )
        for group, own in zip(groups, fronts, strict=True)
    ]
    return squeezed, dims


def _first(fs: list[Function], groups: Sequence[Leaves]) -> Structure:
    """The result of the first function that does not raise, with which it begins the next time."""
    try:
        return fs[0](*groups)
    except Exception:
        for k, f in enumerate(fs[1:], 1):
            with contextlib.suppress(Exception):
                result = f(*groups)
                del fs[:k]
                return result
        raise


_NOT_LINEAR = (
    "{0} has a rule for reverse mode alone, which is not linear in the upstream gradient. So there "
    "is no derivative in forward mode, nor a second derivative that needs one. Use reverse mode; "
    "or from_numpy, with jvp=."
)

# The methods of `Differentiable` that answer a question, the first that works.
_METHODS = {
    "value": ["value"],
    "value and Jacobian": ["value_and_gradient"],
    "vjp": ["vjp"],
    "jvp": ["jvp", "jvp_by_reverse_mode"],
    "hessp": ["hessian", "hessian_by_reverse_mode"],
    "hessp of a sum": ["hessian", "hessian_by_reverse_mode"],
}
