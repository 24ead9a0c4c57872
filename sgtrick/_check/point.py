"""A function at a point: its value, its embedded derivatives, and differences along lines."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check import finite_differences, leaves
from sgtrick._check.leaves import Named, OfLeaves, concatenate, unit_roundoff
from sgtrick._check.recorded import Recorded
from sgtrick._types import Array, Tensor

# A derivative such as 1 - tanh(x)^2 is a small difference of numbers of the size of the value.
ROUNDINGS_OF_A_VALUE = 64
# Sums over several threads differ in the last digits from call to call, randomness in the first.
ROUNDINGS_OF_A_REPETITION = 1e3
# A value in float64 that is off by more, relative to the largest, is that of another function.
SAME_VALUE = 0.01
COARSEST = 2.0**-7  # the rounding unit of bfloat16


class Point:
    """A function at a point.

    Attributes:
        leaves: The names of its leaves.
        names: The names of its entries, `[n]`, as of all that follows.
        leaf_of: The numbers of their leaves.
        sizes: The size of the leaf of each entry.
        scales: The size of each entry: how far it can move before its sign does. Zero is taken for
            as large as its leaf, but not larger than 1.
        recorded: The function in the dtypes of `x`.
        widened: The function as differences are taken of it: in float64, if it supports that.
        why_narrow: Why it does not; empty if it does.
        least: The size below which numbers are zero.
        jump: By how much values are seen to jump, relative to their size; 0 if they do not.
        evaluations: The number of calls of the function.
    """

    def __init__(self, function: OfLeaves, inputs: Named) -> None:
        self._function = function
        self.evaluations, self.jump = 0, 0.0
        self.leaves = [name for name, _ in inputs]
        self.recorded = self.widened = Recorded(self._call, [x for _, x in inputs])
        for name, value in zip(self.recorded.names, self.recorded.value, strict=True):
            if not np.isfinite(value):
                raise ValueError(
                    f"{name}, which f returns, is {value} at x, so it has no derivative there. "
                    "Choose an x where f is finite."
                )
        self._tensors = [*self.recorded.xs, *self.recorded.ys]
        self.least = max(map(leaves.least_normal, self._tensors))
        self.why_narrow = self._widen() if self.narrow_dtypes else ""
        self.names = leaves.names_of_entries(inputs)
        lengths = [leaf.shape.num_elements() for _, leaf in inputs]
        self.leaf_of = np.repeat(np.arange(len(lengths)), lengths)
        self.sizes = leaves.sizes_of_leaves(self.widened.xs)
        x = self.widened.x
        self.scales = np.where(x == 0, np.minimum(self.sizes, 1.0), np.abs(x))
        self.check_repeatable()

    @property
    def value(self) -> Array:
        """All entries of the value, `[m]`."""
        return self.widened.value

    @property
    def narrow_dtypes(self) -> str:
        """The dtypes of the caller; empty if all are float64."""
        dtypes = sorted({t.dtype.name for t in self._tensors})
        return "" if dtypes == ["float64"] else ", ".join(dtypes)

    @property
    def unit(self) -> float:
        """The rounding unit of the least accurate dtype in the computation, as far as is seen."""
        return max(*map(unit_roundoff, self._tensors), min(self.jump, COARSEST))

    @property
    def rtol(self) -> float:
        """The relative tolerance of derivatives: half of the digits, and at least 1e-6.

        A formula that loses more is not a good one, but a mistake that leaves so many is rare.
        """
        return float(max(1e-6, self.unit**0.5))

    def sizes_of_values(self, weights: Array | None) -> Array:
        """The size of each value, or of one projection."""
        sizes = np.abs(self.value)
        return sizes if weights is None else np.sum(np.abs(weights) * sizes, keepdims=True)

    def quotients(
        self, direction: Array, weights: Array | None, bounds: Array | None
    ) -> finite_differences.Quotients:
        """The difference quotients of the value, or of one projection of it, along a direction."""

        def seen(value: Array) -> Array:
            return value if weights is None else np.sum(weights * value, keepdims=True)

        def move(step: float) -> tuple[Array, float]:
            moved = leaves.split(self.widened.x + step * direction, self.widened.xs)
            taken = concatenate(moved) - self.widened.x  # rounded to the dtype
            return seen(self._at(moved)), float(taken @ direction / (direction @ direction))

        rounding = self._units() * np.abs(self.value)
        if weights is not None:
            rounding = np.sqrt(np.sum((weights * rounding) ** 2, keepdims=True))
        moves = direction != 0
        size, position = self.sizes[moves].max(), (self.scales * np.abs(direction))[moves].max()
        steps = finite_differences.sweep(size, position, bounds)
        return finite_differences.quotients(move, seen(self.value), steps, rounding)

    def check_repeatable(self) -> None:
        """Raises if the value is another one when the function is called again."""
        again = self._at(list(map(tf.identity, self.widened.xs)))
        slack = ROUNDINGS_OF_A_REPETITION * self._units() * np.abs(self.value).max(initial=0.0)
        off = ~(np.abs(again - self.value) <= slack)
        if off.any():
            i = int(np.argmax(off))
            raise ValueError(
                f"f is not deterministic: at the same x, {self.recorded.names[i]} was first "
                f"{self.value[i]:.8g} and then {again[i]:.8g}. Fix its seed "
                "(tf.random.stateless_*), or keep its state constant."
            )

    def _at(self, xs: Sequence[Tensor]) -> Array:
        return concatenate([y for _, y in self._call(xs)])

    def _call(self, xs: Sequence[Tensor]) -> Named:
        self.evaluations += 1
        return self._function(xs)

    def _units(self) -> Array:
        """The rounding units of the entries of the value."""
        ys = self.widened.ys
        return np.repeat(list(map(unit_roundoff, ys)), [y.shape.num_elements() for y in ys])

    def _widen(self) -> str:
        """Changes to float64, in which differences have the most digits, or says why not."""
        try:
            widened = Recorded(self._call, [tf.cast(x, tf.float64) for x in self.recorded.xs])
        except Exception as error:  # functions of a fixed dtype may raise anything
            return f"in float64 it raises {type(error).__name__}"
        if any(y.dtype != tf.float64 for y in widened.ys):
            return "it does not return float64 for float64"
        narrow, wide = self.value, widened.value
        slack = SAME_VALUE * np.abs(narrow).max()
        slack += ROUNDINGS_OF_A_VALUE * self.unit * np.abs(narrow)
        if wide.shape != narrow.shape or not np.all(np.abs(wide - narrow) <= slack):
            return "its value in float64 differs"
        self.widened = widened
        return ""
