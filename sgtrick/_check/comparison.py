"""Embedded derivatives of a function at one point, compared with differences along lines."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sgtrick._check.finite_differences import Estimate, estimated
from sgtrick._check.leaves import sizes_of_leaves
from sgtrick._check.point import ROUNDINGS_OF_A_VALUE, Point
from sgtrick._check.recorded import Recorded
from sgtrick._check.report import Entry
from sgtrick._types import Array

DIRECTIONS = 10  # 2**-10 is the probability that errors cancel in all of them
# A derivative has passed through a few operations, each of which rounds it once.
ROUNDINGS_OF_AUTODIFF = 16
# With this error, relative to the derivative, differences still detect one that is off by 1 %.
VISIBLE = 0.005
# Relative to the value divided by the size of x. What is less is zero for every purpose, and a
# constant function, whose differences are rounding errors, has no other size to be measured by.
NEGLIGIBLE = 1e-6
# The same relative to the slope over the largest step: x^3 has no other size at zero.
FLAT = 1e-4


class Line(NamedTuple):
    """A line along which `m` numbers are differentiated, with the embedded derivatives.

    Attributes:
        names: The names of the entries of the report.
        direction: How each entry of `x` moves.
        weights: Those of the entries of the value if the number is a projection of it, or None.
        derivative: What the tape returns, `[m]` as all that follows: NaN if refused, 0 for None.
        widened: The same in the dtype of the differences.
        refusals: The messages of functions that refused.
        terms: The size of the terms of which the derivative is the sum: where these cancel, the
            errors of a right gradient do not.
        largest: The size of the largest derivatives that autodiff computes together with these.
    """

    names: list[str]
    direction: Array
    weights: Array | None
    derivative: Array
    widened: Array
    refusals: list[str]
    terms: Array
    largest: Array


def entry_lines(point: Point) -> Iterator[Line]:
    """For each entry of `x`, the line in which it moves alone, and a column of the Jacobian."""
    jacobian, refusals = _jacobian(point.recorded)
    widened = jacobian if point.widened is point.recorded else _jacobian(point.widened)[0]
    values = point.recorded.names
    finite = np.where(np.isfinite(jacobian), np.abs(jacobian), 0.0)
    for i, by in enumerate(point.names):
        together = finite[:, point.leaf_of == point.leaf_of[i]]
        yield Line(
            names=[by] if len(values) == 1 else [f"{value} by {by}" for value in values],
            direction=1.0 * (np.arange(len(point.names)) == i),
            weights=None,
            derivative=jacobian[:, i],
            widened=widened[:, i],
            refusals=refusals,
            terms=np.abs(jacobian[:, i]),
            largest=np.max(together, axis=1),
        )


def _jacobian(recorded: Recorded) -> tuple[Array, list[str]]:
    """The derivatives `[m, n]`, and the refusals of the rows."""
    rows = np.eye(len(recorded.value))
    gradients, refusals = zip(*map(recorded.pulled, rows), strict=True)
    return np.stack(gradients), list(refusals)


def random_lines(point: Point, random: np.random.Generator, order: int) -> Iterator[Line]:
    """Random projections of the value along random directions."""
    name = "direction" if order == 1 else "direction of the gradient"
    for i in range(DIRECTIONS):
        yield _random_line(point, random, f"{name} {i}")


def forward_line(point: Point, random: np.random.Generator) -> Line:
    """A random line with the derivative in forward mode, for functions with a rule of its own."""
    line = _random_line(point, random, "forward mode")
    pushed = np.sum(line.weights * point.recorded.pushed(line.direction), keepdims=True)
    return line._replace(derivative=pushed, widened=pushed)


def _random_line(point: Point, random: np.random.Generator, name: str) -> Line:
    """A random projection of the value along a random direction.

    Every entry of `x` moves by its own size, up or down, so that none dominates the others. Leaves
    of the value are weighted by their size, as their dtypes allow, for the same reason.
    """
    direction = point.scales / point.scales.max() * random.choice([-1.0, 1.0], len(point.scales))
    ys = point.recorded.ys
    weights = np.minimum(1 / sizes_of_leaves(ys), min(float(y.dtype.max) for y in ys))
    weights *= random.choice([-1.0, 1.0], len(weights))
    gradient, refusal = point.recorded.pulled(weights)
    is_wide = point.widened is point.recorded
    widened = gradient if is_wide else point.widened.pulled(weights)[0]
    terms = np.sqrt(np.sum((direction * gradient) ** 2, keepdims=True))
    derivative, wide = (np.sum(direction * g, keepdims=True) for g in (gradient, widened))
    return Line([name], direction, weights, derivative, wide, [refusal], terms, terms)


def compared(
    point: Point,
    lines: Iterable[Line],
    order: int,
    bounds: Array | None,
    rtol: float | None,
    atol: float | None,
) -> list[Entry]:
    """The entries of the report, of this order."""
    swept = [(line, point.quotients(line.direction, line.weights, bounds)) for line in lines]
    # What computes in a lower precision along one line does so along all.
    jumps = np.max([quotients.jumps for _, quotients in swept], axis=0)
    jump = np.max(jumps / np.fmax(point.sizes_of_values(swept[0][0].weights), point.least))
    if jump > ROUNDINGS_OF_A_VALUE * point.unit:
        point.jump = float(jump)
    rtol = point.rtol if rtol is None else rtol
    return [
        entry
        for line, quotients in swept
        for entry in _judged(point, line, estimated(quotients, jumps), order, rtol, atol)
    ]


def _judged(
    point: Point, line: Line, found: Estimate, order: int, rtol: float, atol: float | None
) -> Iterator[Entry]:
    derivative, value = line.derivative, point.sizes_of_values(line.weights)
    x = point.sizes[line.direction != 0].max()
    size = np.fmax(np.fmax(np.abs(derivative), np.abs(found.derivative)), line.terms)
    slope = np.abs(found.differences[0])
    slope = np.where(np.isfinite(slope), slope, 0.0)
    negligible = np.fmax(NEGLIGIBLE * value / max(x, 1.0), FLAT * slope)
    if atol is not None:
        tolerance = rtol * size + atol
    else:
        tolerance = rtol * size + ROUNDINGS_OF_AUTODIFF * point.unit * line.largest + point.least
    visible = np.fmax(tolerance, VISIBLE * np.fmax(np.fmax(size, line.largest), negligible))
    if atol is None:  # else the tolerance is the caller's
        # Rounding explains what disappears where the same rule computes in float64.
        agrees = np.abs(line.widened - found.derivative) <= tolerance + found.error
        rounding = ROUNDINGS_OF_A_VALUE * point.unit * value / x
        tolerance = np.fmax(tolerance, np.where(agrees, rounding, 0.0))
    allowed = tolerance + found.error
    for i, verdict in enumerate(_verdicts(derivative, found, allowed, visible)):
        remark = line.refusals[i] if verdict == "refused" else ""
        if verdict == "kink":
            remark = f"{found.left[i]:.3g} | {found.right[i]:.3g}"
        yield Entry(
            order=order,
            name=line.names[i],
            embedded=float(derivative[i]) + 0.0,  # no minus zero
            numerical=float(found.derivative[i]),
            uncertainty=float(found.error[i]),
            allowed=float(allowed[i]),
            verdict=verdict,
            remark=remark,
            steps=found.steps,
            differences=found.differences[:, i],
        )


def _verdicts(embedded: Array, found: Estimate, allowed: Array, visible: Array) -> list[str]:
    error, slopes = found.error, [found.left, found.right]
    low, high = np.minimum(*slopes), np.maximum(*slopes)
    with np.errstate(invalid="ignore"):  # derivatives may be infinite
        absolute = np.abs(embedded - found.derivative)
        between = (embedded >= low - allowed) & (embedded <= high + allowed)
        # The estimated error may itself be off by its own size.
        differ = (absolute > allowed) & (absolute > 2 * error)
        differ |= np.isfinite(error) & np.isinf(embedded)
        agree = (absolute <= allowed) & (error <= visible)
    verdicts = {
        "refused": np.isnan(embedded),
        "kink": found.kink & between,
        "wrong": found.kink | differ,
        "ok": agree,
    }
    return list(map(str, np.select(list(verdicts.values()), list(verdicts), "cannot tell")))
