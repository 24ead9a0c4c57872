"""A function at a point: its value, its embedded derivatives, and differences along lines."""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check import finite_differences, vectors
from sgtrick._check.recorded import Recorded
from sgtrick._check.vectors import Named, OfLeaves, concatenate, unit_roundoff
from sgtrick._types import Array, Tensor

# A derivative such as 1 - tanh(x)^2 is a small difference of numbers of the size of the value.
ROUNDINGS_OF_A_VALUE = 64
# Where the value is such a difference itself, its size is that at these multiples of x.
TOWARDS_ZERO = (0.5, 0.0)
# Sums over several threads differ in the last digits from call to call, randomness in the first.
ROUNDINGS_OF_A_REPETITION = 1e3
# A value in float64 that is off by more, relative to the largest, is that of another function.
SAME_VALUE = 0.01
COARSEST = 2.0**-7  # the rounding unit of bfloat16


def relative_tolerance(unit: Array) -> Array:
    """Half of the digits, and at least 1e-6.

    A formula that loses more is not a good one, but a mistake that leaves so many is rare.
    """
    return np.fmax(1e-6, np.sqrt(unit))


class FunctionAtPoint:
    """A function at a point, in the dtypes of the caller and in float64.

    Attributes:
        leaves: The names of its leaves.
        leaf_of: For each entry, `[n]`, the number of its leaf.
        sizes: The size of the leaf of each entry.
        scales: The size of each entry: how far it can move before its sign does. Zero is taken for
            as large as its leaf, but not larger than 1.
        recorded: The function in the dtypes of `x`.
        widened: The function as differences are taken of it: in float64, if it supports that.
        why_narrow: Why it does not; empty if it does.
        least: The size below which numbers are zero.
        jump: By how much values are seen to jump, relative to their size; 0 if they do not.
        beyond: What `f` raises beside `x`; empty if it does not.
        evaluations: The number of calls of the function.
    """

    def __init__(self, function: OfLeaves, inputs: Named) -> None:
        self._function = function
        self.evaluations, self.jump, self.beyond = 0, 0.0, ""
        self._inputs, self.leaves = inputs, [name for name, _ in inputs]
        self.recorded = self.widened = Recorded(self._call, [x for _, x in inputs])
        if not np.all(np.isfinite(self.recorded.value)):
            i = int(np.argmin(np.isfinite(self.recorded.value)))
            raise ValueError(
                f"{self.recorded.names[i]}, which f returns, is {self.recorded.value[i]} at x, so "
                "it has no derivative there. Choose an x where f is finite."
            )
        self._tensors = [*self.recorded.xs, *self.recorded.ys]
        self.least = max(map(vectors.least_normal, self._tensors))
        self.why_narrow = self._widen() if self.narrow_dtypes else ""
        self.leaf_of = vectors.repeated(range(len(inputs)), self.recorded.xs)
        self.sizes = vectors.sizes_of_leaves(self.widened.xs)
        x = self.widened.x
        self.scales = np.where(x == 0, np.minimum(self.sizes, 1.0), np.abs(x))
        self.check_repeatable()

    @property
    def names(self) -> list[str]:
        """The names of the entries of `x`."""
        return vectors.names_of_entries(self._inputs)

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
        """The largest relative tolerance of its derivatives."""
        return float(relative_tolerance(np.array(self.unit)))

    def units(self, direction: Array, weights: Array | None) -> Array:
        """The rounding units of the derivatives of each value, or of one projection."""
        xs, ys = (list(map(unit_roundoff, ts)) for ts in (self.recorded.xs, self.recorded.ys))
        units = vectors.repeated(ys, self.recorded.ys)
        if weights is not None:
            units = np.max(units, where=weights != 0, initial=0.0, keepdims=True)
        moving: Array = np.max([xs[leaf] for leaf in np.unique(self.leaf_of[direction != 0])])
        return np.fmax(units, moving)

    def sizes_of_values(self, weights: Array | None, *, around: bool = False) -> Array:
        """The size of each value, or of one projection, at `x` or from `x` to zero."""
        sizes = self._sizes_around if around else np.abs(self.value)
        return sizes if weights is None else np.sum(np.abs(weights) * sizes, keepdims=True)

    @functools.cached_property
    def _sizes_around(self) -> Array:
        x, xs = self.widened.x, self.widened.xs
        values = [self._beside(vectors.split(c * x, xs))[0] for c in TOWARDS_ZERO]
        sizes = np.abs([self.value, *values])
        largest: Array = np.max(sizes, axis=0, where=np.isfinite(sizes), initial=0.0)
        return largest

    def quotients(
        self, direction: Array, weights: Array | None, bounds: Array | None
    ) -> finite_differences.Quotients:
        """The difference quotients of the value, or of one projection of it, along a direction."""

        def seen(value: Array) -> Array:
            return value if weights is None else np.sum(weights * value, keepdims=True)

        squared = np.sum(direction**2)

        def move(step: float) -> tuple[Array, float]:
            moved = vectors.split(self.widened.x + step * direction, self.widened.xs)
            taken = concatenate(moved) - self.widened.x  # rounded to the dtype
            value, why = self._beside(moved)
            self.beyond = self.beyond or why
            # No matrix product, whose threads and those of TensorFlow wait for each other.
            return seen(value), float(np.sum(taken * direction) / squared)

        rounding = self._units() * np.abs(self.value)
        if weights is not None:
            rounding = np.sqrt(np.sum((weights * rounding) ** 2, keepdims=True))
        moves = direction != 0
        size, position = self.sizes[moves].max(), self.scales[moves].max()
        steps, finest = finite_differences.sweep(size, position, bounds)
        return finite_differences.quotients(move, seen(self.value), steps, rounding, finest)

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

    def _beside(self, xs: Sequence[Tensor]) -> tuple[Array, str]:
        """The value at another point, NaN where `f` raises, and what it raises."""
        try:
            return self._at(xs), ""
        except Exception as error:  # functions may raise anything outside their domain
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            return np.full_like(self.value, np.nan), why

    def _at(self, xs: Sequence[Tensor]) -> Array:
        return concatenate([y for _, y in self._call(xs)])

    def _call(self, xs: Sequence[Tensor]) -> Named:
        self.evaluations += 1
        return self._function(xs)

    def _units(self) -> Array:
        """The rounding units of the entries of the value, as differences are taken of it."""
        ys = self.widened.ys
        return vectors.repeated(list(map(unit_roundoff, ys)), ys)

    def _widen(self) -> str:
        """Changes to float64, in which differences have the most digits, or says why not."""
        narrow = widened = self.recorded
        if any(x.dtype != tf.float64 for x in narrow.xs):
            try:
                widened = Recorded(self._call, [tf.cast(x, tf.float64) for x in narrow.xs])
            except Exception as error:  # functions of a fixed dtype may raise anything
                return f"in float64 it raises {type(error).__name__}"
        if not any(y.dtype == tf.float64 for y in widened.ys):
            return "it does not return float64 for float64"
        if widened.value.shape == narrow.value.shape:
            self.widened = widened
            off = np.abs(widened.value - narrow.value)
            slack = SAME_VALUE * np.abs(narrow.value).max()
            if np.all(off <= slack):
                return ""
            rounding = ROUNDINGS_OF_A_VALUE * self.unit * self._sizes_around
            if np.all(off <= slack + rounding):
                return ""
        self.widened = narrow
        return "its value in float64 differs"
