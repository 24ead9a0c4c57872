"""JAX functions as operations of the graph: they compile under XLA, and can be stored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls
from sgtrick._core import embedding
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._host.arguments import (
    broadcast_batches,
    event_ndims_of,
    tensors_of,
    with_event_ndims,
)
from sgtrick._host.derived import checked
from sgtrick._host.engine import WrongUseError, floating
from sgtrick._host.jax import Jax, wide
from sgtrick._tensorflow import tapes
from sgtrick._tensorflow.mapping import map_jax_by
from sgtrick._types import Args, DTypeLike, Function, Gradient, Kwargs, Structure, Tangent, Tensor

try:
    from jax.experimental import jax2tf
except ImportError as error:
    raise ImportError(
        f"from_jax(native=True) needs jax.experimental.jax2tf, which JAX {jax.__version__} lacks. "
        "Install another version of JAX, or leave native out."
    ) from error

Axes = tuple[int | None, ...]
# For each vmap around a function, the outermost first: the axis of each argument, and of each
# floating result, 0 or None.
Levels = tuple[tuple[Axes, Axes], ...]


class Operation:
    """A function of arrays as operations of TensorFlow, with derivatives of every order by JAX.

    The operations come with their own rule for `tf.vectorized_map`, which is `jax.vmap`.
    """

    def __init__(self, name: str, f: Function, levels: Levels = (), floats: int = 0) -> None:
        """`f` returns a tuple of arrays, the first `floats` of which are floating.

        It is a function that `levels` have mapped. Only names of dimensions depend on them.
        """
        self._name, self._f, self._levels, self._floats = name, f, levels, floats
        self._mapped: dict[Axes, Operation] = {}
        self._derivatives: dict[str, Operation] = {}
        # JAX lowers the function once for each signature. Known shapes are kept: unknown ones need
        # assertions that a JAX which is newer than TensorFlow writes in a form unknown to it.
        self._traced = tf.function(self._lowered, autograph=False)

    def __call__(self, *xs: Tensor) -> list[Tensor]:
        """The results, with their derivatives."""
        places = [i for i, x in enumerate(xs) if x.dtype.is_floating]

        def pull(*upstream: Tensor | None) -> list[Gradient]:
            pulled = dict(zip(places, self._vjp(len(xs), places)(*xs, *upstream), strict=True))
            return [pulled.get(i) for i in range(len(xs))]

        def push(*tangents: Tangent) -> list[Tangent]:
            given = [(xs[i], tangents[i]) for i in places]
            ts = [tf.zeros_like(x) if t is None else t for x, t in given]
            return list(self._jvp(len(xs), places)(*xs, *ts))

        def batched(inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
            tensors, stacked = zip(*inputs, strict=True)
            return self._over(stacked)(*tensors)[: self._floats]

        with tapes.not_recording():
            ys = list(self._traced(*map(tf.stop_gradient, xs)))
        floats = keep(ys[: self._floats], xs, Rule(self._name, pull, push, batched=batched))
        return [*floats, *ys[self._floats :]]

    def _vjp(self, count: int, places: Sequence[int]) -> "Operation":
        """From the arguments and upstream gradients to the gradients of floating arguments."""

        def vjp(*args: Any) -> tuple[Any, ...]:
            xs, us = args[:count], args[count:]
            ys, pull = jax.vjp(self._of_floats(xs, places), [xs[i] for i in places])
            (gradients,) = pull(tuple(u.astype(y.dtype) for u, y in zip(us, ys, strict=True)))
            return tuple(gradients)

        levels = tuple(((*ins, *outs), tuple(ins[i] for i in places)) for ins, outs in self._levels)
        return self._derived("vjp", vjp, levels, len(places))

    def _jvp(self, count: int, places: Sequence[int]) -> "Operation":
        """From the arguments and tangents of the floating ones to the tangents of the results."""

        def jvp(*args: Any) -> tuple[Any, ...]:
            xs, ts = args[:count], list(args[count:])
            f = self._of_floats(xs, places)
            return jax.jvp(f, ([xs[i] for i in places],), (ts,))[1]  # type: ignore[no-any-return]

        levels = tuple(((*ins, *(ins[i] for i in places)), outs) for ins, outs in self._levels)
        return self._derived("jvp", jvp, levels, self._floats)

    def _of_floats(self, xs: Sequence[Any], places: Sequence[int]) -> Function:
        """The floating results as a function of the floating arguments."""

        def f(floating: Sequence[Any]) -> tuple[Any, ...]:
            own = dict(zip(places, floating, strict=True))
            return tuple(self._f(*(own.get(i, x) for i, x in enumerate(xs)))[: self._floats])

        return f

    def _derived(self, what: str, f: Function, levels: Levels, floats: int) -> "Operation":
        if what not in self._derivatives:
            self._derivatives[what] = Operation(self._name, f, levels, floats)
        return self._derivatives[what]

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
        return self._over(stacked)._traced(*xs)  # type: ignore[no-any-return]

    def _over(self, stacked: Sequence[bool]) -> "Operation":
        """The operation for all members of a batch; `stacked` tells which arguments differ."""
        axes = tuple(0 if is_stacked else None for is_stacked in stacked)
        if 0 not in axes:
            return self
        if axes not in self._mapped:
            mapped = jax.vmap(self._f, in_axes=axes)
            levels = ((axes, (0,) * self._floats), *self._levels)
            self._mapped[axes] = Operation(self._name, mapped, levels, self._floats)
        return self._mapped[axes]

    def _shape(self, i: int, x: Tensor) -> str:
        """The shape of an argument for JAX, in which unknown dimensions have names."""
        names = [f"n{k}" for k, (axes, _) in enumerate(self._levels) if axes[i] == 0]
        names += [f"x{i}_{k}" for k in range(x.shape.rank - len(names))]
        sizes = zip(x.shape.as_list(), names, strict=True)
        return f"({', '.join(name if n is None else str(n) for n, name in sizes)})"


def _platforms() -> tuple[str, ...]:
    """Where TensorFlow may run the operations."""
    return ("cpu", "cuda") if tf.config.list_physical_devices("GPU") else ("cpu",)


class Native:
    """A JAX function of one batch member as a function of tensors."""

    def __init__(
        self,
        function: calls.Callee,
        event_ndims: int | Structure,
        has_aux: bool,
        dtype: DTypeLike,
        name: str | None,
    ) -> None:
        """See `from_jax`."""
        self._function, self._name = function, name or function.name
        self._event_ndims, self._has_aux, self._dtype = event_ndims, has_aux, floating(dtype)
        self._framework = Jax(jit=True)
        # By the structure of the arguments: the operation, and the structures of value and aux.
        self._operations: dict[Any, tuple[Operation, Structure, Structure]] = {}

    def __call__(self, args: Args, kwargs: Kwargs) -> Structure:
        """The value, or `(value, aux)`."""
        call = self._function.bind(args, kwargs)
        own, names = self._function.receivers(call.values), self._function.names(call)
        receivers, arguments = list(call.values[:own]), list(call.values[own:])
        by_argument = event_ndims_of(self._event_ndims, names[own:], len(arguments))
        flat = [
            leaf
            for name, value, ndims in zip(names[own:], arguments, by_argument, strict=True)
            for leaf in with_event_ndims(name, value, ndims)
        ]
        xs, dtypes, value_dtype = tensors_of(flat, self._dtype)
        if not any(dtypes):
            raise WrongUseError(
                f"{self._name} has no argument of a floating dtype. Pass an argument as a float, "
                "or call the function itself."
            )
        for (path, *_), x in zip(flat, xs, strict=True):
            if x.dtype == tf.string:
                raise TypeError(f"{path} is a string, which JAX does not take.")
        with tf.name_scope("native"):
            points, axes, front = _Batch.of(xs, flat)
            points = [
                tf.cast(x, self._dtype) if dtype is not None else x
                for x, dtype in zip(points, dtypes, strict=True)
            ]
            operation, value, aux = self._operation(receivers, arguments, points, axes)
            ys = [front.restored(y) for y in operation(*points)]
        n = len(tf.nest.flatten(value))
        y = tf.nest.pack_sequence_as(value, [tf.cast(y, value_dtype) for y in ys[:n]])
        if not self._has_aux:
            return y
        inputs = [x for x in points if x.dtype.is_floating]
        others = [embedding.auxiliary(self._name, a, inputs) for a in ys[n:]]
        return y, *tf.nest.pack_sequence_as(aux, others)

    def _operation(
        self,
        receivers: Sequence[object],
        arguments: Sequence[Structure],
        xs: Sequence[Tensor],
        axes: Axes,
    ) -> tuple[Operation, Structure, Structure]:
        """The operation for arguments of this structure, and the structures of value and aux."""
        like = tf.nest.map_structure(lambda _: None, list(arguments))
        key = axes, repr(like)
        if key in self._operations:
            return self._operations[key]

        def member(*leaves: Any) -> Args:
            returned = self._function.f(*receivers, *tf.nest.pack_sequence_as(like, leaves))
            return checked(returned, self._framework, self._name, has_aux=self._has_aux)

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return tuple(tf.nest.flatten(list(member(*leaves))))

        specs = [
            jax.ShapeDtypeStruct(
                tuple(2 if n is None else n for n in x.shape[0 if axis is None else 1 :]),
                x.dtype.as_numpy_dtype,
            )
            for x, axis in zip(xs, axes, strict=True)
        ]
        with wide(spec.dtype for spec in specs):
            value, *others = jax.eval_shape(member, *specs)
        floats = len(tf.nest.flatten(value))
        is_batch = 0 in axes
        operation = Operation(
            self._name,
            jax.vmap(flat, in_axes=axes) if is_batch else flat,
            ((axes, (0,) * floats),) if is_batch else (),
            floats,
        )
        value, aux = (tf.nest.map_structure(lambda _: None, t) for t in (value, tuple(others)))
        if not receivers:  # those of a method would be kept for ever
            self._operations[key] = operation, value, aux
        return operation, value, aux


class _Batch(NamedTuple):
    """The batch shape of a call; None if no argument has batch dimensions."""

    shape: Tensor | None
    known: tf.TensorShape

    @classmethod
    def of(
        cls, xs: Sequence[Tensor], flat: Sequence[tuple[str, Any, int]]
    ) -> tuple[list[Tensor], Axes, "_Batch"]:
        """The tensors with a single batch dimension, and its axis, None for those without one."""
        ndims = [n for *_, n in flat]
        for x, (path, *_) in zip(xs, flat, strict=True):
            if x.shape.rank is None:
                raise ValueError(
                    f"{path} has an unknown rank. Set its rank, for example by tf.ensure_shape, or "
                    "leave native=True out."
                )
        axes = tuple(None if x.shape.rank == n else 0 for x, n in zip(xs, ndims, strict=True))
        places = [k for k, axis in enumerate(axes) if axis == 0]
        if not places:
            return list(xs), axes, cls(None, tf.TensorShape([]))
        points, known = broadcast_batches(
            [xs[k] for k in places], [ndims[k] for k in places], [flat[k][0] for k in places]
        )
        batch = cls(tf.shape(points[0])[: known.rank], known)
        found = list(xs)
        for k, x in zip(places, points, strict=True):
            found[k] = batch._as_one(x)
        return found, axes, batch

    def _as_one(self, x: Tensor) -> Tensor:
        """A tensor with one batch dimension, which JAX requires to be at least 1."""
        event, count = x.shape[self.known.rank :], tf.reduce_prod(self.shape)
        if self.known.rank != 1:
            x = tf.reshape(x, tf.concat([[count], tf.shape(x)[self.known.rank :]], 0))
        size = self.known.num_elements()
        if not size:  # or unknown
            more = tf.maximum(1 - count, 0)
            x = tf.pad(x, [[0, more], *[[0, 0]] * event.rank])
        x.set_shape([size or None, *event])
        return x

    def restored(self, y: Tensor) -> Tensor:
        """A result with the batch dimensions of the arguments."""
        if self.shape is None:
            return y
        event = y.shape[1:]
        if not self.known.num_elements():
            y = y[: tf.reduce_prod(self.shape)]
        if self.known.rank != 1:
            y = tf.reshape(y, tf.concat([self.shape, tf.shape(y)[1:]], 0))
        y.set_shape(self.known.concatenate(event))
        return y
