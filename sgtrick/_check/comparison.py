"""The embedded derivative of a function at one point, compared with differences."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sgtrick._check import full_mode, random_mode
from sgtrick._check.finite_differences import StepBounds
from sgtrick._check.leaves import Named, OfLeaves
from sgtrick._check.point import Point
from sgtrick._check.report import Entry
from sgtrick._check.second_order import asymmetry, magnitude_of_gradient
from sgtrick._check.verdicts import Tolerance
from sgtrick._types import Array


class Options(NamedTuple):
    """The options of `check_gradient`, which documents them."""

    bounds: StepBounds
    rtol: float | None
    atol: float | None
    random: np.random.Generator | None  # None in full mode


class Comparison(NamedTuple):
    """What was found.

    Attributes:
        entries: The entries.
        notes: Remarks for the report.
        evaluations: The number of calls of the function.
        magnitude: The size of what the gradient, as a function, is rounded with.
    """

    entries: list[Entry]
    notes: list[str]
    evaluations: int
    magnitude: Array


def compared(
    function: OfLeaves, inputs: Named, order: int, options: Options, magnitude: Array | None
) -> Comparison:
    """Compares the derivative of a function.

    Args:
        function: The function, for order 2 the gradient.
        inputs: The point.
        order: Its order in the report.
        options: The options.
        magnitude: The size `[m]` of what the entries of the value are rounded with. None: their
            own.
    """
    point = Point(function, inputs, magnitude)
    tolerance = Tolerance.of(point.tensors, options.rtol, options.atol)
    random = options.random
    if random is None:
        entries, connected = full_mode.compared(point, order, options.bounds, tolerance)
    else:
        entries, connected = random_mode.compared(point, order, options.bounds, tolerance, random)
    point.check_repeatable()  # a state may have changed since
    notes = _about_precision(point, entries, tolerance)
    notes += [
        f"No gradient with respect to {name}: the tape returns None, compared as zero."
        for name, is_connected in zip(point.names, connected, strict=True)
        if not is_connected
    ]
    if order == 2 and random is None:
        notes += asymmetry(entries, sum(x.size for x in point.x), tolerance)
    return Comparison(
        entries, notes, point.evaluations, magnitude_of_gradient(point, random is not None)
    )


def _about_precision(point: Point, entries: Sequence[Entry], tolerance: Tolerance) -> list[str]:
    """In which dtype differences were taken, and how accurate they are if not in float64."""
    dtypes, rtol = point.narrow_dtypes, f"(rtol {tolerance.rtol:.1g})"
    if not dtypes:
        return []
    if not point.why_narrow:
        return [f"embedded gradient in {dtypes}, differences in float64 {rtol}"]
    errors = [
        entry.uncertainty / size
        for entry in entries
        if np.isfinite(entry.uncertainty)
        and (size := np.fmax(abs(entry.numerical), abs(entry.embedded)))
    ]
    seen = f"; the median error of the differences is {np.median(errors):.0e}" if errors else ""
    return [f"f was evaluated in {dtypes}, because {point.why_narrow}{seen} {rtol}"]
