"""The derivative along a line by central differences over a sweep of steps, with its error.

The steps shrink by a constant factor. Large steps suffer from truncation error, small ones from the
noise of the function. Which are best depends on the function, so all are tried, in four steps, each
a function below: the noise is estimated from the smallest steps, where nothing else is left; kinks
are told from curvature by how one-sided derivatives come together; Richardson extrapolation removes
and estimates the truncation error, as in C. J. F. Ridders, "Accurate computation of F'(x) and
F'(x)F''(x)", Advances in Engineering Software 4 (1982) 75-76; and finer differences may doubt it.

Nothing here depends on TensorFlow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from sgtrick._types import Array

# None: by the size of x. Otherwise the largest step, or the smallest and the largest.
StepBounds: TypeAlias = float | Sequence[float] | None

RATIO = 4.0  # of each step to the next
LARGEST = 0.1  # largest step, relative to the size of x or 1
SMALLEST = 1e-7  # smallest step; below it, differences in float64 are rounding error
LEVELS = 4  # of extrapolation; higher ones amplify noise and gain no digits
NOISY_STEPS = 5  # number of smallest steps, where truncation is negligible
# By how much a gap may differ between two steps and still count as the same. That of a smooth
# function shrinks in proportion to the step, by RATIO; that of pure noise grows by RATIO.
SAME_GAP = RATIO**0.4
KINK_STEPS = 3  # over so many a gap must stay the same: over two it may do so by chance
# Finer differences that are so close to an estimate, relative to its size, do not doubt it: what
# they could doubt would not be seen as an error of the gradient.
CLOSE = 0.01


class Estimate(NamedTuple):
    """The numerical derivatives of `m` outputs along one line; arrays are `[m]` unless noted."""

    derivative: Array  # NaN where no step was finite
    error: Array  # estimated error of the derivative; inf where unknown
    left: Array  # one-sided derivatives, which differ at a kink
    right: Array
    kink: Array  # whether they differ at the smallest scale that noise lets us resolve
    steps: Array  # [k]
    differences: Array  # [k, m]


class _Quotients(NamedTuple):
    """Difference quotients for `k` steps, large to small, and their noise; arrays are `[k, m]`."""

    left: Array
    right: Array
    central: Array
    noise: Array


def sweep(size: float, position: float, bounds: StepBounds) -> Array:
    """Returns the steps, large to small.

    Args:
        size: Size of the leaf that moves.
        position: Size of the entry that moves. If it is much smaller than `size`, the sweep
            continues to steps that do not change its sign.
        bounds: None, the largest step, or a pair of the smallest and the largest.
    """
    if bounds is None:
        smallest = SMALLEST * max(min(size, position), 1e-30 * max(size, 1.0))
        largest = LARGEST * max(size, 1.0)
    elif isinstance(bounds, (int, float)):
        smallest, largest = bounds * SMALLEST / LARGEST, bounds
    else:
        smallest, largest = bounds
    count = 1 + math.ceil(math.log(largest / smallest) / math.log(RATIO))
    return largest * RATIO ** -np.arange(max(count, 3), dtype=np.float64)


def differentiate(
    move: Callable[[float], tuple[Array, float]], value: Array, steps: Array, rounding: Array
) -> Estimate:
    """Differentiates `value` along a line.

    Args:
        move: Takes a signed step; returns the values `[m]` there, and the step as rounded in the
            dtype of `x`.
        value: The values at step zero, `[m]`.
        steps: The steps from `sweep`.
        rounding: The rounding error of the values, `[m]`; their noise may be larger.
    """
    with np.errstate(all="ignore"):  # values that are not finite are dropped below
        ahead, behind = (list(zip(*map(move, s * steps), strict=True)) for s in (1, -1))
        f1, f2 = np.stack(ahead[0]), np.stack(behind[0])
        h1, h2 = np.array(ahead[1])[:, None], -np.array(behind[1])[:, None]
        # The two steps differ only by rounding, so this is still of second order.
        central = (f1 - f2) / (h1 + h2)
        noise = _noise(central, (h1 + h2) / 2, rounding)
        quotients = _Quotients((value - f2) / h2, (f1 - value) / h1, central, noise)
        return _chosen(quotients, steps)


def _noise(central: Array, h: Array, rounding: Array) -> Array:
    """The noise of the quotients: where truncation is negligible, neighbours differ by it alone."""
    small = -min(NOISY_STEPS, math.ceil(len(h) / 3))
    changes = (np.abs(np.diff(central, axis=0)) * h[1:])[small:]
    of_values = np.fmax(rounding, np.where(np.isfinite(changes), changes, 0).max(0))
    noise: Array = 2 * of_values / h
    return noise


def _chosen(quotients: _Quotients, steps: Array) -> Estimate:
    """Takes the entry of the extrapolation tableau with the smallest estimated error."""
    left, right, central, _ = quotients
    kink, penalty = _kinks(quotients)
    best, error = np.full(len(kink), np.nan), np.full(len(kink), np.inf)
    cost, row = error, np.zeros(len(kink), int)
    for k, estimate, spread in _tableau(quotients):
        its_error = np.maximum(spread, _doubt(estimate, k, quotients))  # NaN stays NaN
        its_cost = its_error + penalty[k]
        better = its_cost < cost
        best, error = np.where(better, estimate, best), np.where(better, its_error, error)
        cost, row = np.where(better, its_cost, cost), np.where(better, k, row)
    column = np.arange(len(kink))
    kink &= np.isfinite(error)
    return Estimate(best, error, left[row, column], right[row, column], kink, steps, central)


def _kinks(quotients: _Quotients) -> tuple[Array, Array]:
    """Whether there is a kink at step zero, `[m]`, and the penalty for each step, `[k, m]`.

    It is a kink if one-sided derivatives keep their distance from some step down to the last that
    noise lets us resolve, however much else the function does at larger steps. The penalty is this
    distance at steps that show something else: at a kink, all others; elsewhere, those that are too
    large to see that the function is smooth.
    """
    left, right, central, noise = quotients
    gap = np.abs(right - left)
    # Each of the two has twice the noise of a central difference.
    significant = gap > 4 * noise
    kept = np.zeros_like(significant)
    kept[1:] = significant[1:] & significant[:-1] & (gap[1:] > gap[:-1] / SAME_GAP)
    # At a kink nothing else changes much; where steps are too large, central differences do too.
    steady = np.abs(np.diff(central, axis=0, prepend=np.inf)) < gap / 8
    steady[1:] &= gap[1:] < gap[:-1] * SAME_GAP

    row = np.arange(len(gap))[:, None]
    last = np.where(significant, row, -1).max(0)
    first = np.where(~(kept & steady) & (row <= last), row, -1).max(0) + 1
    shown = (row >= first) & (row <= last) & (last - first + 1 >= KINK_STEPS)
    kink: Array = shown.any(0)
    return kink, np.where(np.where(kink, ~shown, kept), gap, 0.0)


def _tableau(quotients: _Quotients) -> Iterator[tuple[int, Array, Array]]:
    """Yields extrapolated derivatives, each with its smallest step and its estimated error."""
    level = quotients.central
    for m in range(1, min(LEVELS + 1, len(level))):
        coarse, fine = level[:-1], level[1:]
        level = fine + (fine - coarse) / (RATIO ** (2 * m) - 1)
        # The distance to the unextrapolated pair bounds the truncation error of the extrapolation.
        spread = np.fmax(np.abs(level - fine), np.abs(level - coarse)) + quotients.noise[m:]
        for k, (estimate, error) in enumerate(zip(level, spread, strict=True), start=m):
            yield k, estimate, error


def _doubt(estimate: Array, row: int, quotients: _Quotients) -> Array:
    """The largest distance to finer differences that contradict an estimate made with this step.

    They do if the next one confirms them, up to noise: far from `x`, a function may look like
    another one, with a convergence of its own.
    """
    central = quotients.central
    change = np.abs(np.diff(central, axis=0, append=np.nan))[row + 1 :]
    finer, noise = central[row + 1 :], quotients.noise[row + 1 :]
    distance = np.abs(estimate - finer)
    size = np.fmax(np.abs(estimate), np.abs(finer))
    contradict = (distance > change + noise) & (distance > CLOSE * size)
    doubt: Array = np.where(contradict, distance, 0).max(0, initial=0)
    return doubt
