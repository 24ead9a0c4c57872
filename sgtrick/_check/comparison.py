"""Embedded derivatives of a function at one point, compared with differences along lines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgtrick._check.finite_differences import Estimate, estimated
from sgtrick._check.function_at_point import (
    COARSEST,
    ROUNDINGS_OF_A_VALUE,
    FunctionAtPoint,
    relative_tolerance,
)
from sgtrick._check.recorded import Recorded
from sgtrick._check.report import BORDER, NOT_LINEAR, Entry
from sgtrick._check.vectors import (
    concatenate,
    sizes_of_entries,
    sizes_of_leaves,
    split,
    unit_vectors,
)
from sgtrick._types import Array, Tensor

DIRECTIONS = 10  # of random lines
# A derivative has passed through a few operations, each of which rounds it once.
ROUNDINGS_OF_AUTODIFF = 16
# With this error, relative to the derivative, differences still detect one that is off by 1 %.
VISIBLE = 0.005
# Relative to the value divided by the size of x. What is less is zero for every purpose, and a
# constant function, whose differences are rounding errors, has no other size to be measured by.
NEGLIGIBLE = 1e-6
# What is negligible relative to the slope over the largest step: x^3 has no other size at zero.
FLAT = 1e-4


class Answers(NamedTuple):
    """The derivatives along a line in one mode of TensorFlow, each asked for twice, `[2, m]`.

    They are NaN if refused, and 0 for None.
    """

    mode: str
    narrow: Array
    wide: Array  # in the dtype of the differences


class Line(NamedTuple):
    """A line along which `m` numbers are differentiated, with the embedded derivatives.

    Attributes:
        point: The function at a point.
        names: The names of the entries of the report.
        direction: How each entry of `x` moves.
        weights: The weights of the entries of the value if the number is a projection of it, or
            None.
        answers: What TensorFlow returns.
        refusals: The messages of functions that refused.
        terms: The size of the terms of which the derivative is the sum, `[m]`: where these cancel,
            the errors of a right gradient do not.
        largest: The size of the largest derivatives that autodiff computes together with these.
    """

    point: FunctionAtPoint
    names: list[str]
    direction: Array
    weights: Array | None
    answers: list[Answers]
    refusals: list[str]
    terms: Array
    largest: Array


def entry_lines(point: FunctionAtPoint, *, forward: bool = False) -> Iterator[Line]:
    """For each entry of `x`, the line in which it moves alone, and a column of the Jacobian.

    Args:
        point: The function at a point.
        forward: Whether to ask for derivatives in forward mode, too.
    """
    jacobian, refusals = _jacobian(point.recorded)
    wide = jacobian if point.widened is point.recorded else _jacobian(point.widened)[0]
    values, names = point.recorded.names, point.names
    sizes = np.abs(jacobian).max(0)
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    leaves = range(len(point.leaves))
    largest = [finite[:, point.leaf_of == leaf].max(1, initial=0.0) for leaf in leaves]
    for i, direction in enumerate(unit_vectors(len(names))):
        answers = [Answers("", jacobian[..., i], wide[..., i])]
        if forward:
            answers.append(_pushed(point, direction, None))
        yield Line(
            point=point,
            names=[names[i]]
            if len(values) == 1
            else [f"{value} by {names[i]}" for value in values],
            direction=direction,
            weights=None,
            answers=answers,
            refusals=refusals,
            terms=sizes[:, i],
            largest=largest[point.leaf_of[i]],
        )


def _jacobian(recorded: Recorded) -> tuple[Array, list[str]]:
    """The derivatives `[2, m, n]`, and the refusals of the rows."""
    rows = unit_vectors(len(recorded.value))
    gradients, refusals = zip(*map(recorded.pulled, rows), strict=True)
    return np.stack(gradients, 1), list(refusals)


def random_line(
    point: FunctionAtPoint,
    random: np.random.Generator,
    number: int,
    name: str,
    *,
    forward: bool = False,
) -> Line:
    """A random projection of the value along a random direction.

    Every entry of `x` moves by about its own size, up or down, so that none dominates the others.
    """
    direction = point.scales / point.scales.max() * _factors(random, len(point.scales))
    weights = random_weights(point.recorded.ys, random, number)
    gradient, refusal = point.recorded.pulled(weights)
    is_wide = point.widened is point.recorded
    wide = gradient if is_wide else point.widened.pulled(weights)[0]
    along = (np.sum(direction * g, axis=1, keepdims=True) for g in (gradient, wide))
    answers = [Answers("", *along)]
    if forward:
        answers.append(_pushed(point, direction, weights))
    terms = np.sqrt(np.sum((direction * gradient) ** 2, axis=1)).max(keepdims=True)
    return Line(point, [name], direction, weights, answers, [refusal], terms, terms)


def random_weights(ys: Sequence[Tensor], random: np.random.Generator, number: int) -> Array:
    """Random weights for the entries of a value, the largest of size 1.

    In every second direction, each is weighted by its own size, so that none dominates the others,
    and in the others by that of its leaf, so that none does that happens to be almost zero.
    """
    sizes = (sizes_of_leaves, sizes_of_entries)[number % 2](ys)
    weights = sizes.min() / sizes * _factors(random, len(sizes))
    return concatenate(split(weights, ys))  # as the tape will see them


def _factors(random: np.random.Generator, n: int) -> Array:
    """Random factors of both signs; errors cancel by chance, but not as those of two signs do."""
    factors: Array = random.choice([-1.0, 1.0], n) * random.uniform(0.5, 1.0, n)
    return factors


def _pushed(point: FunctionAtPoint, direction: Array, weights: Array | None) -> Answers:
    """The derivatives in forward mode."""

    def along(recorded: Recorded) -> Array:
        pushed = recorded.pushed(direction)
        return pushed if weights is None else np.sum(weights * pushed, axis=1, keepdims=True)

    narrow = along(point.recorded)
    is_wide = point.widened is point.recorded
    return Answers("forward mode", narrow, narrow if is_wide else along(point.widened))


def compared(
    lines: Iterable[Line],
    order: int,
    bounds: Array | None,
    rtol: float | None,
    atol: float | None,
) -> list[Entry]:
    """The entries of the report, of this order."""
    swept = [(a, a.point.quotients(a.direction, a.weights, bounds)) for a in lines]
    # What computes in a lower precision along one line does so along all.
    jump = np.max([quotients.jumps / _sizes(line) for line, quotients in swept], axis=0)
    # A value that moves along no line and has no gradient, beside others that move, is a constant.
    central = np.concatenate([quotients.central for _, quotients in swept])
    moves = np.any(central, axis=0, where=np.isfinite(central)) | np.all(np.isnan(central), axis=0)
    moves |= np.any([a.narrow.any(0) for line, _ in swept for a in line.answers], axis=0)
    is_constant = ~moves & np.any(moves)
    entries: list[Entry] = []
    for line, quotients in swept:
        unit = line.point.units(line.direction, line.weights)
        jumps = np.where((jump > ROUNDINGS_OF_A_VALUE * unit) & ~is_constant, jump, 0.0)
        line.point.jump = max(line.point.jump, *jumps)
        found = estimated(quotients, np.where(is_constant, 0.0, jump * _sizes(line)))
        found = found._replace(error=np.where(is_constant, 0.0, found.error))
        unit = np.fmax(unit, np.fmin(jumps, COARSEST))
        for answers in line.answers:
            entries += _judged(line, answers, found, unit, order, rtol, atol)
    return entries


def _sizes(line: Line) -> Array:
    """The sizes of the values along a line, which are not zero."""
    return np.fmax(line.point.sizes_of_values(line.weights), line.point.least)


def _judged(
    line: Line,
    answers: Answers,
    found: Estimate,
    unit: Array,
    order: int,
    rtol: float | None,
    atol: float | None,
) -> Iterator[Entry]:
    point, value = line.point, line.point.sizes_of_values(line.weights)
    with np.errstate(invalid="ignore"):  # derivatives may be infinite
        off = np.abs(answers.narrow - found.derivative)
        worse, column = off.argmax(0), np.arange(off.shape[1])  # NaN is the worst
        derivative, wide = answers.narrow[worse, column], answers.wide[worse, column]
        apart = np.abs(answers.narrow[0] - answers.narrow[1])
    x = point.sizes[line.direction != 0].max()
    size = np.fmax(np.fmax(np.abs(derivative), np.abs(found.derivative)), line.terms)
    slope = np.abs(found.differences[0])
    slope = np.where(np.isfinite(slope), slope, 0.0)
    negligible = np.fmax(NEGLIGIBLE * value / max(x, 1.0), FLAT * slope)
    tolerance = size * (relative_tolerance(unit) if rtol is None else rtol)
    if atol is not None:
        tolerance = tolerance + atol
    else:
        tolerance = tolerance + ROUNDINGS_OF_AUTODIFF * unit * line.largest + point.least
    visible = np.fmax(tolerance, VISIBLE * np.fmax(np.fmax(size, line.largest), negligible))
    if atol is None:  # else the tolerance is the caller's
        # Rounding explains what disappears where the same rule computes in float64.
        is_rounded = np.abs(wide - found.derivative) <= tolerance + found.error
        is_rounded &= off[worse, column] > tolerance
        if np.any(is_rounded):
            around = point.sizes_of_values(line.weights, around=True)
            rounding = ROUNDINGS_OF_A_VALUE * unit * around / min(x, 1.0)
            tolerance = np.where(is_rounded, np.fmax(tolerance, rounding), tolerance)
    allowed = tolerance + found.error
    for i, verdict in enumerate(_verdicts(derivative, found, allowed, visible)):
        remark = ""
        if verdict == "refused":
            remark = line.refusals[i]
        elif verdict == "kink":
            remark = f"{found.left[i]:.3g} | {found.right[i]:.3g}"
        elif verdict == "wrong" and apart[i] > tolerance[i]:
            remark = NOT_LINEAR
        elif verdict == "cannot tell" and not np.any(np.isfinite(found.differences[:, i])):
            remark = BORDER
        yield Entry(
            order=order,
            name=f"{line.names[i]}, {answers.mode}" if answers.mode else line.names[i],
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
