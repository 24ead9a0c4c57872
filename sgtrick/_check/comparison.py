"""Embedded derivatives of a function at one point, compared with differences along lines."""

from collections.abc import Iterator

import numpy as np

from sgtrick._check.finite_differences import StepBounds
from sgtrick._check.leaves import sizes_of_leaves, unit
from sgtrick._check.point import Point
from sgtrick._check.recorded import Recorded
from sgtrick._check.report import Entry
from sgtrick._check.verdicts import Line, Tolerance, judged
from sgtrick._types import Array

DIRECTIONS = 10  # 2**-10 is the probability that errors cancel in all of them


def compared(
    point: Point,
    order: int,
    bounds: StepBounds,
    tolerance: Tolerance,
    random: np.random.Generator | None,
) -> list[Entry]:
    """The entries: those of the Jacobian, or with a generator those of random directions."""
    lines = _lines_of_entries(point) if random is None else _random_lines(point, random, order)
    return [entry for line in lines for entry in _compared(point, line, order, bounds, tolerance)]


def compared_in_forward_mode(
    point: Point, bounds: StepBounds, tolerance: Tolerance, random: np.random.Generator
) -> list[Entry]:
    """The entry of a random direction in forward mode, for functions with a rule of its own."""
    line = _random_line(point, random, "forward mode")
    pushed = np.sum(line.weights * point.recorded.pushed(line.direction), keepdims=True)
    line = line._replace(derivative=pushed, widened=pushed)
    return _compared(point, line, 1, bounds, tolerance)


def _compared(
    point: Point, line: Line, order: int, bounds: StepBounds, tolerance: Tolerance
) -> list[Entry]:
    numerical = point.differences(line.direction, line.size, line.position, bounds, line.weights)
    return judged(line, numerical, tolerance, order)


def _lines_of_entries(point: Point) -> Iterator[Line]:
    """For each entry of `x`, the line in which it moves alone, and a column of the Jacobian."""
    jacobian, refusals = _jacobian(point.recorded)
    widened = jacobian
    if point.widened is not point.recorded:
        widened, _ = _jacobian(point.widened)
    values = point.recorded.names
    for i, by in enumerate(point.names):
        derivative = jacobian[:, i]
        together = np.abs(jacobian[:, point.leaf_of == point.leaf_of[i]])
        yield Line(
            names=[by] if len(values) == 1 else [f"{value} by {by}" for value in values],
            direction=unit(len(point.names), i),
            weights=None,
            size=point.sizes[i],
            position=point.scales[i],
            derivative=derivative,
            widened=widened[:, i],
            refusals=refusals,
            terms=np.abs(derivative),
            largest=np.fmax.reduce(together, axis=1),
            value=np.abs(point.value),
        )


def _jacobian(recorded: Recorded) -> tuple[Array, list[str]]:
    """The derivatives `[m, n]`, and the refusals of the rows."""
    m = len(recorded.value)
    gradients, refusals = zip(*(recorded.pulled(unit(m, i)) for i in range(m)), strict=True)
    return np.stack(gradients), list(refusals)


def _random_lines(point: Point, random: np.random.Generator, order: int) -> Iterator[Line]:
    name = "direction" if order == 1 else "direction of the gradient"
    for i in range(DIRECTIONS):
        yield _random_line(point, random, f"{name} {i}")


def _random_line(point: Point, random: np.random.Generator, name: str) -> Line:
    """A random projection of the value along a random direction.

    Every entry of `x` moves by its own size, up or down, so that none dominates the others. Leaves
    of the value are weighted by their size, as their dtypes allow, for the same reason.
    """
    largest = point.scales.max()
    direction = point.scales / largest * random.choice([-1.0, 1.0], len(point.scales))
    ys = point.recorded.ys
    weights = np.minimum(1 / sizes_of_leaves(ys), min(float(y.dtype.max) for y in ys))
    weights *= random.choice([-1.0, 1.0], len(weights))
    gradient, refusal = point.recorded.pulled(weights)
    widened = gradient
    if point.widened is not point.recorded:
        widened, _ = point.widened.pulled(weights)
    terms = np.sqrt(np.sum((direction * gradient) ** 2, keepdims=True))
    return Line(
        names=[name],
        direction=direction,
        weights=weights,
        size=largest,
        position=largest,
        derivative=np.sum(direction * gradient, keepdims=True),
        widened=np.sum(direction * widened, keepdims=True),
        refusals=[refusal],
        terms=terms,
        largest=terms,
        value=np.sum(np.abs(weights * point.value), keepdims=True),
    )
