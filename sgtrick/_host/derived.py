"""Engines made of functions that another framework differentiates."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._host.arguments import is_by_argument
from sgtrick._host.engine import Functions, WrongUseError
from sgtrick._types import Args, Function, Structure

Leaves = Sequence[Any]  # arrays of NumPy, or tensors of the framework
# The leaves to map over: for each batch dimension in order, for each group of leaves, the axis.
Dims = tuple[tuple[tuple[int | None, ...], ...], ...]


class Framework(Protocol):
    """What a framework must provide: its arrays, here called tensors, are leaves of structures."""

    def vjp(self, f: Function, points: Leaves, *, has_aux: bool = False) -> Any:
        """`(f(points), pullback)`, or `(value, pullback, aux)`, as `jax.vjp` returns them."""

    def jvp(self, f: Function, points: tuple[Leaves], tangents: tuple[Leaves]) -> Any:
        """`(f(points), tangent)`, as `jax.jvp` returns them."""

    def symmetric(self, gradient: Function, points: Leaves, vs: Leaves) -> Leaves:
        """The derivative of a gradient at these points times `vs`."""

    def like(self, u: Any, y: Any) -> Any:
        """A tensor, or a number for all entries, as a tensor of the shape and dtype of `y`."""

    def compiled(self, f: Function, dims: Dims) -> Function:
        """A function of groups of tensors, mapped over these axes, as one of arrays."""

    def shapes(self, f: Function, leaves: Sequence[tuple[shapes.Shape, Any]]) -> Structure:
        """The shapes that `f` returns for tensors of these shapes and dtypes."""

    def refusal(self, value: Any) -> str | None:
        """Why what `f` returned is not a tensor that has derivatives; None if it is one."""

    def is_connected(self, value: Any) -> bool:
        """Whether a value depends on the points with respect to which it is differentiated."""

    def advice(self, error: Exception) -> str | None:
        """What to do about an error that the function raises at every point; None if unknown."""


class _Split(NamedTuple):
    """How points, which are differentiated, and constants, all others, form the arguments."""

    args: Args  # with None as its leaves
    places: tuple[int, ...]  # of the points
    size: int  # of all leaves

    def joined(self, points: Leaves, constants: Leaves) -> Args:
        """The arguments with these leaves."""
        own, rest = dict(zip(self.places, points, strict=True)), iter(constants)
        flat = [own[k] if k in own else next(rest) for k in range(self.size)]
        return tf.nest.pack_sequence_as(self.args, flat)  # type: ignore[no-any-return]

    def packed(self, parts: Leaves) -> Structure:
        """One part for each point, in the structure that `from_numpy` expects of a gradient."""
        own = dict(zip(self.places, parts, strict=True))
        packed = tf.nest.pack_sequence_as(self.args, [own.get(k) for k in range(self.size)])
        return packed[0] if len(packed) == 1 else packed


def _split(args: Args) -> tuple[_Split, list[Leaves]]:
    """How the leaves are split, and the groups: points and constants."""
    leaves = tf.nest.flatten(args)
    places = tuple(k for k, leaf in enumerate(leaves) if leaf.dtype.kind == "f")
    split = _Split(tf.nest.map_structure(lambda _: None, args), places, len(leaves))
    constants = [leaf for k, leaf in enumerate(leaves) if k not in places]
    return split, [[leaves[k] for k in places], constants]


def _present(vs: Structure) -> Leaves:
    """The leaves of a vector like the arguments, in which None stands for those of constants."""
    return [v for v in tf.nest.flatten(vs) if v is not None]


def _common(a: tf.TensorShape, b: tf.TensorShape) -> tf.TensorShape:
    """Two shapes of one rank as one, in which dimensions that differ are unknown."""
    return tf.TensorShape([n if n == m else None for n, m in zip(a, b, strict=True)])


def checked(returned: Structure, framework: Framework, name: str, *, has_aux: bool) -> Args:
    """What a function returned, as `(value,)` or `(value, aux)`."""
    value: Structure = returned
    aux: Args = ()
    if has_aux:
        if not structures.is_pair(returned):
            raise WrongUseError(
                f"{name} must return (value, aux), got {type(returned).__name__}. Return both, or "
                "remove has_aux=True."
            )
        value, aux = returned[0], (returned[1],)
    for leaf in tf.nest.flatten(value):
        why = framework.refusal(leaf)
        if why is not None:
            raise WrongUseError(f"{name} must return a value with derivatives, {why}")
    return value, *aux


def untraceable(name: str, given: Sequence[shapes.Shape], error: Exception) -> WrongUseError:
    """The error for a function that raised for arguments of these shapes."""
    shown = ", ".join(map(shapes.show, given))
    return WrongUseError(
        f"{name} raised {type(error).__name__}: {error}\n"
        f"It was traced for arguments of the shapes {shown}, those of one member. If that is not "
        "what it takes, check event_ndims."
    )


class Derived:
    """The functions of an engine, from a function of one batch member and a framework.

    Arguments that members share have batch dimensions of size 1, and are not mapped over.
    """

    def __init__(
        self,
        fn: Function,
        framework: Framework,
        event_ndims: int | Structure,
        has_aux: bool,
        name: str,
    ) -> None:
        self._fn, self._framework, self._has_aux = fn, framework, has_aux
        self._event_ndims, self._name = event_ndims, name
        self._compiled: dict[Any, Function] = {}
        self._shapes: dict[Any, Structure] = {}

    def functions(self, *, of_number: bool) -> Functions:
        """The functions for a value that is one number, or for any other."""
        if of_number:
            return Functions(self.value_and_gradient, hessp=self.hessian_times)
        return Functions(self.value, vjp=self.vjp, jvp=self.jvp, hessp=self.hessian_of_sum_times)

    def value_shape(self, args: Args, leaves: Sequence[tuple[shapes.Shape, Any]]) -> Structure:
        """The shapes of the value of one member.

        Args:
            args: The structure of the arguments.
            leaves: The event shapes of their leaves, and the dtypes.
        """
        key = *leaves, repr(args)
        if key not in self._shapes:

            def f(*given: Any) -> Structure:
                return self._checked(self._fn(*tf.nest.pack_sequence_as(args, given)))[0]

            self._shapes[key] = self._found_shapes(f, leaves)
        return self._shapes[key]

    def _found_shapes(self, f: Function, leaves: Sequence[tuple[shapes.Shape, Any]]) -> Structure:
        """The shapes; where some dimensions are unknown, two sizes tell what depends on them."""
        first, second = (
            [(tuple(size if n is None else n for n in shape), dtype) for shape, dtype in leaves]
            for size in (12, 24)  # which many numbers divide: x.reshape(-1, 3), x[::2]
        )
        try:
            found = self._advised(self._framework.shapes, f, first)
            if first == second:
                return found
            return tf.nest.map_structure(_common, found, self._framework.shapes(f, second))
        except WrongUseError:
            raise
        except Exception as error:
            if first != second and isinstance(error, (TypeError, ValueError)):
                return ()  # it takes neither size: one number, unless the caller states a shape
            raise untraceable(self._name, [shape for shape, _ in leaves], error) from error

    def value_and_gradient(self, *args: Structure) -> Structure:
        """The value (or value and aux) and the gradients of a batch, of one number each."""
        split, groups = _split(args)
        if not split.places:
            raise WrongUseError(
                f"{self._name} has no argument of a floating dtype, so it has no gradient. Pass an "
                "argument as a float, or call the function itself."
            )

        def run(points: Leaves, constants: Leaves) -> Structure:
            f = self._function(split, constants, with_aux=self._has_aux)
            value, pull, *aux = self._framework.vjp(f, points, has_aux=self._has_aux)
            if tf.nest.is_nested(value):
                raise WrongUseError(
                    f"{self._name} must return one number, got {type(value).__name__}. The "
                    "gradient is computed by autodiff: use from_numpy for a function that returns "
                    "its gradient, has_aux=True for one that returns (value, aux), and "
                    "value_shape= for one with several results."
                )
            (gradients,) = pull(self._framework.like(1.0, value))
            return (value, *aux) if aux else value, gradients

        value, gradients = self._run(run, "gradient", split, groups)
        return value, split.packed(gradients)

    def value(self, *args: Structure) -> Structure:
        """The value, or value and aux, of a batch."""
        split, groups = _split(args)

        def run(points: Leaves, constants: Leaves) -> Structure:
            value, *aux = self._checked(self._fn(*split.joined(points, constants)))
            return (value, *aux) if self._has_aux else value

        return self._run(run, "value", split, groups)

    def vjp(self, *args_and_u: Structure) -> Structure:
        """The gradients of the sum of `u * value`."""
        *args, u = args_and_u
        split, groups = _split(tuple(args))

        def run(points: Leaves, constants: Leaves, us: Leaves) -> Leaves:
            return self._gradient(split, constants, us)(points)

        gradients = self._run(run, "vjp", split, [*groups, tf.nest.flatten(u)])
        return split.packed(gradients)

    def jvp(self, *args_and_t: Structure) -> Structure:
        """The tangent of the value."""
        *args, t = args_and_t
        split, groups = _split(tuple(args))

        def run(points: Leaves, constants: Leaves, ts: Leaves) -> Structure:
            f = self._function(split, constants)
            return self._framework.jvp(f, (points,), (ts,))[1]

        return self._run(run, "jvp", split, [*groups, _present(t)])

    def hessian_times(self, *args_and_v: Structure) -> Structure:
        """The Hessian of each member of a batch, one number each, times `v`."""
        *args, v = args_and_v
        return self._hessian(args, [], v)

    def hessian_of_sum_times(self, *args_u_and_v: Structure) -> Structure:
        """The Hessian of the sum of `u * value` times `v`."""
        *args, u, v = args_u_and_v
        return self._hessian(args, tf.nest.flatten(u), v)

    def _hessian(self, args: Leaves, us: Leaves, v: Structure) -> Structure:
        split, groups = _split(tuple(args))

        def run(points: Leaves, constants: Leaves, us: Leaves, vs: Leaves) -> Leaves:
            gradient = self._gradient(split, constants, us or [1.0])
            return self._framework.symmetric(gradient, points, vs)

        return split.packed(self._run(run, "hessian", split, [*groups, us, _present(v)]))

    def _function(
        self, split: _Split, constants: Leaves, *, with_aux: bool = False
    ) -> Callable[[Leaves], Structure]:
        """The user's function as one of the points, to be differentiated by them."""

        def f(points: Leaves) -> Structure:
            value, *aux = self._checked(self._fn(*split.joined(points, constants)))
            if not any(map(self._framework.is_connected, tf.nest.flatten(value))):
                raise WrongUseError(
                    f"{self._name} returns a value that is cut off from its arguments, so that all "
                    "gradients would be zero. The usual causes are .item(), float(), .detach(), "
                    ".numpy(), torch.no_grad(), torch.tensor(...) of a tensor, and casts to "
                    "integers. Remove them; or, if the value is a constant, add 0 * x.sum() to it."
                )
            return (value, *aux) if with_aux else value

        return f

    def _gradient(self, split: _Split, constants: Leaves, us: Leaves) -> Callable[[Leaves], Leaves]:
        """The gradients of the sum of `u * value`, as a function of the points."""
        f, framework = self._function(split, constants), self._framework

        def gradient(points: Leaves) -> Leaves:
            ys, pull = framework.vjp(lambda points: tf.nest.flatten(f(points)), points)
            (gradients,) = pull(list(map(framework.like, us, ys)))
            return gradients  # type: ignore[no-any-return]

        return gradient

    def _checked(self, returned: Structure) -> Args:
        return checked(returned, self._framework, self._name, has_aux=self._has_aux)

    def _run(self, run: Function, what: str, split: _Split, groups: Sequence[Leaves]) -> Structure:
        """Calls a function of groups, which is compiled once for each structure of arguments."""
        groups, dims = self._mapped(split, groups)
        key = what, split.places, dims, repr(split.args)
        if key not in self._compiled:
            self._compiled[key] = self._framework.compiled(run, dims)
        return self._advised(self._compiled[key], *groups)

    def _mapped(self, split: _Split, groups: Sequence[Leaves]) -> tuple[list[Leaves], Dims]:
        """The leaves without their batch dimensions of size 1, and the dimensions to map over."""
        first, ndims = groups[0 if 0 in split.places else 1][0], self._event_ndims
        if is_by_argument(ndims):  # of the first argument with leaves
            ndims = ndims[next(k for k, arg in enumerate(split.args) if tf.nest.flatten(arg))]
        count = first.ndim - tf.nest.flatten(ndims)[0]
        fronts = [[leaf.shape[:count] for leaf in group] for group in groups]
        batch = np.broadcast_shapes(*(front for group in fronts for front in group))
        dims = tuple(
            tuple(tuple(0 if front[k] == size else None for front in group) for group in fronts)
            for k, size in enumerate(batch)
        )
        squeezed: list[Leaves] = [
            tuple(
                leaf.squeeze(tuple(k for k, size in enumerate(batch) if front[k] != size))
                for leaf, front in zip(group, own, strict=True)
            )
            for group, own in zip(groups, fronts, strict=True)
        ]
        return squeezed, dims

    def _advised(self, f: Function, *args: Any) -> Structure:
        """`f(*args)`, with advice added to the framework's errors."""
        try:
            return f(*args)
        except WrongUseError:
            raise
        except Exception as error:
            advice = self._framework.advice(error)
            if advice is None:
                raise
            said = f"{type(error).__name__}: {error}"
            raise WrongUseError(f"{self._name} {advice}\n{said}") from error
