"""The derivative along a line by central differences over a sweep of steps, with its error.

The steps shrink by a constant factor. Large steps suffer from truncation error, small ones from the
noise of the function. Which are best depends on the function, so all are tried. Richardson
extrapolation removes and estimates the truncation error, as in C. J. F. Ridders, "Accurate
computation of F'(x) and F'(x)F''(x)", Advances in Engineering Software 4 (1982) 75-76. The noise is
estimated from the smallest steps, where nothing else is left.

Nothing here depends on TensorFlow.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sgtrick._types import Array

RATIO = 4.0  # of each step to the next
LARGEST = 0.1  # largest step, relative to the size of x or 1
SMALLEST = 1e-7  # smallest step; below it, differences in float64 are rounding error
LEVELS = 4  # of extrapolation; higher ones amplify noise and gain no digits
NOISY_STEPS = 5  # number of smallest steps, where truncation is negligible


class Estimate(NamedTuple):
    """The numerical derivatives of `m` outputs along one line; arrays are `[m]` unless noted."""

    derivative: Array  # NaN where no step was finite
    error: Array  # estimated error of the derivative; inf where unknown
    left: Array  # one-sided derivatives, which differ at a kink
    right: Array
    kink: Array  # whether they differ at the smallest scale that noise lets us resolve
    steps: Array  # [k]
    differences: Array  # [k, m]


def sweep(size: float, position: float, eps: Any) -> Array:
    """Returns the steps, large to small.

    Args:
        size: Size of the leaf that moves.
        position: Size of the entry that moves. If it is much smaller than `size`, the sweep
            continues to steps that do not change its sign.
        eps: None, the largest step, or a pair of the smallest and the largest.
    """
    if eps is None:
        smallest = SMALLEST * max(min(size, position), 1e-30 * max(size, 1.0))
        largest = LARGEST * max(size, 1.0)
    else:
        smallest, largest = eps if np.ndim(eps) else (eps * SMALLEST / LARGEST, eps)
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
        right, left = (f1 - value) / h1, (value - f2) / h2
        # The two steps differ only by rounding, so this is still of second order.
        central = (f1 - f2) / (h1 + h2)
        h = np.broadcast_to((h1 + h2) / 2, central.shape)
        small = -min(NOISY_STEPS, math.ceil(len(steps) / 3))
        last = np.abs(np.diff(central, axis=0))[small:] * h[1:][small:]
        noise = np.fmax(rounding, np.where(np.isfinite(last), last, 0).max(0))
        return _choose(central, right, left, h, 2 * noise / h, steps)


def _choose(
    central: Array, right: Array, left: Array, h: Array, noise: Array, steps: Array
) -> Estimate:
    """Takes the entry of the extrapolation tableau with the smallest estimated error."""
    # For a smooth function, the gap between the one-sided derivatives shrinks in proportion to the
    # step; at a kink it does not shrink; and for steps too large to resolve the function near x it
    # is erratic. The threshold lies between the first two.
    gap = np.abs(right - left)
    significant = gap > 4 * noise
    apart = np.zeros_like(significant)
    apart[1:] = significant[1:] & significant[:-1] & (gap[1:] > RATIO**-0.4 * gap[:-1])
    moved = np.abs(np.diff(central, axis=0, prepend=np.inf))
    steady = moved < gap / 8  # and the gap of noise grows as the step shrinks
    steady[1:] &= gap[1:] < RATIO**0.4 * gap[:-1]
    resolved = _down_to_noise(apart & steady, significant)
    is_kink = resolved.any(0)
    penalty = np.where(is_kink, ~resolved, apart) * gap
    best = np.full(central.shape[1], np.nan)
    error, row = np.full_like(best, np.inf), np.zeros(best.shape, int)
    cost = np.full_like(best, np.inf)
    # Finer differences decide: far from x, a function may look like another one. Differences of
    # zero decide nothing, since they may be rounded away.
    slack = np.where(np.isfinite(central) & (central != 0), 4 * (moved + noise), np.inf)
    # Where two finer ones agree with each other, but not at all with the estimate, its error is at
    # least the distance: noise keeps them from deciding.
    following = np.abs(np.diff(central, axis=0, append=np.nan)) + noise
    level = central
    for m in range(1, LEVELS + 1):
        if len(level) < 2:
            break
        coarse, fine = level[:-1], level[1:]
        level = fine + (fine - coarse) / (RATIO ** (2 * m) - 1)
        # The distance to the unextrapolated pair bounds the truncation error of the extrapolation.
        spread = np.fmax(np.abs(level - fine), np.abs(level - coarse))
        for k, (estimate, total) in enumerate(zip(level, spread + noise[m:], strict=True)):
            finer = slice(k + m + 1, None)
            off = np.abs(estimate - central[finer]) - slack[finer]
            away = np.abs(estimate - central[finer])
            size = np.fmax(np.abs(estimate), np.abs(central[finer]))
            doubted = (away > following[finer]) & (central[finer] != 0) & (away > 0.01 * size)
            total = np.maximum(total, np.where(doubted, away, 0).max(0, initial=0))
            total_cost = total + penalty[k + m] + np.fmax(off, 0).max(0, initial=0)
            better = total_cost < cost
            best = np.where(better, estimate, best)
            error = np.where(better, total, error)
            cost = np.where(better, total_cost, cost)
            row = np.where(better, k + m, row)
    lower = np.where(is_kink, row, np.minimum(row + 1, len(h) - 1))
    column = np.arange(len(best))
    kink = (is_kink | apart[lower, column]) & np.isfinite(error)
    return Estimate(best, error, left[lower, column], right[lower, column], kink, steps, central)


def _down_to_noise(apart: Array, significant: Array) -> Array:
    """The steps over which a gap does not shrink, where these are at least three and the smallest.

    However much else a function does at larger steps, this is a kink.
    """
    rows = np.arange(len(apart))[:, None]
    last = np.where(significant, rows, -1).max(0)
    first = np.where(~apart & (rows <= last), rows, -1).max(0) + 1
    resolved: Array = (rows >= first) & (rows <= last) & (last - first >= 2)
    return resolved
