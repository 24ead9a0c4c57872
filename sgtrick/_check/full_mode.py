"""The full mode: every entry of the Jacobian, by differences along one entry of `x` at a time."""

import numpy as np

from sgtrick._check.finite_differences import StepBounds
from sgtrick._check.leaves import show_index
from sgtrick._check.point import Point
from sgtrick._check.report import Entry
from sgtrick._check.verdicts import Embedded, Tolerance, judged
from sgtrick._types import Array


def compared(
    point: Point, order: int, bounds: StepBounds, tolerance: Tolerance
) -> tuple[list[Entry], list[bool]]:
    """The entries, in the order of the Jacobian's columns, and which leaves have a gradient."""
    jacobian = point.recorded.jacobian()
    widened = jacobian if point.widened is point.recorded else point.widened.jacobian()
    entries = []
    for leaf, name in enumerate(point.names):
        estimates = {
            index: point.differences(
                _unit(point, leaf, index),
                point.sizes[leaf],
                float(point.scales[leaf][index]),
                bounds,
            )
            for index in np.ndindex(*point.x[leaf].shape)
        }
        numerical = [np.abs(estimate.derivative) for estimate in estimates.values()]
        largest = np.fmax.reduce(numerical, axis=0, initial=0.0)
        for index, estimate in estimates.items():
            by = name + show_index(index)
            values = point.value_names
            derivative = jacobian.leaves[leaf][(slice(None), *index)]
            embedded = Embedded(
                names=[by] if len(values) == 1 else [f"{value} by {by}" for value in values],
                derivative=derivative,
                widened=widened.leaves[leaf][(slice(None), *index)],
                refusals=jacobian.refusals,
                connected=jacobian.connected[leaf],
                terms=np.abs(derivative),
                largest=largest,
                value=np.abs(point.value),
                magnitude=point.magnitude,
                moved=point.sizes[leaf],
            )
            entries += judged(embedded, estimate, tolerance, order)
    return entries, jacobian.connected


def _unit(point: Point, leaf: int, index: tuple[int, ...]) -> list[Array]:
    """The direction in which this entry moves alone."""
    direction = [np.zeros(x.shape) for x in point.x]
    direction[leaf][index] = 1.0
    return direction
