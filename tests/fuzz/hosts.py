"""Host engines drawn at random, and what they should give by a loop of NumPy over the members.

The function is `t + t^2 / 2` of `t = sum_k a_k sum(sin(x_k)) + ...`: every leaf has a part in every
derivative, and the Hessian is full. Leaves without derivatives add a constant to `t`.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

import sgtrick
from fuzz.calls import LOUD, Call, named


@dataclasses.dataclass(frozen=True)
class Host(Call):
    """A call of `from_numpy`.

    Attributes:
        hessian: Whether the product of the Hessian and a vector is known.
        above: The engine fails where `t` is larger.
    """

    hessian: bool = False
    above: float = np.inf

    # The engine, on arrays with any number of batch dimensions.

    def _t(self, leaves: list[np.ndarray]) -> Any:
        t = 0.0
        for k, (leaf, a) in enumerate(zip(self.leaves, leaves, strict=True)):
            terms = (0.5 + k) * np.sin(a) if leaf.live else 0.25 * (a == (b"", 0)[a.dtype != "O"])
            t = t + terms.sum(tuple(range(a.ndim - len(leaf.event), a.ndim)))
        return t

    def _slopes(self, leaves: list[np.ndarray], f: Any = np.cos) -> list[Any]:
        """Of `t`, or what `f` makes of them; None for leaves without derivatives."""
        pairs = enumerate(zip(self.leaves, leaves, strict=True))
        return [(0.5 + k) * f(a) if leaf.live else None for k, (leaf, a) in pairs]

    def _checked(self, arguments: tuple[Any, ...]) -> tuple[list[np.ndarray], Any]:
        """The leaves and `t`, where the engine does not fail."""
        tf.nest.assert_same_structure(self.arguments, arguments)
        leaves = tf.nest.flatten(arguments)
        for leaf, a in zip(self.leaves, leaves, strict=True):
            assert a.shape[a.ndim - len(leaf.event) :] == leaf.event
            if leaf.live:
                assert a.dtype == self.dtype
        t = self._t(leaves)
        if np.any(t > self.above):
            raise ArithmeticError("no solution")
        return leaves, t

    def value(self, *arguments: Any) -> Any:
        _, t = self._checked(arguments)
        y = t + t**2 / 2
        return (y, np.stack([t, 2 * t], -1)) if self.has_aux else y

    def gradient(self, *arguments: Any) -> Any:
        leaves, t = self._checked(arguments)
        flat = [
            self._over(1 + t, leaf) * slope if leaf.live and leaf.known else None
            for leaf, slope in zip(self.leaves, self._slopes(leaves), strict=True)
        ]
        return self._packed(flat)

    def both(self, *arguments: Any) -> Any:
        return self.value(*arguments), self.gradient(*arguments)

    def hessp(self, *arguments: Any) -> Any:
        *arguments, v = arguments
        leaves, t = self._checked(tuple(arguments))
        vs = tf.nest.flatten(v if len(arguments) > 1 else (v,))
        slopes, bends = self._slopes(leaves), self._slopes(leaves, lambda a: -np.sin(a))
        along = sum(
            (slopes[k] * vs[k]).sum(tuple(range(np.ndim(t), slopes[k].ndim))) for k in self.live
        )
        flat = [None] * len(leaves)
        for k in self.live:
            leaf = self.leaves[k]
            flat[k] = self._over(1 + t, leaf) * bends[k] * vs[k]
            flat[k] = flat[k] + self._over(along, leaf) * slopes[k]
        return self._packed(flat)

    def form(self) -> Any:
        names = "xyz"[: len(self.arguments)]
        fn, hessp = (_careless(f) if self.careless else f for f in (self.both, self.hessp))
        return sgtrick.from_numpy(
            named(fn, names),
            hessp=named(hessp, names + "v") if self.hessian else None,
            event_ndims=self.event_ndims,
            vectorized=self.vectorized,
            has_aux=self.has_aux,
            dtype=self.dtype,
            on_error=self.on_error,
            name="engine",
        )

    def member(self, arrays: list[np.ndarray], vs: list[np.ndarray]) -> Any:
        """By NumPy."""
        good = dataclasses.replace(self, vectorized=False)
        arguments = tf.nest.pack_sequence_as(self.arguments, arrays)
        try:
            y = good.value(*arguments)
        except ArithmeticError:
            return None
        y, aux = y if self.has_aux else (y, np.nan)
        gs, hs = good.gradient(*arguments), good.hessp(*arguments, self._packed(vs))
        gs, hs = tf.nest.flatten(gs), tf.nest.flatten(hs)
        return (
            y,
            aux,
            [np.nan if gs[k] is None else gs[k] for k in self.live],
            [hs[k] for k in self.live],
        )

    # What comes.

    def verdict(self) -> str:
        """`right`, or what is wrong."""
        expected = self.expected()
        try:
            came = self._came(self.form())
        except LOUD as error:
            if expected is None:
                is_due = "engine" in str(error)
            else:
                is_due = self.way == "second" and not self.hessian and "hessp" in str(error)
            return "right" if is_due else f"{error!r}, expected {expected}"
        if expected is None:
            return f"no error, but {came}"
        if self.way == "second" and not self.hessian and 0 not in self.batch:
            is_loud = all(
                g is not None and not np.isfinite(np.asarray(g, np.float64)).any()
                for g in came["second"]
            )
            return "right" if is_loud else f"no error without a Hessian, but {came}"
        return self._compared(came, expected) or "right"


def _careless(f: Any) -> Any:
    """`f`, which spoils its arguments and gives the same arrays each time."""
    kept: dict[Any, np.ndarray] = {}

    def call(*arguments: Any) -> Any:
        y = f(*arguments)
        for a in tf.nest.flatten(arguments):
            if a is not None and a.flags.writeable:
                a[...] = 0
        flat = tf.nest.flatten(y)
        for k, part in enumerate(flat):
            if isinstance(part, np.ndarray):
                flat[k] = kept.setdefault((k, part.shape, part.dtype), np.empty_like(part))
                flat[k][...] = part
        return tf.nest.pack_sequence_as(y, flat)

    return call
