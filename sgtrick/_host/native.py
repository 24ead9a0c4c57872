"""JAX functions as operations of the graph: they compile under XLA, and can be stored."""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls
from sgtrick._core import unknown
from sgtrick._core.kept import WithTranspose, with_derivatives
from sgtrick._core.rule import Rule, Stated
from sgtrick._host.autodiff import Differentiable, check_floats, of_every_point, shapes_of
from sgtrick._host.bound_arguments import Leaf, bind, broadcast_batches, standing_for
from sgtrick._host.checks import DATA
from sgtrick._host.engine import WrongUseError, floating
from sgtrick._host.jax import Jax, x64_for
from sgtrick._tensorflow import autograph, tapes, tracing
from sgtrick._tensorflow.graphs import here
from sgtrick._tensorflow.pfor import map_jax_by
from sgtrick._types import (
    Argnums,
    Args,
    ConcreteFunction,
    Decorated,
    DTypeLike,
    Function,
    Gradient,
    Kwargs,
    Spec,
    Structure,
    Tangent,
    Tensor,
)

try:
    from jax.experimental import jax2tf
except ImportError as error:
    raise ImportError(
        f"from_jax(native=True) needs jax.experimental.jax2tf, which JAX {jax.__version__} lacks. "
        "Install another version of JAX, or leave native out."
    ) from error

_JAX = Jax()

# The names of the batch dimensions of a tensor, the outermost first.
Names = tuple[str, ...]


class Operation:
    """A function of arrays as operations of TensorFlow, with derivatives of every order by JAX.

    The operations come with their own rule for `tf.vectorized_map`, which is `jax.vmap`.
    """

    def __init__(
        self,
        name: str,
        f: Function,
        places: Sequence[int],
        refused: Mapping[int, str],
        ins: Sequence[Names],
        outs: Sequence[Names],
        has_jvp: bool | None = None,
    ) -> None:
        """`f` returns a tuple of floating arrays.

        Args:
            name: The function's name in errors.
            f: The function.
            places: The indices of the arguments that have derivatives.
            refused: For other floating arguments the error for a derivative by these.
            ins: The batch dimensions of its arguments.
            outs: The batch dimensions of its results.
            has_jvp: Whether JAX has forward mode of it; None to find out when a gradient is taken.
        """
        self.name, self._f, self.places, self.refused = name, f, places, refused
        self._ins, self._outs = ins, outs
        self._mapped: dict[tuple[bool, ...], Operation] = {}
        self._functions: dict[tuple[Spec, ...], ConcreteFunction] = {}
        self._has_jvp = has_jvp

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        """The results, with their derivatives."""
        return _Call(self, xs).results()

    def is_pushed(self, xs: Sequence[Tensor]) -> bool:
        """Whether JAX has forward mode of the function; false if it does not say."""
        if self._has_jvp is None:
            likes = [
                jax.ShapeDtypeStruct([n or 1 for n in x.shape], x.dtype.as_numpy_dtype) for x in xs
            ]
            with x64_for([np.empty(0, like.dtype) for like in likes]):
                try:
                    # What is not there is only missed when it is lowered.
                    jax.jit(self._jvp._f).lower(*likes, *(likes[i] for i in self.places))
                    self._has_jvp = True
                except (TypeError, ValueError):
                    self._has_jvp = False
        return self._has_jvp

    @functools.cached_property
    def vjp(self) -> "Operation":
        """From the arguments and upstream gradients to the gradients of floating arguments."""
        return self._product("vjp", self._outs, [self._ins[i] for i in self.places])

    def pushed(self, *xs: Tensor) -> list[Tensor]:
        """From the arguments and tangents of the floating ones to the tangents of the results."""
        try:
            return self._jvp(*xs)
        except WrongUseError as error:
            with contextlib.suppress(WrongUseError):
                return self._jvp_by_reverse_mode(*xs)
            raise error from None

    @functools.cached_property
    def _jvp(self) -> "Operation":
        return self._product("jvp", [self._ins[i] for i in self.places], self._outs)

    @functools.cached_property
    def _jvp_by_reverse_mode(self) -> "Operation":
        ins = [self._ins[i] for i in self.places]
        return self._product("jvp_by_reverse_mode", ins, self._outs)

    def _product(self, method: str, vectors: Sequence[Names], outs: Sequence[Names]) -> "Operation":
        """The operation of a method of `Differentiable`, whose vectors are arguments too."""
        n, like = len(self._ins), [None] * len(self._ins)
        multiply = getattr(Differentiable(_JAX, self.name, self._f, like, self.places), method)
        ins = [*self._ins, *vectors]

        def product(*args: Any) -> tuple[Any, ...]:
            found = multiply(args[:n], args[n:])
            if method == "vjp":
                return tuple(found)
            tangents, holds = found
            # Nothing can raise here.
            return tuple(
                t if isinstance(holds, tuple) else jnp.where(holds, t, jnp.nan) for t in tangents
            )

        return Operation(
            self.name,
            product,
            [*self.places, *range(n, len(ins))],
            self.refused,
            ins,
            outs,
            has_jvp=True,  # what is asked is whether the function itself has one
        )

    def message_of(self, error: WrongUseError) -> str:
        """The error for a derivative that JAX cannot compute."""
        raised = error.__cause__ or error
        return (
            f"{self.name} was asked for a derivative that JAX cannot compute: "
            f"{type(raised).__name__}: {raised}\nUse from_numpy with a function for it."
        )

    def traced(self, *xs: Tensor) -> Sequence[Tensor]:
        """The results, without derivatives."""
        # JAX lowers the function once for each signature. Known shapes are kept, as a `tf.function`
        # would not: unknown ones need assertions that a JAX which is newer than TensorFlow writes
        # in a form unknown to it.
        specs = tuple(tracing.specs_of(xs))
        if specs not in self._functions:
            self._functions[specs] = tracing.trace(self._lowered, specs)
        return self._functions[specs](*xs)  # type: ignore[no-any-return]

    def _lowered(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The operations, in the graph of a function of their own."""
        likes = [np.empty(0, x.dtype.as_numpy_dtype) for x in xs]
        f = jax2tf.convert(
            self._f,
            with_gradient=False,
            polymorphic_shapes=[self._shape(i, x) for i, x in enumerate(xs)],
            native_serialization_platforms=_platforms(),
        )
        with x64_for(likes), tapes.not_recording():
            try:
                ys = f(*xs)
            except WrongUseError:
                raise
            except Exception as error:
                events = [tuple(x.shape[len(own) :]) for x, own in zip(xs, self._ins, strict=True)]
                raise of_every_point(_JAX, self.name, error, events) from error
        map_jax_by(tf.compat.v1.get_default_graph(), self._of_batch)
        return tuple(ys)

    def _of_batch(self, xs: Sequence[Tensor], stacked: Sequence[bool]) -> Sequence[Tensor]:
        """The results for all members of a batch, without their derivatives."""
        return self.over(stacked).traced(*xs)

    def over(self, stacked: Sequence[bool]) -> "Operation":
        """The operation for all members of a batch; `stacked` tells which arguments differ."""
        key = tuple(stacked)
        if not any(key):
            return self
        if key not in self._mapped:
            batch = f"n{len(set(itertools.chain(*self._ins)))}"
            self._mapped[key] = Operation(
                self.name,
                jax.vmap(self._f, in_axes=tuple(0 if is_stacked else None for is_stacked in key)),
                self.places,
                self.refused,
                [(batch, *own) if s else own for own, s in zip(self._ins, key, strict=True)],
                [(batch, *own) for own in self._outs],
                self._has_jvp,
            )
        return self._mapped[key]

    def _shape(self, i: int, x: Tensor) -> str:
        """The shape of an argument for JAX, in which unknown dimensions have names."""
        names = [*self._ins[i], *(f"x{i}_{k}" for k in range(x.shape.rank - len(self._ins[i])))]
        sizes = zip(x.shape.as_list(), names, strict=True)
        return f"({', '.join(name if n is None else str(n) for n, name in sizes)})"


class _Call(Rule):
    """One call of an operation, and its derivatives by all its arguments."""

    def __init__(self, operation: Operation, xs: Sequence[Tensor]) -> None:
        # All that the rule uses is in the graph of the call.
        self._operation, self._xs = operation, list(map(here, xs))
        with tapes.not_recording():
            self._ys = list(operation.traced(*map(tf.stop_gradient, self._xs)))
        self.name = operation.name
        # A rule of JAX for reverse mode alone may not be linear, which `push` tests.
        rule = Stated(self.name, self._untested, self.push)
        self._tested = WithTranspose(rule, self.push, self._xs)

    def results(self) -> list[Tensor]:
        """The results, with their derivatives."""
        return with_derivatives(self._ys, self._xs, self)

    def pull(self, *upstream: Tensor) -> Sequence[Gradient]:
        """The gradients by the arguments, tested where JAX has reverse mode alone."""
        is_tested = not self._operation.is_pushed(self._xs)
        return self._tested.pull(*upstream) if is_tested else self._untested(*upstream)

    def _untested(self, *upstream: Tensor) -> list[Gradient]:
        operation, xs = self._operation, self._xs
        us = map(_shaped, upstream, self._ys)
        try:
            found: Sequence[Gradient] = operation.vjp(*xs, *us)
        except WrongUseError as error:
            points = [here(xs[i]) for i in operation.places]
            found = unknown.gradients(points, operation.message_of(error), upstream)
        pulled = dict(zip(operation.places, found, strict=True))
        for i, message in operation.refused.items():
            pulled[i] = unknown.gradient(here(xs[i]), message, upstream)
        return [pulled.get(i) for i in range(len(xs))]

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """The tangents of the results."""
        operation, xs = self._operation, self._xs
        ts = [_shaped(tangents[i], xs[i]) for i in operation.places]
        try:
            along: list[Tangent] = list(operation.pushed(*xs, *ts))
        except WrongUseError as error:
            ys = list(map(here, self._ys))
            along = list(unknown.gradients(ys, operation.message_of(error), ts))
        for i, message in operation.refused.items():
            moved = [_shaped(tangents[i], xs[i])]
            along = unknown.unless_moving(message, along, moved, [here(xs[i])])
        return along

    def batched(self, inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        """The results for all members of a `tf.vectorized_map`, with their derivatives."""
        tensors, stacked = zip(*inputs, strict=True)
        return self._operation.over(stacked)(*tensors)


def _shaped(t: Tensor | None, like: Tensor) -> Tensor:
    """An upstream gradient or tangent, whose static shape TensorFlow may have lost."""
    t = tf.zeros_like(like) if t is None else t
    t.set_shape(like.shape)
    return t


def _platforms() -> tuple[str, ...]:
    """Where TensorFlow may run the operations."""
    return ("cpu", "cuda") if tf.config.list_physical_devices("GPU") else ("cpu",)


def as_operations(
    event_ndims: int | Structure,
    argnums: Argnums | None,
    dtype: DTypeLike,
    name: str | None,
    fn: Function,
) -> Decorated:
    """A JAX function of one batch member as a function of tensors; see `from_jax`."""
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {type(fn).__name__}.")
    function = calls.Callee(fn)
    of_tensors = _OfTensors(
        function, name or function.name, event_ndims, argnums, floating(dtype), {}
    )
    form = autograph.form(lambda _, args, kwargs: of_tensors(args, kwargs))
    function.form = calls.imitate(form, fn)
    return function.form


class _OfTensors(NamedTuple):
    """A JAX function of one batch member, as a function of tensors.

    Attributes:
        function: The JAX function.
        name: Its name in errors.
        event_ndims: The event dimensions of its arguments, as stated.
        argnums: The arguments that have gradients, as stated.
        dtype: The dtype of floating arguments in JAX.
        operations: An operation, and the structure of its value, for each structure of the
            arguments and their shapes and dtypes, on all of which both may depend.
    """

    function: calls.Callee
    name: str
    event_ndims: int | Structure
    argnums: Argnums | None
    dtype: np.dtype[Any]
    operations: dict[Any, tuple[Operation, Structure]]

    def __call__(self, args: Args, kwargs: Kwargs) -> Structure:
        """The value at these arguments, with its derivatives."""
        bound = bind(
            self.function, args, kwargs, self.event_ndims, self.argnums, self.name, self.dtype
        )
        with tf.name_scope(_SCOPE):
            leaves = list(map(self._sent, bound.leaves))
            operation, value = self._operation(bound.like, leaves)
            # The others are the same for all members.
            stacked = [leaf.batch_ndims > 0 for leaf in leaves]
            points, batch = broadcast_batches([leaf for leaf in leaves if leaf.batch_ndims])
            for _ in range(batch.rank):
                operation = operation.over(stacked)
            some = iter([_without_empty(x, batch) for x in points])
            xs = [next(some) if s else leaf.x for leaf, s in zip(leaves, stacked, strict=True)]
            if batch.num_elements():
                ys = operation(*xs)
            else:  # none, or unknown
                shape = tf.shape(points[0])[: batch.rank]
                is_empty = tf.equal(tf.reduce_prod(shape), 0)
                # Not by what was added, where derivatives may not be finite.
                xs = [tf.where(is_empty, tf.stop_gradient(x), x) for x in xs]
                ys = [_cut(y, shape, batch) for y in operation(*xs)]
        return tf.nest.pack_sequence_as(value, [tf.cast(y, bound.dtype) for y in ys])

    def _sent(self, leaf: Leaf) -> Leaf:
        """A leaf in the dtype of JAX. A number of Python has none."""
        if leaf.is_floating:
            return leaf._replace(x=standing_for(leaf.x, tf.cast(leaf.x, self.dtype)))
        if isinstance(leaf.x, (str, bytes)) or (leaf.is_tensor and leaf.x.dtype == tf.string):
            raise TypeError(f"{leaf.path} is a string, which JAX does not take.")
        if leaf.is_tensor:
            return leaf
        dtypes = {float: self.dtype, bool: np.bool_, int: f"int{8 * self.dtype.itemsize}"}
        return leaf._replace(x=tf.constant(leaf.x, dtypes[type(leaf.x)]))

    def _operation(self, like: Structure, leaves: Sequence[Leaf]) -> tuple[Operation, Structure]:
        """The operation of one member, and the structure of its value."""
        specs = [
            (tuple(12 if n is None else n for n in leaf.event), leaf.x.dtype.as_numpy_dtype)
            for leaf in leaves
        ]
        check_floats(self.name, [np.empty(0, dtype) for _, dtype in specs])
        places = [i for i, leaf in enumerate(leaves) if leaf.is_point]
        key = repr(like), *specs, *places
        if key in self.operations:
            return self.operations[key]
        member = Differentiable(_JAX, self.name, self.function.f, like, places)

        def flat(*leaves: Any) -> tuple[Any, ...]:
            found = member.value(leaves)
            if _structure(found) != structure:
                raise WrongUseError(
                    f"{self.name} returned the structure {_structure(found)}, and {structure} for "
                    "other sizes. It depends on a dimension that is unknown while TensorFlow "
                    "traces: set it, for example by tf.ensure_shape, or leave native=True out."
                )
            return tuple(tf.nest.flatten(found))

        structure = _structure(shapes_of(member, specs))
        refused = {
            i: DATA.format(self.name, leaf.path, self.argnums)
            for i, leaf in enumerate(leaves)
            if leaf.is_floating and not leaf.is_selected
        }
        outs = [()] * len(tf.nest.flatten(structure))
        operation = Operation(self.name, flat, places, refused, [()] * len(leaves), outs)
        self.operations[key] = operation, structure
        return self.operations[key]


def _structure(structure: Structure) -> Structure:
    """The structure, with None as its leaves."""
    return tf.nest.map_structure(lambda _: None, structure)


# TensorFlow's error for a loaded model that is mapped names the operation, and nothing else.
_SCOPE = "JAX.Map_a_loaded_model_by_tf.map_fn_not_tf.vectorized_map"


def _without_empty(x: Tensor, batch: tf.TensorShape) -> Tensor:
    """A tensor whose batch dimensions are at least 1, as JAX requires; only empty ones grow."""
    if batch.num_elements():
        return x
    event = x.shape[batch.rank :]
    more = [[0, tf.maximum(1 - n, 0)] for n in tf.unstack(tf.shape(x)[: batch.rank])]
    padded = tf.pad(x, [*more, *[[0, 0]] * event.rank])
    padded.set_shape([*(n or None for n in batch), *event])
    return padded


def _cut(y: Tensor, shape: Tensor, batch: tf.TensorShape) -> Tensor:
    """A result without what `_without_empty` has added to a batch of this shape."""
    cut = y[tuple(map(slice, tf.unstack(shape)))]
    cut.set_shape(batch.concatenate(y.shape[batch.rank :]))
    return cut
