"""A function at a point: its value, its embedded derivatives, and differences along lines."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check import finite_differences
from sgtrick._check.leaves import (
    Named,
    OfLeaves,
    array,
    concatenate,
    entries_of,
    unit_roundoff,
    wide,
)
from sgtrick._check.recorded import Recorded
from sgtrick._check.verdicts import ROUNDINGS_OF_A_VALUE
from sgtrick._types import Array, Tensor

# Sums over several threads differ in the last digits from call to call, randomness in the first.
ROUNDINGS_OF_A_REPETITION = 1e3
# A value in float64 that is off by more, relative to the largest, is that of another function.
SAME_VALUE = 0.01


class Point:
    """A function at a point.

    Attributes:
        recorded: Its embedded derivatives, in the dtypes of `x`.
        widened: The same in float64, if the function supports it.
        x: The leaves, in the dtype in which differences are taken.
        value: All entries of the value, `[m]`.
        magnitude: The size of what these are rounded with, `[m]`.
        sizes: The size of each leaf.
        scales: For each leaf, the size of its entries: how far each can move before its sign does.
            Zero is taken for as large as its leaf, but not larger than 1.
        why_narrow: Why differences are not taken in float64; empty if they are.
        evaluations: The number of calls of the function.
    """

    def __init__(self, function: OfLeaves, inputs: Named, magnitude: Array | None) -> None:
        self._function = function
        self.evaluations = 0
        self.names = [name for name, _ in inputs]
        self.recorded = self.widened = Recorded(self._call, inputs)
        self.x = [array(x) for _, x in inputs]
        self.value = concatenate(self.recorded.ys)
        self._check_finite()
        self.magnitude = np.fmax(np.abs(self.value), 0.0 if magnitude is None else magnitude)
        self._units = np.concatenate(
            [np.full(y.shape.num_elements(), unit_roundoff(y)) for _, y in self.recorded.ys]
        )
        self.why_narrow = self._widen() if self.narrow_dtypes else ""
        self.sizes = [np.abs(wide(x)).max(initial=0.0) or 1.0 for x in self.x]
        self.scales = [
            np.where(x == 0, min(size, 1.0), np.abs(wide(x)))
            for x, size in zip(self.x, self.sizes, strict=True)
        ]
        self.check_repeatable()

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves of the point and of the value, in the dtypes of the caller."""
        return [*self.recorded.xs, *(y for _, y in self.recorded.ys)]

    @property
    def narrow_dtypes(self) -> str:
        """The dtypes of the caller; empty if all are float64."""
        dtypes = sorted({t.dtype.name for t in self.tensors})
        return "" if dtypes == ["float64"] else ", ".join(dtypes)

    @property
    def value_names(self) -> list[str]:
        """The names of the entries of the value."""
        return [name for name, *_ in entries_of(self.recorded.ys)]

    def differences(
        self,
        direction: Sequence[Array],
        size: float,
        position: float,
        bounds: finite_differences.StepBounds,
        projection: Array | None = None,
    ) -> finite_differences.Estimate:
        """The derivatives of the value, or of one projection of it, along a direction.

        Args:
            direction: For each leaf, how it moves.
            size: The size of the leaf that moves.
            position: The size of the entry that moves.
            bounds: Bounds of the steps.
            projection: The weights of the entries of the value, `[m]`.
        """
        rounding = self._units * np.abs(self.value)
        value = self.value
        if projection is not None:
            rounding = np.sqrt(np.sum((projection * rounding) ** 2, keepdims=True))
            value = np.sum(projection * value, keepdims=True)

        def move(step: float) -> tuple[Array, float]:
            moved = [
                np.asarray(x + step * v, x.dtype) for x, v in zip(self.x, direction, strict=True)
            ]
            values = self._at(moved)
            if projection is not None:
                values = np.sum(projection * values, keepdims=True)
            return values, _step_taken(self.x, moved, direction)

        steps = finite_differences.sweep(size, position, bounds)
        return finite_differences.differentiate(move, value, steps, rounding)

    def check_repeatable(self) -> None:
        """Raises if the value is another one when the function is called again."""
        again = self._at(self.x)
        slack = ROUNDINGS_OF_A_REPETITION * self._units * np.abs(self.value).max(initial=0.0)
        off = ~(np.abs(again - self.value) <= slack)
        if off.any():
            i = int(np.argmax(off))
            raise ValueError(
                f"f is not deterministic: at the same x, {self.value_names[i]} was first "
                f"{self.value[i]:.8g} and then {again[i]:.8g}. Fix its seed "
                "(tf.random.stateless_*), or keep its state constant."
            )

    def _at(self, x: Sequence[Array]) -> Array:
        tensors = [tf.constant(leaf) for leaf in x]
        return concatenate(self._call(list(zip(self.names, tensors, strict=True))))

    def _call(self, inputs: Named) -> Named:
        self.evaluations += 1
        return self._function(inputs)

    def _check_finite(self) -> None:
        for name, value in zip(self.value_names, self.value, strict=True):
            if not np.isfinite(value):
                raise ValueError(
                    f"{name}, which f returns, is {value} at x, so it has no derivative there. "
                    "Choose an x where f is finite."
                )

    def _widen(self) -> str:
        """Changes to float64, in which differences have the most digits, or says why not."""
        xs = [tf.cast(x, tf.float64) for x in self.recorded.xs]
        try:
            widened = Recorded(self._call, list(zip(self.names, xs, strict=True)))
            value = concatenate(widened.ys)
        except Exception as error:  # functions of a fixed dtype may raise anything
            return f"in float64 it raises {type(error).__name__}"
        if any(y.dtype != tf.float64 for _, y in widened.ys):
            return "it does not return float64 for float64"
        if value.shape != self.value.shape or not np.all(self._is_rounded(value)):
            return "its value in float64 differs"
        self.widened, self.value, self.x = widened, value, list(map(array, xs))
        self._units = np.full_like(self._units, np.finfo(np.float64).eps)
        return ""

    def _is_rounded(self, exact: Array) -> Array:
        """Whether the value is this one, rounded to the dtype of the caller."""
        rounding = ROUNDINGS_OF_A_VALUE * max(map(unit_roundoff, self.tensors)) * self.magnitude
        close: Array = np.abs(exact - self.value) <= (
            SAME_VALUE * np.abs(self.value).max() + rounding
        )
        return close


def _step_taken(x: Sequence[Array], moved: Sequence[Array], direction: Sequence[Array]) -> float:
    """The step that led to the moved entries, which were rounded to their dtype."""
    along = sum(
        np.sum((wide(m) - wide(leaf)) * v) for m, leaf, v in zip(moved, x, direction, strict=True)
    )
    return float(along / sum(np.sum(v**2) for v in direction))
