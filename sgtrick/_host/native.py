"""JAX functions as operations of the graph: they compile under XLA, and can be stored."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls
from sgtrick._core import embedding
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._host.arguments import (
    broadcast_batches,
    by_position,
    tensors_of,
)
from sgtrick._host.derived import checked, untraceable
from sgtrick._host.engine import WrongUseError, floating
from sgtrick._host.jax import Jax, wide
from sgtrick._tensorflow import autograph, tapes, tracing
from sgtrick._tensorflow.mapping import map_jax_by
from sgtrick._types import (
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

_JAX = Jax(jit=True)

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
        ins: Sequence[Names],
        outs: Sequence[Names],
    ) -> None:
        """`f` returns a tuple of arrays, of which the first ones, as many as `outs`, are floating.

        Args:
            name: The function's name in errors.
            f: The function.
            places: The indices of its floating arguments.
            ins: The batch dimensions of its arguments.
            outs: Those of its floating results.
        """
        self._name, self._f, self._places, self._ins, self._outs = name, f, places, ins, outs
        self._mapped: dict[tuple[bool, ...], Operation] = {}
        self._functions: dict[tuple[Spec, ...], ConcreteFunction] = {}

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        """The results, with their derivatives."""

        def pull(*upstream: Tensor) -> list[Gradient]:
            us = map(_shaped, upstream, ys)
            pulled = dict(zip(self._places, self._vjp(*xs, *us), strict=True))
            return [pulled.get(i) for i in range(len(xs))]

        def push(*tangents: Tangent) -> list[Tangent]:
            ts = [_shaped(tangents[i], xs[i]) for i in self._places]
            return list(self._jvp(*xs, *ts))

        def batched(inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
            tensors, stacked = zip(*inputs, strict=True)
            return self.over(stacked)(*tensors)[: len(self._outs)]

        with tapes.not_recording():
            ys = list(self._traced(*map(tf.stop_gradient, xs)))
        count = len(self._outs)
        floats = keep(ys[:count], xs, Rule(self._name, pull, push, batched=batched))
        return [*floats, *ys[count:]]

    @functools.cached_property
    def _vjp(self) -> "Operation":
        """From the arguments and upstream gradients to the gradients of floating arguments."""
        n, places, ins = len(self._ins), self._places, (*self._ins, *self._outs)

        def vjp(*args: Any) -> tuple[Any, ...]:
            xs, us = args[:n], args[n:]
            ys, pull = jax.vjp(self._of_floats(xs), [xs[i] for i in places])
            (gradients,) = pull(tuple(map(_like, us, ys)))
            return tuple(gradients)

        all_places = [*places, *range(n, len(ins))]
        return Operation(self._name, vjp, all_places, ins, [ins[i] for i in places])

    @functools.cached_property
    def _jvp(self) -> "Operation":
        """From the arguments and tangents of the floating ones to the tangents of the results."""
        n, places = len(self._ins), self._places
        ins = (*self._ins, *(self._ins[i] for i in places))

        def jvp(*args: Any) -> tuple[Any, ...]:
            xs, ts = args[:n], args[n:]
            points = [xs[i] for i in places]
            tangents = list(map(_like, ts, points))
            pushed: tuple[Any, ...] = jax.jvp(self._of_floats(xs), (points,), (tangents,))[1]
            return pushed

        return Operation(self._name, jvp, [*places, *range(n, len(ins))], ins, self._outs)

    def _of_floats(self, xs: Sequence[Any]) -> Function:
        """The floating results as a function of the floating arguments."""

        def f(points: Sequence[Any]) -> tuple[Any, ...]:
            own = dict(zip(self._places, points, strict=True))
            return tuple(self._f(*(own.get(i, x) for i, x in enumerate(xs)))[: len(self._outs)])

        return f

    def _traced(self, *xs: Tensor) -> Sequence[Tensor]:
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
        with wide(np.dtype(x.dtype.as_numpy_dtype) for x in xs), tapes.not_recording():
            ys = jax2tf.convert(
                self._f,
                with_gradient=False,
                polymorphic_shapes=[self._shape(i, x) for i, x in enumerate(xs)],
                native_serialization_platforms=_platforms(),
            )(*xs)
        map_jax_by(tf.compat.v1.get_default_graph(), self._of_batch)
        return tuple(ys)

    def _of_batch(self, xs: Sequence[Tensor], stacked: Sequence[bool]) -> Sequence[Tensor]:
        """The results for all members of a batch, without their derivatives."""
        return self.over(stacked)._traced(*xs)

    def over(self, stacked: Sequence[bool]) -> "Operation":
        """The operation for all members of a batch; `stacked` tells which arguments differ."""
        key = tuple(stacked)
        if not any(key):
            return self
        if key not in self._mapped:
            batch = f"n{len(set(itertools.chain(*self._ins)))}"
            self._mapped[key] = Operation(
                self._name,
                jax.vmap(self._f, in_axes=tuple(0 if is_stacked else None for is_stacked in key)),
                self._places,
                [(batch, *own) if s else own for own, s in zip(self._ins, key, strict=True)],
                [(batch, *own) for own in self._outs],
            )
        return self._mapped[key]

    def _shape(self, i: int, x: Tensor) -> str:
        """The shape of an argument for JAX, in which unknown dimensions have names."""
        names = [*self._ins[i], *(f"x{i}_{k}" for k in range(x.shape.rank - len(self._ins[i])))]
        sizes = zip(x.shape.as_list(), names, strict=True)
        return f"({', '.join(name if n is None else str(n) for n, name in sizes)})"


def _shaped(t: Tensor | None, like: Tensor) -> Tensor:
    """An upstream gradient or tangent, whose static shape TensorFlow may have lost."""
    t = tf.zeros_like(like) if t is None else t
    t.set_shape(like.shape)
    return t


def _like(v: Any, x: Any) -> Any:
    """An array in the shape and dtype of another one. Its size may have another name in JAX."""
    for axis, (n, m) in enumerate(zip(v.shape, x.shape, strict=True)):
        if n is not m and str(n) != str(m):
            v = jnp.take(v, jnp.arange(m), axis)
    return v.astype(x.dtype)


def _platforms() -> tuple[str, ...]:
    """Where TensorFlow may run the operations."""
    return ("cpu", "cuda") if tf.config.list_physical_devices("GPU") else ("cpu",)


def as_operations(
    event_ndims: int | Structure, has_aux: bool, dtype: DTypeLike, name: str | None, fn: Function
) -> Decorated:
    """A JAX function of one batch member as a function of tensors; see `from_jax`."""

    def make(function: calls.Callee) -> Function:
        of_tensors = _OfTensors(
            function, name or function.name, event_ndims, has_aux, floating(dtype), {}
        )
        return autograph.form(lambda _, args, kwargs: of_tensors(args, kwargs))

    calls.check_function(fn, "fn")
    return calls.as_form(fn, make)


class _OfTensors(NamedTuple):
    """That function of tensors.

    Attributes:
        function: The JAX function.
        name: Its name in errors.
        event_ndims: See `from_jax`.
        has_aux: See `from_jax`.
        dtype: That of floating arguments in JAX.
        operations: The operation, and the structures of value and aux, by that of the arguments
            and by their shapes and dtypes, on all of which they may depend.
    """

    function: calls.Callee
    name: str
    event_ndims: int | Structure
    has_aux: bool
    dtype: np.dtype[Any]
    operations: dict[Any, tuple[Operation, Structure, Structure]]

    def __call__(self, args: Args, kwargs: Kwargs) -> Structure:
        """The value, or `(value, aux)`."""
        own = self.function.receivers(args)
        args, flat = by_position(self.function, args, kwargs, self.event_ndims, self.name, own=own)
        paths, ndims = [path for path, *_ in flat], [n for *_, n in flat]
        xs, _, value_dtype = tensors_of(flat, self.dtype)
        self._check(xs, paths)
        with tf.name_scope(_SCOPE):
            xs = [tf.cast(x, self.dtype) if x.dtype.is_floating else x for x in xs]
            operation, value, aux = self._operation(args[:own], args[own:], xs, ndims)
            # The others are the same for all members.
            stacked = [x.shape.rank > n for x, n in zip(xs, ndims, strict=True)]
            points, batch = broadcast_batches(
                *(list(itertools.compress(t, stacked)) for t in (xs, ndims, paths))
            )
            for _ in range(batch.rank):
                operation = operation.over(stacked)
            of_members = iter([_without_empty(x, batch) for x in points])
            xs = [next(of_members) if s else x for x, s in zip(xs, stacked, strict=True)]
            if batch.num_elements():
                ys = operation(*xs)
            else:  # none, or unknown
                shape = tf.shape(points[0])[: batch.rank]
                is_empty = tf.equal(tf.reduce_prod(shape), 0)
                # Not by what was added, where derivatives may not be finite.
                xs = [tf.where(is_empty, tf.stop_gradient(x), x) for x in xs]
                ys = [_cut(y, shape, batch) for y in operation(*xs)]
        n = len(tf.nest.flatten(value))
        y = tf.nest.pack_sequence_as(value, [tf.cast(y, value_dtype) for y in ys[:n]])
        if not self.has_aux:
            return y
        inputs = [x for x in xs if x.dtype.is_floating]
        others = [embedding.auxiliary(self.name, a, inputs) for a in ys[n:]]
        return y, *tf.nest.pack_sequence_as(aux, others)

    def _check(self, xs: Sequence[Tensor], paths: Sequence[str]) -> None:
        if not any(x.dtype.is_floating for x in xs):
            raise WrongUseError(
                f"{self.name} has no argument of a floating dtype. Pass an argument as a float, "
                "or call the function itself."
            )
        for path, x in zip(paths, xs, strict=True):
            if x.dtype == tf.string:
                raise TypeError(f"{path} is a string, which JAX does not take.")
            if x.shape.rank is None:
                raise ValueError(
                    f"{path} has an unknown rank. Set its rank, for example by tf.ensure_shape, or "
                    "leave native=True out."
                )

    def _operation(
        self,
        receivers: Args,
        arguments: Args,
        xs: Sequence[Tensor],
        ndims: Sequence[int],
    ) -> tuple[Operation, Structure, Structure]:
        """The operation of one member, and the structures of its value and aux."""
        like = _structure(arguments)
        leaves = tuple(
            (
                tuple(12 if n is None else n for n in x.shape[x.shape.rank - ndim :]),
                x.dtype.as_numpy_dtype,
            )
            for x, ndim in zip(xs, ndims, strict=True)
        )
        key = repr(like), leaves
        if key in self.operations:
            return self.operations[key]

        def member(*leaves: Any) -> Args:
            returned = self.function.f(*receivers, *tf.nest.pack_sequence_as(like, leaves))
            return checked(returned, _JAX, self.name, has_aux=self.has_aux)

        def flat(*leaves: Any) -> tuple[Any, ...]:
            found = member(*leaves)
            if _structure(found) != structure:
                raise WrongUseError(
                    f"{self.name} returned the structure {_structure(found)}, and {structure} for "
                    "other sizes. It depends on a dimension that is unknown while TensorFlow "
                    "traces: set it, for example by tf.ensure_shape, or leave native=True out."
                )
            return tuple(tf.nest.flatten(found))

        specs = [jax.ShapeDtypeStruct(*leaf) for leaf in leaves]
        try:
            with wide(spec.dtype for spec in specs):
                structure = _structure(jax.eval_shape(member, *specs))
        except WrongUseError:
            raise
        except Exception as error:
            raise untraceable(self.name, [spec.shape for spec in specs], error) from error
        value, aux = structure[0], structure[1:]
        outs = [()] * len(tf.nest.flatten(value))
        places = [i for i, x in enumerate(xs) if x.dtype.is_floating]
        operation = Operation(self.name, flat, places, [()] * len(xs), outs)
        if not receivers:  # those of a method would be kept for ever
            self.operations[key] = operation, value, aux
        return operation, value, aux


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
