"""The random mode: projections of the value, by differences along random directions."""

import numpy as np

from sgtrick._check.finite_differences import StepBounds
from sgtrick._check.leaves import random_signs, wide
from sgtrick._check.point import Point
from sgtrick._check.report import Entry
from sgtrick._check.verdicts import Embedded, Tolerance, judged
from sgtrick._types import Array

DIRECTIONS = 10  # 2**-10 is the probability that errors cancel in all of them


def compared(
    point: Point,
    order: int,
    bounds: StepBounds,
    tolerance: Tolerance,
    random: np.random.Generator,
) -> tuple[list[Entry], list[bool]]:
    """An entry for each direction, and which leaves have a gradient."""
    entries: list[Entry] = []
    reached = [False] * len(point.names)
    moved = max(scale.max(initial=0.0) for scale in point.scales)
    for i in range(DIRECTIONS):
        direction = _direction(point, random, moved)
        upstream = _weights(point, random)
        terms, connected, refusal = point.recorded.along(direction, upstream)
        widened = terms
        if point.widened is not point.recorded:
            widened, *_ = point.widened.along(direction, upstream)
        reached = [r or c for r, c in zip(reached, connected, strict=True)]
        projection = np.concatenate([u.ravel() for u in upstream])
        size = np.sqrt(np.sum(terms**2, keepdims=True))
        embedded = Embedded(
            names=[f"direction {i}"],
            derivative=terms.sum(keepdims=True),
            widened=widened.sum(keepdims=True),
            refusals=[refusal],
            connected=any(reached),
            terms=size,
            largest=size,
            value=np.abs(projection * point.value).sum(keepdims=True),
            magnitude=np.abs(projection * point.magnitude).sum(keepdims=True),
            moved=moved,
        )
        estimate = point.differences(direction, moved, moved, bounds, projection)
        entries += judged(embedded, estimate, tolerance, order)
    return entries, reached


def _direction(point: Point, random: np.random.Generator, largest: float) -> list[Array]:
    """Every entry moves in proportion to its own size, so that none dominates the others."""
    xs = list(zip(point.names, point.x, strict=True))
    signs = random_signs(random, xs)
    return [scale / largest * v for scale, v in zip(point.scales, signs, strict=True)]


def _weights(point: Point, random: np.random.Generator) -> list[Array]:
    """Random signs, weighted so that large values do not hide small ones, as their dtypes allow."""
    ys = point.recorded.ys
    weights = [
        min(1 / (np.abs(wide(y)).max(initial=0.0) or 1.0), float(y.dtype.max)) for _, y in ys
    ]
    return [v * w for v, w in zip(random_signs(random, ys), weights, strict=True)]
