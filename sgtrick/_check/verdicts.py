"""Whether the embedded derivatives along a line agree with the differences."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sgtrick._check.finite_differences import Estimate
from sgtrick._check.leaves import least_normal, unit_roundoff
from sgtrick._check.report import Entry
from sgtrick._types import Array, Tensor

# A derivative has passed through a few operations, each of which rounds it once.
ROUNDINGS_OF_AUTODIFF = 16
# A derivative such as 1 - tanh(x)^2 is a small difference of numbers of the size of the value.
ROUNDINGS_OF_A_VALUE = 64
# With this error, relative to the derivative, differences still detect one that is off by 1 %.
VISIBLE = 0.005
# Relative to the value divided by the size of x. What is less is zero for every purpose, and a
# constant function, whose differences are rounding errors, has no other size to be measured by.
NEGLIGIBLE = 1e-6
# The same relative to the slope over the largest step: x^3 has no other size at zero.
FLAT = 1e-4


class Tolerance(NamedTuple):
    """How far a right embedded derivative may be from an exact one.

    Attributes:
        rtol: The relative tolerance.
        atol: The absolute one; None: the rounding of autodiff.
        unit: The rounding unit of the least accurate dtype in the computation.
        least: The size below which numbers are zero.
    """

    rtol: float
    atol: float | None
    unit: float
    least: float

    @classmethod
    def of(cls, tensors: Iterable[Tensor], rtol: float | None, atol: float | None) -> "Tolerance":
        """The tolerance where these tensors are differentiated and returned."""
        tensors = list(tensors)
        unit, least = max(map(unit_roundoff, tensors)), max(map(least_normal, tensors))
        # Half of the digits: a formula that loses more is not a good one, but a mistake that
        # leaves so many right is rare.
        return cls(max(1e-6, unit**0.5) if rtol is None else rtol, atol, unit, least)

    def allowed(self, size: Array, largest: Array) -> Array:
        """The allowed error of derivatives of this size.

        Args:
            size: Their size.
            largest: That of the largest derivatives that autodiff computes together with them, and
                so with the same rounding.
        """
        if self.atol is not None:
            return self.rtol * size + self.atol
        return self.rtol * size + ROUNDINGS_OF_AUTODIFF * self.unit * largest + self.least


class Line(NamedTuple):
    """A line along which `m` numbers are differentiated, with the embedded derivatives.

    Attributes:
        names: The names of the entries of the report.
        direction: How each entry of `x` moves.
        weights: Those of the entries of the value if the number is a projection of it, or None.
        size: The size of the leaf of `x` that moves.
        position: The size of the entry of `x` that moves.
        derivative: What the tape returns, `[m]` as all that follows: NaN if refused, 0 for None.
        widened: The same in the dtype of the differences.
        refusals: The messages of functions that refused.
        terms: The size of the terms of which the derivative is the sum: where these cancel, the
            errors of a right gradient do not.
        largest: The size of the largest derivatives that autodiff computes together with these.
        value: The size of the numbers that are differentiated.
    """

    names: Sequence[str]
    direction: Array
    weights: Array | None
    size: float
    position: float
    derivative: Array
    widened: Array
    refusals: Sequence[str]
    terms: Array
    largest: Array
    value: Array


def judged(line: Line, numerical: Estimate, tolerance: Tolerance, order: int) -> list[Entry]:
    """The entries for derivatives of this order along a line."""
    derivative = line.derivative
    larger = np.fmax(np.abs(derivative), np.abs(numerical.derivative))
    size = np.fmax(larger, line.terms)
    allowed = tolerance.allowed(size, line.largest)
    slope = np.abs(numerical.differences[0])
    slope = np.where(np.isfinite(slope), slope, 0.0)
    negligible = np.fmax(NEGLIGIBLE * line.value / max(line.size, 1.0), FLAT * slope)
    visible = np.fmax(allowed, VISIBLE * np.fmax(np.fmax(size, line.largest), negligible))
    if tolerance.atol is None:  # else the tolerance is the caller's
        # Rounding explains what disappears where the same rule computes in float64.
        agrees = np.abs(line.widened - numerical.derivative) <= allowed + numerical.error
        rounding = ROUNDINGS_OF_A_VALUE * tolerance.unit * line.value / line.size
        allowed = np.fmax(allowed, np.where(agrees, rounding, 0.0))
    entries = []
    for i, verdict in enumerate(_verdicts(derivative, numerical, allowed, visible)):
        remark = line.refusals[i] if verdict == "refused" else ""
        if verdict == "kink":
            remark = f"{numerical.left[i]:.3g} | {numerical.right[i]:.3g}"
        entries.append(
            Entry(
                order=order,
                name=line.names[i],
                embedded=float(derivative[i]) + 0.0,  # no minus zero
                numerical=float(numerical.derivative[i]),
                uncertainty=float(numerical.error[i]),
                allowed=float(allowed[i] + numerical.error[i]),
                verdict=verdict,
                remark=remark,
                steps=numerical.steps,
                differences=numerical.differences[:, i],
            )
        )
    return entries


def _verdicts(embedded: Array, numerical: Estimate, tolerance: Array, visible: Array) -> list[str]:
    error, slopes = numerical.error, [numerical.left, numerical.right]
    low, high = np.minimum(*slopes), np.maximum(*slopes)
    with np.errstate(invalid="ignore"):  # derivatives may be infinite
        absolute, allowed = np.abs(embedded - numerical.derivative), tolerance + error
        between = (embedded >= low - allowed) & (embedded <= high + allowed)
        # The estimated error may itself be off by its own size.
        differ = (absolute > allowed) & (absolute > 2 * error)
        differ |= np.isfinite(error) & np.isinf(embedded)
        agree = (absolute <= allowed) & (error <= visible)
    verdicts = {
        "refused": np.isnan(embedded),
        "kink": numerical.kink & between,
        "wrong": numerical.kink | differ,
        "ok": agree,
    }
    return list(map(str, np.select(list(verdicts.values()), list(verdicts), "cannot tell")))
