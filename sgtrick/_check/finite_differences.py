"""The derivative along a line by central differences over a sweep of steps, with its error.

The steps shrink by a constant factor. Large steps suffer from truncation error, small ones from the
noise of the function. Which are best depends on the function, so all are tried, in four steps, each
a function below: the noise is estimated from the smallest steps, which go on until differences have
settled, or from those at which the value begins to move; kinks are told from curvature by how
one-sided derivatives come together; Richardson extrapolation removes and estimates the truncation
error, as in C. J. F. Ridders, "Accurate computation of F'(x) and F'(x)F''(x)", Advances in
Engineering Software 4 (1982) 75-76; and finer differences may doubt it.

Nothing here depends on TensorFlow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgtrick._types import Array

RATIO = 4.0  # of each step to the next
LARGEST = 0.1  # largest step, relative to the size of x or 1
SMALLEST = 1e-7  # smallest step, relative to the entry, of a function that is smooth on its scale
# Steps go on to this fraction of the smallest one until the differences have settled over so many
# of them: what varies fast beside the size of x, as functions of a date do, looks like noise.
FINEST = 1e-5
SETTLED_STEPS = 3
SETTLED = 1e-6  # the relative change of a difference that has settled
LOUD = 0.1  # what is noise is less than this, relative to how far the values move at any step
SMOOTH = 12.0  # what falls by more than this from step to step is no noise
LEVELS = 4  # of extrapolation; higher ones amplify noise and gain no digits
NOISY_STEPS = 5  # number of smallest steps, where truncation is negligible
# What a smooth function does that its derivative does not say falls by RATIO**3 from one step to
# the next. What falls by more than this ends at once.
ABRUPT = 1e3
BISECTIONS = 14  # to tell an end by a jump from one that is continuous
# Relative to the value, and as seen in differences, which hold 1/8 of a jump: rounding to the eight
# bits of bfloat16 jumps by less. A larger jump is one of the function.
LARGEST_JUMP = 1 / 64
# By how much a gap may differ between two steps and still count as the same. That of a smooth
# function shrinks in proportion to the step, by RATIO; that of pure noise grows by RATIO.
SAME_GAP = RATIO**0.4
KINK_STEPS = 3  # over so many a gap must stay the same: over two it may do so by chance

ROUNDINGS = 64  # that a value may have gone through

Taken = tuple[Array, Array, Array, float]  # left, right and central quotients, and the step
Move = Callable[[float], tuple[Array, float]]


class Estimate(NamedTuple):
    """The numerical derivatives of `m` outputs along one line; arrays are `[m]` unless noted."""

    derivative: Array  # NaN where no step was finite
    error: Array  # estimated error of the derivative; inf where unknown
    left: Array  # one-sided derivatives, which differ at a kink
    right: Array
    kink: Array  # whether they differ at the smallest scale that noise lets us resolve
    steps: Array  # [k]
    differences: Array  # [k, m]


class Quotients(NamedTuple):
    """Difference quotients for `k` steps, large to small; arrays are `[k, m]` unless noted."""

    left: Array
    right: Array
    central: Array
    steps: Array  # [k, 1]
    noise: Array  # of the values, [m]
    jumps: Array  # of values that do not move at smaller steps, [m]


def sweep(size: float, position: float, bounds: Array | None) -> tuple[Array, float]:
    """Returns the steps, large to small, and how far to go on if the differences ask for it.

    Args:
        size: Size of the leaf that moves.
        position: Size of the entry that moves. If it is much smaller than `size`, the sweep
            continues to steps that do not change its sign.
        bounds: None, the largest step, or a pair of the smallest and the largest.
    """
    if bounds is None:
        smallest = SMALLEST * max(min(size, position), 1e-30 * max(size, 1.0))
        largest = LARGEST * max(size, 1.0)
    else:
        largest = float(bounds.max())
        smallest = float(bounds.min()) if bounds.ndim else largest * SMALLEST / LARGEST
    count = 1 + math.ceil(math.log(largest / smallest) / math.log(RATIO))
    steps = largest * RATIO ** -np.arange(max(count, 3), dtype=np.float64)
    is_stated = bounds is not None and bounds.ndim
    return steps, steps[-1] if is_stated else FINEST * smallest


def quotients(move: Move, value: Array, steps: Array, rounding: Array, finest: float) -> Quotients:
    """The difference quotients of `value` along a line.

    Args:
        move: Takes a signed step; returns the values `[m]` there, and the step as rounded in the
            dtype of `x`.
        value: The values at step zero, `[m]`.
        steps: The steps from `sweep`.
        rounding: The rounding error of the values, `[m]`; their noise may be larger.
        finest: The smallest step to go on to.
    """

    def at(step: float) -> Taken:
        (f1, h1), (f2, h2) = move(step), move(-step)
        # The two steps differ only by rounding, so the third is still of second order.
        return (value - f2) / -h2, (f1 - value) / h1, (f1 - f2) / (h1 - h2), (h1 - h2) / 2

    with np.errstate(all="ignore"):  # values that are not finite are dropped below
        taken = list(map(at, steps))
        while steps[-1] / RATIO >= finest and not _have_settled(taken, rounding):
            steps = np.append(steps, steps[-1] / RATIO)
            taken.append(at(steps[-1]))
        left, right, central, h = map(np.stack, zip(*taken, strict=True))
        # Where truncation is negligible, neighbours differ by noise alone.
        changes = np.abs(np.diff(central, axis=0)) * h[1:, None]
        changes = np.where(np.isfinite(changes), changes, 0.0)
        finer = np.fmax.accumulate(changes[::-1], axis=0)[::-1]
        finer = np.append(finer[1:], 0 * finer[:1], axis=0)
        # Changes are noise from the last step on at which they fell; those of the smallest steps
        # may fall by chance.
        fell = changes > SMOOTH * finer
        fell[-SETTLED_STEPS:] = False
        is_smooth = np.logical_or.accumulate(fell[::-1], axis=0)[::-1]
        noise = np.where(is_smooth, 0.0, changes)[-_noisy(len(h)) :].max(0)
        noise = np.fmax(rounding, noise)
        least = 4 * np.fmax(rounding, np.spacing(np.abs(central[1:])) * h[1:, None])
        abrupt = changes > np.fmax(ABRUPT * finer, least)
        abrupt[-1:] = False  # what still moves at the smallest steps is noise
        rows = np.arange(len(changes))[:, None]
        last = np.where(abrupt, rows, -1).max(0)
        i, k = int(last.argmax()), int(last.max())
        jumps = np.zeros_like(noise)
        # By check_gradient_rates: without bisections, right gradients of functions that are flat
        # near x cannot be told; with the last jump instead of the largest of a few, right ones of
        # layers in bfloat16 are called wrong.
        if k >= 0 and _ends_by_a_jump(
            lambda step: float(abs(at(step)[2][i] - central[k + 1, i]) * step), steps[k : k + 2]
        ):
            window = (rows <= last) & (rows > last - _noisy(last + 1))
            jumps = np.where(window, changes, 0.0).max(0)
            jumps[jumps > LARGEST_JUMP * np.abs(value)] = 0.0
        # A value that moves at no step may do so at larger ones, if it is a number of float32.
        single = value.astype(np.float32)
        still = np.all(changes == 0.0, axis=0) & (single == value)
        still &= (single.astype(np.float16) != value) & (value % 1 != 0)  # others are constants
        jumps = np.where(still, np.spacing(np.abs(single)), jumps)
    return Quotients(left, right, central, h[:, None], noise, jumps)


def _have_settled(taken: Sequence[Taken], rounding: Array) -> bool:
    """Whether the differences no longer change at the smallest steps, but by noise."""
    left, right, central, h = map(np.stack, zip(*taken, strict=True))
    steps = h[:, None]
    moved = np.fmax(np.abs(left), np.abs(right)) * steps
    moved = np.where(np.isfinite(moved), moved, 0.0).max(0)
    changes = np.abs(np.diff(central, axis=0)) * steps[1:]
    changes, bent = changes[-SETTLED_STEPS:], (np.abs(right - left) * steps)[-SETTLED_STEPS:]
    is_loud = np.fmax(changes, bent) > np.fmax(LOUD * moved, ROUNDINGS * rounding)
    slack = SETTLED * np.abs(central[-SETTLED_STEPS:]) * steps[-SETTLED_STEPS:]
    falls = changes[-2] > SMOOTH * changes[-1]
    is_smooth = falls & (changes > np.fmax(slack, ROUNDINGS * rounding))
    return not np.any(is_loud | is_smooth)


def _noisy(count: Array | int) -> Array:
    noisy: Array = np.minimum(NOISY_STEPS, np.ceil(np.divide(count, 3))).astype(int)
    return noisy


def _ends_by_a_jump(moved: Callable[[float], float], between: Array) -> bool:
    """Whether what is flat, or straight, at small steps begins to move by a jump.

    Values that were computed in a lower precision than that of their dtype do not move at small
    steps, so that these show no noise. Where they begin to move, they jump. A function that is flat
    or straight near `x` begins continuously, and so one bisection tells the two.
    """
    high, low = (float(step) for step in between)
    first = above = moved(high)
    below = 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        at = moved(middle)
        if at > first / 8:
            high, above = middle, at
        else:
            low, below = middle, at
    return above - below > first / 16


def estimated(quotients: Quotients, jumps: Array) -> Estimate:
    """Takes the entry of the extrapolation tableau with the smallest estimated error.

    Args:
        quotients: Those along a line.
        jumps: Those of the values, `[m]`, along this line or another.
    """
    with np.errstate(all="ignore"):
        left, right, central, steps, noise, _ = quotients
        noise = 2 * np.fmax(noise, jumps) / steps
        kink, penalty = _kinks(left, right, central, noise)
        best, error = np.full(len(kink), np.nan), np.full(len(kink), np.inf)
        cost, row = error, np.zeros(len(kink), int)
        for k, estimate, spread in _tableau(central, noise):
            its_error = np.maximum(spread, _doubt(estimate, k, central, noise))  # NaN stays NaN
            its_cost = its_error + penalty[k]
            better = its_cost < cost
            best, error = np.where(better, estimate, best), np.where(better, its_error, error)
            cost, row = np.where(better, its_cost, cost), np.where(better, k, row)
        column = np.arange(len(kink))
        slopes = left[row, column], right[row, column]
        return Estimate(best, error, *slopes, kink & np.isfinite(error), steps[:, 0], central)


def _kinks(left: Array, right: Array, central: Array, noise: Array) -> tuple[Array, Array]:
    """Whether there is a kink at step zero, `[m]`, and the penalty for each step, `[k, m]`.

    It is a kink if one-sided derivatives keep their distance from some step down to the last that
    noise lets us resolve, however much else the function does at larger steps. The penalty is this
    distance at steps that show something else: at a kink, all others; elsewhere, those that are too
    large to see that the function is smooth.
    """
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


def _tableau(level: Array, noise: Array) -> Iterator[tuple[int, Array, Array]]:
    """Yields extrapolated derivatives, each with its smallest step and its estimated error."""
    for m in range(1, min(LEVELS + 1, len(level))):
        coarse, fine = level[:-1], level[1:]
        level = fine + (fine - coarse) / (RATIO ** (2 * m) - 1)
        # The distance to the unextrapolated pair bounds the truncation error of the extrapolation.
        spread = np.fmax(np.abs(level - fine), np.abs(level - coarse)) + noise[m:]
        for k, (estimate, error) in enumerate(zip(level, spread, strict=True), start=m):
            yield k, estimate, error


def _doubt(estimate: Array, row: int, central: Array, noise: Array) -> Array:
    """The largest distance to finer differences that contradict an estimate made with this step.

    They do if the next one confirms them, up to noise: far from `x`, a function may look like
    another one, with a convergence of its own.
    """
    change = np.abs(np.diff(central, axis=0, append=np.nan))[row + 1 :]
    finer, noise = central[row + 1 :], noise[row + 1 :]
    distance = np.abs(estimate - finer)
    doubt: Array = np.where(distance > change + noise, distance, 0).max(0, initial=0)
    return doubt
