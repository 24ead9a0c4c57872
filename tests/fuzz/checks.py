"""Functions drawn at random for `check_gradient`, with gradients of which is known where they err."""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

import sgtrick

SMOOTH = {
    "sin": tf.sin,
    "tanh": tf.tanh,
    "asinh": tf.asinh,
    "bell": lambda t: tf.exp(-(t**2)),
    "softplus": tf.nn.softplus,
    "cubic": lambda t: t**3 / 6,
}


@dataclasses.dataclass(frozen=True)
class Check:
    """`sum_j weight_j f_j(frequency_j (x + roll(x) / 3))`, entry by entry or summed up.

    Attributes:
        point: The entries of `x`, in units of `size_x`.
        terms: The `f_j` by name, the frequencies and the weights.
        outputs: `number` or `entries`.
        leaves: 1, or 2 in a dict.
        size_x: The unit of `x`.
        size_y: That of the function.
        offset: A constant that is added, in units of `size_y`.
        dtype: `float64`, `float32`, or `narrow`: the function computes in float32 whatever comes.
        wrong: Where the gradient is off by 1 %: counts the entries that are large enough.
        kink: In which entry of `x` a kink is added.
        mode: Of `check_gradient`; so is `order`.
    """

    point: tuple[float, ...]
    terms: tuple[tuple[str, float, float], ...]
    outputs: str = "number"
    leaves: int = 1
    size_x: float = 1.0
    size_y: float = 1.0
    offset: float = 0.0
    dtype: str = "float64"
    wrong: int | None = None
    kink: int | None = None
    mode: str = "full"
    order: int = 1

    def split(self, t: Any) -> Any:
        """Entries as the structure that `x` has."""
        return t if self.leaves == 1 else {"a": t[..., :1], "b": t[..., 1:]}

    def whole(self, x: Any) -> Any:
        return x if self.leaves == 1 else tf.concat([x["a"], x["b"]], -1)

    @property
    def x(self) -> np.ndarray:
        x = np.array(self.point) * self.size_x
        return x if self.dtype == "float64" else x.astype(np.float32)

    def function(self, x: Any) -> Any:
        """The function, of all entries in a row."""
        given = x.dtype
        x = tf.cast(x, tf.float32) if self.dtype == "narrow" else x
        t = x / self.size_x
        t = t + tf.roll(t, 1, 0) / 3
        y = tf.add_n([w * SMOOTH[name](frequency * t) for name, frequency, w in self.terms])
        if self.kink is not None:
            slope = 3 * sum(abs(w * frequency) for _, frequency, w in self.terms)
            y += slope * tf.abs(x[self.kink] - tf.cast(self.x[self.kink], x.dtype)) / self.size_x
        y = (tf.reduce_sum(y) if self.outputs == "number" else y) + self.offset
        return y * self.size_y if self.dtype == "narrow" else tf.cast(y * self.size_y, given)

    def jacobian(self, x: Any) -> Any:
        """By TensorFlow's own tape, `[n]` or `[n, n]`."""
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = self.function(x)
            entries = [y] if self.outputs == "number" else tf.unstack(y)
        rows = [tape.gradient(entry, x) for entry in entries]
        return rows[0] if self.outputs == "number" else tf.stack(rows)

    def place(self) -> tuple[int, ...] | None:
        """The entry of the Jacobian that is wrong: one of the large ones."""
        if self.wrong is None:
            return None
        j = np.abs(self.jacobian(tf.constant(self.x, tf.float64)).numpy())
        if self.mode == "random":
            j = j * np.abs(self.x)
        large = np.argwhere(j > j.max() / 2)
        return tuple(map(int, large[self.wrong % len(large)])) if len(large) else None

    def verdict(self) -> str:
        """`right`, or what `check_gradient` should have said."""
        place = self.place()

        def f(x: Any) -> Any:
            return self.function(self.whole(x))

        def gradient(x: Any) -> Any:
            j = self.jacobian(self.whole(x))
            mask = np.ones(j.shape)
            mask[place] = 1.01
            return self.split(j * tf.constant(mask, j.dtype))

        form = f if place is None else sgtrick.with_gradient(f, gradient)
        report = self._report(form, self.x)
        for entry in report.entries:
            allowed = self._allowed(entry.name, place)
            is_due = entry.verdict in allowed or self._is_rounded_away(entry, report)
            if not (is_due or self._is_inaccurate(entry)):
                return f"{entry.name} is {entry.verdict}, expected {allowed}\n{report}"
        if place is not None and self.mode == "full":
            assert self._name(place) in [entry.name for entry in report.entries]
        return "right"

    def _report(self, f: Any, x: np.ndarray) -> Any:
        x = self.split(tf.constant(x))
        return sgtrick.check_gradient(f, x, mode=self.mode, order=self.order, raise_exception=False)

    def _is_rounded_away(self, entry: Any, report: Any) -> bool:
        """Whether an entry is nothing beside the others, as where terms cancel or underflow."""
        largest = max(abs(e.numerical) for e in report.entries if e.order == entry.order)
        if self.dtype == "float64":
            return entry.absolute <= 1e-10 * largest
        return entry.absolute <= max(1e-6 * largest, 1e-30)

    def _is_inaccurate(self, entry: Any) -> bool:
        """Whether TensorFlow's own derivative in float32 is off, as at the end of a tanh."""
        if self.dtype == "float64" or self.wrong is not None or entry.verdict != "wrong":
            return False
        (true,) = (
            e.embedded
            for e in self._accurate.entries
            if (e.name, e.order) == (entry.name, entry.order)
        )
        return abs(entry.embedded - true) > 3e-4 * abs(true)

    @functools.cached_property
    def _accurate(self) -> Any:
        """The report of the same function in float64."""
        wide = dataclasses.replace(self, dtype="float64")
        return wide._report(lambda x: wide.function(wide.whole(x)), self.x.astype(np.float64))

    def _allowed(self, name: str, place: tuple[int, ...] | None) -> tuple[str, ...]:
        is_random = self.mode == "random"
        is_kink = self.kink is not None and (is_random or name.endswith(self._leaf(self.kink)))
        is_wrong = place is not None and (is_random or name == self._name(place))
        due = ("kink",) if is_kink else ("wrong",) if is_wrong else ("ok",)
        if is_kink and is_random and self.outputs == "entries":  # those of several may cancel
            due += ("ok",)
        if self.offset or self.dtype == "narrow":  # what cannot be seen
            due += ("cannot tell",)
        return due

    def _leaf(self, i: int) -> str:
        if self.leaves == 1:
            return f"x[{i}]"
        return f"x['a'][{i}]" if i < 1 else f"x['b'][{i - 1}]"

    def _name(self, place: tuple[int, ...]) -> str:
        *row, i = place
        return f"y{row} by {self._leaf(i)}" if row and len(self.point) > 1 else self._leaf(i)
