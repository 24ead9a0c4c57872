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
UNEXPLAINED = "The gradient is NaN, and no function says why."


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


class Embedded(NamedTuple):
    """The embedded derivatives of `m` numbers along one line, and what their errors depend on.

    Attributes:
        names: The names of the entries.
        derivative: What the tape returns, `[m]`: NaN if refused, 0 for None.
        widened: The same in the dtype of the differences.
        refusals: The messages of functions that refused.
        connected: Whether the tape returned a gradient.
        terms: The size of the terms of which the derivative is the sum: where these cancel, the
            errors of a right gradient do not.
        largest: The size of the largest derivatives that autodiff computes together with these.
        value: The size of the numbers that are differentiated.
        magnitude: The size of what these are rounded with.
        moved: The size of the `x` that moves.
    """

    names: Sequence[str]
    derivative: Array
    widened: Array
    refusals: Sequence[str]
    connected: bool
    terms: Array
    largest: Array
    value: Array
    magnitude: Array
    moved: float


def judged(
    embedded: Embedded, numerical: Estimate, tolerance: Tolerance, order: int
) -> list[Entry]:
    """The entries for derivatives of this order along a line."""
    derivative = embedded.derivative
    size = np.fmax(np.abs(derivative), np.abs(numerical.derivative))
    allowed = tolerance.allowed(np.fmax(size, embedded.terms), embedded.largest)
    visible = np.fmax(allowed, VISIBLE * _size_to_see(embedded, size))
    allowed = np.fmax(allowed, _mere_rounding(embedded, numerical, tolerance, allowed))
    verdicts = _verdicts(derivative, numerical, allowed, visible)
    entries = []
    for i, (name, verdict) in enumerate(zip(embedded.names, verdicts, strict=True)):
        remark = "" if embedded.connected else "no gradient"
        if verdict == "kink":
            remark = f"{numerical.left[i]:.3g} | {numerical.right[i]:.3g}"
        if verdict == "refused":
            remark = embedded.refusals[i] or UNEXPLAINED
        entries.append(
            Entry(
                order=order,
                name=name,
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


def _size_to_see(embedded: Embedded, size: Array) -> Array:
    """The size of derivatives relative to which an error of 1 % has to be detected."""
    negligible = NEGLIGIBLE * embedded.value / max(embedded.moved, 1.0)
    return np.fmax(np.fmax(size, embedded.terms), np.fmax(embedded.largest, negligible))


def _mere_rounding(
    embedded: Embedded, numerical: Estimate, tolerance: Tolerance, allowed: Array
) -> Array:
    """What rounding alone explains: the same rule agrees where it is computed in float64."""
    if tolerance.atol is not None:  # the caller's tolerance is not widened
        return np.zeros_like(allowed)
    agrees = np.abs(embedded.widened - numerical.derivative) <= allowed + numerical.error
    rounding = ROUNDINGS_OF_A_VALUE * tolerance.unit * embedded.magnitude / embedded.moved
    return np.where(agrees, rounding, 0.0)


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
