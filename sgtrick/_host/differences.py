"""Jacobians by finite differences: all points of all members of a batch as one batch.

The names and the steps are those of `scipy.optimize.approx_fprime` and its relatives: the step of
an entry `x` is `eps**(1/2) * max(1, |x|)` to one side for "2-point", away from zero, and
`eps**(1/3) * max(1, |x|)` to both for "3-point". `eps` is that of the narrowest dtype in play, of
the arguments or of any value: values in float32 do not change along a step for float64.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgtrick._host import checks, members
from sgtrick._host.engine import Engine
from sgtrick._host.layout import Layout, Shape, cast_copy, with_ones_behind
from sgtrick._types import Array

# By their names in SciPy: the power of eps in the step, and the directions of the steps.
SCHEMES = {"2-point": (1 / 2, (1,)), "3-point": (1 / 3, (1, -1))}


def ask(at_steps: members.Asking, *arrays: Array | bytes) -> list[Array]:
    """The Jacobians of an engine that gives values, zero where it failed.

    Args:
        at_steps: Asks for values in float64: rounded, they would give noise.
        arrays: The leaves of the arguments, the values in float64, their precision, and perhaps
            where it failed.
    """
    engine, layout = at_steps.engine, at_steps.layout
    n, m = len(layout.leaves), len(layout.leaves) + len(layout.value.shapes)
    axis = np.ndim(arrays[0]) - len(layout.leaves[0].event)  # of the points, after the batch
    # The engine alone may raise where NumPy is told to raise, and not these computations.
    with np.errstate(all="ignore"):
        eps = float(np.max(arrays[m], initial=checks.eps(engine.dtype)))
        points, steps = _around(engine, layout, arrays[:n], axis, eps)
    ys = [np.expand_dims(y, axis) for y in arrays[n:m]]
    if steps.total:
        found = at_steps(*points)
        values, failures = found[: len(ys)], found[len(ys) : -1]
    else:
        values, failures = [y[(slice(None),) * axis + (slice(0),)] for y in ys], []
    with np.errstate(all="ignore"):
        jacobians = []
        for value, y in zip(values, ys, strict=True):
            for failed in failures:
                value = np.where(with_ones_behind(failed, value.ndim - failed.ndim), np.nan, value)
            for slopes in _slopes(steps, np.moveaxis(value, axis, 0), np.moveaxis(y, axis, 0)):
                for failed in map(np.asarray, arrays[m + 1 :]):
                    ndims = slopes[0].ndim - failed.ndim
                    slopes = np.where(with_ones_behind(failed, ndims), 0, slopes)
                jacobians.append(np.moveaxis(slopes, 0, -1))
    events = itertools.cycle(steps.events)
    jacobians = [j.reshape((*j.shape[:-1], *e)) for j, e in zip(jacobians, events, strict=False)]
    batch = np.shape(arrays[n])[: np.ndim(arrays[n]) - len(layout.value.shapes[0])]
    members.note_nonfinite(engine, layout, "value", jacobians, arrays[:n], batch)
    dtypes = [layout.leaves[k].dtype for k in layout.places] * len(ys)
    return list(map(cast_copy, jacobians, dtypes))


class _Steps(NamedTuple):
    """The steps in all entries of all points.

    Attributes:
        events: The event shapes of the points.
        distances: For each point how far its entries move, `[batch..., entries]`.
        is_central: Whether there is a step to the other side, too.
    """

    events: Sequence[Shape]
    distances: Sequence[Array]
    is_central: bool

    @property
    def total(self) -> int:
        """The number of entries of all points."""
        return sum(map(math.prod, self.events))


def _around(
    engine: Engine, layout: Layout, arrays: Sequence[Array | bytes], axis: int, eps: float
) -> tuple[list[Array], _Steps]:
    """The arguments at all steps, `[batch..., steps, event...]`, and the steps."""
    power, signs = SCHEMES[engine.scheme or ""]
    points = [
        np.expand_dims(np.array(a, object if isinstance(a, bytes) else None), axis) for a in arrays
    ]
    events = [points[k].shape[axis + 1 :] for k in layout.places]
    sizes, distances = list(map(math.prod, events)), []
    firsts, count = itertools.accumulate(sizes, initial=0), sum(sizes)
    # One for each entry, and for "3-point" one on the other side of the point.
    for k, event, size, first in zip(layout.places, events, sizes, firsts, strict=False):
        x = points[k].astype(engine.dtype).reshape((*points[k].shape[: axis + 1], size))
        around = np.repeat(x, len(signs) * count, axis)
        x, entries = x[..., 0, :], np.arange(size)
        step = eps**power * np.maximum(1, np.abs(x))
        step = np.where(x < 0, -step, step) if len(signs) == 1 else step
        for side, sign in enumerate(signs):
            around[..., side * count + first + entries, entries] += sign * step
        moved = around[..., first + entries, entries]
        other = x if len(signs) == 1 else around[..., count + first + entries, entries]
        distances.append(moved - other)  # as far as they really are, after rounding
        points[k] = around.reshape((*around.shape[:-1], *event))
    return points, _Steps(events, distances, len(signs) > 1)


def _slopes(steps: _Steps, moved: Array, y: Array) -> Iterator[Array]:
    """The slopes by each point, `[entries, batch..., value...]`.

    `moved` are the values at all steps, `[steps, batch..., value...]`, and `y` those at the point.
    """
    first = 0
    for far in steps.distances:
        end = first + far.shape[-1]
        other = moved[steps.total + first :][: end - first] if steps.is_central else y
        far = with_ones_behind(np.moveaxis(far, -1, 0), moved.ndim - far.ndim)
        yield (moved[first:end] - other) / far
        first = end
