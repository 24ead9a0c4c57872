"""What host engines are called with, at random, and what comes of it beside what should come."""

import contextlib
import dataclasses
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
import tensorflow as tf

from fuzz import ways

LOUD = (RuntimeError, TypeError, ValueError, LookupError, tf.errors.OpError)
SIZES = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
WAYS = (
    "eager", "graph", "around", "unknown dimensions", "unknown ranks", "vectorized_map",
    "accumulator", "jacobian", "second",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A part of the arguments.

    Attributes:
        batch: Its batch shape, which broadcasts to that of all.
        event: Its own shape.
        dtype: The name of its dtype.
        kind: `tensor`, `variable`, `array`, or `number` where there are no dimensions.
        known: Whether the engine gives its gradient.
    """

    batch: tuple[int, ...] = ()
    event: tuple[int, ...] = ()
    dtype: str = "float64"
    kind: str = "tensor"
    known: bool = True

    @property
    def live(self) -> bool:
        return self.dtype in SIZES

    def array(self, k: int) -> np.ndarray:
        """The entries of leaf `k`."""
        shape = self.batch + self.event
        n = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        if self.dtype == "bytes":
            return np.where((n + k) % 2, b"one", b"").astype(object)
        if self.live:
            return (np.sin(1.0 + k + 1.7 * n) * 1.2).astype(self.dtype)
        return ((n + k) % 2).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an engine.

    Attributes:
        arguments: Leaves, or tuples or dicts of leaves.
        way: The transformation, one of `WAYS`.
        vectorized: As the option; so are `dtype`, `has_aux` and `on_error`.
        careless: Whether the engine spoils its arguments, where it may, and gives the same arrays
            each time.
    """

    arguments: tuple[Any, ...]
    way: str = "eager"
    vectorized: bool = False
    dtype: str = "float64"
    has_aux: bool = False
    on_error: Any = "raise"
    careless: bool = False

    @property
    def leaves(self) -> list[Leaf]:
        return tf.nest.flatten(self.arguments)

    @property
    def batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(leaf.batch for leaf in self.leaves))

    @property
    def live(self) -> list[int]:
        return [k for k, leaf in enumerate(self.leaves) if leaf.live]

    @property
    def watched(self) -> list[int]:
        """Those by which derivatives are taken."""
        return [k for k in self.live if self.leaves[k].kind in ("tensor", "variable")]

    @property
    def event_ndims(self) -> Any:
        ndims = tf.nest.map_structure(lambda leaf: len(leaf.event), self.arguments)
        flat = set(tf.nest.flatten(ndims))
        return flat.pop() if len(flat) == 1 else ndims

    @property
    def value_dtype(self) -> str:
        """The widest of the arguments' own; numbers have none."""
        own = {x.dtype for x in self.leaves if x.live and x.kind != "number"}
        if own == {"float16", "bfloat16"}:
            return "float32"
        return max(own, key=lambda d: np.dtype(d).itemsize) if own else self.dtype

    def arrays(self) -> list[np.ndarray]:
        """The leaves as the engine reads them, broadcast."""
        found = []
        for k, leaf in enumerate(self.leaves):
            a = leaf.array(k)
            if leaf.kind == "number" and leaf.live:
                a = a.astype(self.value_dtype)
            if leaf.live:
                a = a.astype(self.dtype)
            found.append(self._broadcast(leaf, a))
        return found

    def _broadcast(self, leaf: Leaf, a: np.ndarray) -> np.ndarray:
        ones = (1,) * (len(self.batch) - len(leaf.batch))
        return np.broadcast_to(a.reshape(ones + a.shape), self.batch + leaf.event)

    def weights(self) -> np.ndarray:
        """What multiplies the values."""
        return 1 + np.cos(np.arange(np.prod(self.batch, dtype=int)).reshape(self.batch)) / 2

    def directions(self) -> list[np.ndarray]:
        """What multiplies the gradients, zero where none is asked for."""
        shapes = (leaf.batch + leaf.event for leaf in self.leaves)
        return [
            np.cos(k + np.arange(np.prod(s, dtype=int))).reshape(s) * (k in self.watched)
            for k, s in enumerate(shapes)
        ]

    def _packed(self, flat: list[Any]) -> Any:
        packed = tf.nest.pack_sequence_as(self.arguments, flat)
        return packed if len(packed) > 1 else packed[0]

    def _over(self, t: Any, leaf: Leaf) -> Any:
        return np.reshape(t, np.shape(t) + (1,) * len(leaf.event))

    def _summed(self, leaf: Leaf, g: np.ndarray) -> np.ndarray:
        """Times the weights, and over what was repeated."""
        g = g * self._over(self.weights(), leaf)
        g = g.sum(tuple(range(len(self.batch) - len(leaf.batch))))
        ones = tuple(i for i, n in enumerate(leaf.batch) if n == 1)
        return g.sum(ones, keepdims=True)

    def expected(self) -> dict[str, Any] | None:
        """By a loop over the members, None where an error is due."""
        wide = self.arrays()
        vs = [self._broadcast(*pair) for pair in zip(self.leaves, self.directions(), strict=True)]
        value, along = np.zeros(self.batch), np.zeros(self.batch)
        gradients, second = ([np.zeros(a.shape) for a in wide] for _ in range(2))
        aux, failures = np.full((*self.batch, 2), np.nan), 0
        for i in np.ndindex(*self.batch):
            found = self.member([np.array(a[i], a.dtype) for a in wide], [v[i] for v in vs])
            if found is None:
                if self.on_error == "raise":
                    return None
                failures += 1
                value[i] = self.on_error
                for k in self.live:
                    second[k][i] = np.nan
                continue
            value[i], aux[i], gs, hs = found
            for k, g, h in zip(self.live, gs, hs, strict=True):
                gradients[k][i], second[k][i] = g, h
                along[i] += np.sum(g * vs[k][i]) if k in self.watched else 0
        return {
            "value": value,
            "gradients": [self._summed(self.leaves[k], gradients[k]) for k in self.watched],
            "along": along,
            "second": [self._summed(self.leaves[k], second[k]) for k in self.watched],
            "aux": aux if failures < value.size else np.full(self.batch, np.nan),
        }

    def _came(self, form: Any) -> dict[str, Any]:
        def call(flat: list[Any]) -> list[Any]:
            arguments = tf.nest.pack_sequence_as(self.arguments, flat)
            y = form(*arguments)
            y, *aux = y if self.has_aux else (y,)
            return [y, *aux]

        came = getattr(ways, self.way.replace(" ", "_"))(self, call, self._points())
        if self.careless:  # another call harms none that was answered
            with contextlib.suppress(*LOUD):
                call(self._points(-0.5))
        return came

    def _points(self, times: float = 1.0) -> list[Any]:
        points = []
        for k, leaf in enumerate(self.leaves):
            a = leaf.array(k)
            a = (a * times).astype(a.dtype) if leaf.live else a
            if leaf.kind == "number":
                points.append(a.item())
            elif leaf.kind == "array":
                points.append(a)
            else:
                x = tf.constant(a, tf.string if leaf.dtype == "bytes" else None)
                points.append(tf.Variable(x) if leaf.kind == "variable" else x)
        return points

    def _compared(self, came: dict[str, Any], expected: dict[str, Any]) -> str | None:
        used = [self.dtype, self.value_dtype, *(x.dtype for x in self.leaves if x.live)]
        tolerance = 40 * max(SIZES[d] for d in used)
        for key, value in came.items():
            want = expected[key]
            value, want = (v if isinstance(v, list) else [v] for v in (value, want))
            for a, b in zip(value, want, strict=True):
                if a is None:
                    return f"{key} is None, expected {b.tolist()}"
                a = np.asarray(a, np.float64)
                atol = tolerance * (1 + np.abs(b[np.isfinite(b)]).max(initial=0))
                fits = a.shape == b.shape and np.allclose(a, b, tolerance, atol, equal_nan=True)
                if not fits:
                    return f"{key} is {a.tolist()}, expected {b.tolist()}"
        return None


def named(f: Any, names: str) -> Any:
    """`f` with parameters of these names."""
    parameters = ", ".join(names)
    return eval(f"lambda {parameters}: f({parameters})", {"f": f})
