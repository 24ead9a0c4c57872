"""Embedded and numerical derivatives of one function, entry by entry or along directions."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._check import finite_differences
from sgtrick._check.leaves import (
    Named,
    OfLeaves,
    array,
    concatenate,
    entries_of,
    least_normal,
    random_signs,
    show_index,
    tape_gradients,
    unit_roundoff,
    unit_upstreams,
    wide,
)
from sgtrick._check.recorded import Recorded
from sgtrick._check.report import Entry
from sgtrick._types import Array

DIRECTIONS = 10  # in random mode
ROUNDINGS = 64  # of a value, in units, that a derivative may show for each size of x
UNEXPLAINED = "The gradient is NaN, and no function says why."
VISIBLE = 0.005  # differences of this accuracy detect a gradient that is off by 1 %


def derivative(function: OfLeaves, random: np.random.Generator | None) -> OfLeaves:
    """The gradient as a function: all rows of the Jacobian, or one row of a random projection."""
    seed = None if random is None else int(random.integers(2**32))

    def gradient(inputs: Named) -> Named:
        xs = [x for _, x in inputs]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(xs)
            ys = function(inputs)
        if seed is None:
            upstreams = list(unit_upstreams(ys))
        else:
            upstreams = [("projection", random_signs(np.random.default_rng(seed), ys))]
        scalar = seed is None and len(upstreams) == 1
        found = []
        for label, upstream in upstreams:
            gradients = tape_gradients(tape, ys, xs, upstream)
            used = [y for (_, y), u in zip(ys, upstream, strict=True) if u is not None]
            for (name, x), g in zip(inputs, gradients, strict=True):
                g = tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                # No more accurate than the value: the function may compute in its dtype.
                g = tf.cast(g, max([*used, g], key=unit_roundoff).dtype)
                found.append((name if scalar else f"{label} by {name}", g))
        return found

    return gradient


class Comparison:
    """The gradient of a function at one point, compared with differences.

    Args:
        magnitude: The size `[m]` of what the entries of the value are rounded with. None: their
            own.

    Attributes:
        entries: The entries, in the order of the Jacobian.
        evaluations: The number of calls of the function.
        notes: Remarks for the report.
    """

    def __init__(
        self,
        function: OfLeaves,
        inputs: Named,
        order: int,
        eps: Any,
        rtol: float | None,
        atol: float | None,
        random: np.random.Generator | None,
        magnitude: Array | None = None,
    ) -> None:
        self._function, self._order, self._eps, self._random = function, order, eps, random
        self.entries: list[Entry] = []
        self.evaluations = 0
        self.notes: list[str] = []
        self._narrow: str | None = None  # why the differences are not in float64

        self._recorded = Recorded(self._call, inputs)
        self._widened: Recorded | None = None
        self._xs, self._ys = self._recorded.xs, self._recorded.ys
        tensors = [*self._xs, *(y for _, y in self._ys)]
        self._unit, self._least = max(map(unit_roundoff, tensors)), max(map(least_normal, tensors))
        self._rtol = max(1e-6, self._unit**0.5) if rtol is None else rtol
        self._atol = atol
        self._names = [name for name, _ in inputs]
        self._point = [array(x) for x in self._xs]
        self._value = concatenate(self._ys)
        self._check_finite()
        self._magnitude = np.fmax(np.abs(self._value), 0.0 if magnitude is None else magnitude)
        self._roundoff = np.concatenate(
            [np.full(y.shape.num_elements(), unit_roundoff(y)) for _, y in self._ys]
        )
        if self._unit > np.finfo(np.float64).eps:
            self._widen()
        self._check_repeatable()
        self._sizes = [np.abs(wide(x)).max(initial=0.0) or 1.0 for x in self._point]
        if random is None:
            self._compare_entries()
        else:
            self._compare_directions(random)
        self._check_repeatable()
        self._note_precision()

    def magnitude_of_gradient(self) -> Array:
        """The size of what the entries of the gradient, as a function, are rounded with."""
        rows = self._magnitude if self._random is None else [self._magnitude.sum()]
        sizes = [np.full(x.size, s) for x, s in zip(self._point, self._sizes, strict=True)]
        return np.ravel(ROUNDINGS * np.divide.outer(rows, np.concatenate(sizes)))

    def _compare_entries(self) -> None:
        """Compares every entry of the Jacobian."""
        jacobian = self._recorded.jacobian()
        widened = jacobian if self._widened is None else self._widened.jacobian()
        values = [name for name, *_ in entries_of(self._ys)]
        for leaf, name in enumerate(self._names):
            shape = self._point[leaf].shape
            estimates = [(i, self._along_entry(leaf, i)) for i in np.ndindex(*shape)]
            largest = np.fmax.reduce(
                [np.abs(e.derivative) for _, e in estimates], axis=0, initial=0.0
            )
            for index, estimate in estimates:
                by = name + show_index(index)
                self._judge(
                    [by] if len(values) == 1 else [f"{value} by {by}" for value in values],
                    jacobian.leaves[leaf][(slice(None), *index)],
                    widened.leaves[leaf][(slice(None), *index)],
                    estimate,
                    scale=largest,
                    value=np.abs(self._value) / max(self._sizes[leaf], 1.0),
                    magnitude=self._magnitude / self._sizes[leaf],
                    connected=jacobian.connected[leaf],
                    refusals=jacobian.refusals,
                )
            self._note_unconnected(name, jacobian.connected[leaf])
        if self._order == 2:
            self._note_asymmetry(
                np.concatenate([j.reshape(len(values), -1) for j in jacobian.leaves], axis=1)
            )

    def _compare_directions(self, random: np.random.Generator) -> None:
        """Compares derivatives of random projections of the value along random directions."""
        # Every entry moves in proportion to its size, so that no entry dominates the others.
        sizes = [
            np.where(x == 0, min(size, 1.0), np.abs(wide(x)))
            for x, size in zip(self._point, self._sizes, strict=True)
        ]
        largest = max(size.max(initial=0.0) for size in sizes)
        reached = [False] * len(self._names)
        for i in range(DIRECTIONS):
            signs = random_signs(random, list(zip(self._names, self._xs, strict=True)))
            direction = [s / largest * v for s, v in zip(sizes, signs, strict=True)]
            # Weighted, so that large values do not hide small ones, by what their dtype can hold.
            weights = [
                min(1 / (np.abs(wide(y)).max(initial=0.0) or 1.0), float(y.dtype.max))
                for _, y in self._ys
            ]
            u = [v * w for v, w in zip(random_signs(random, self._ys), weights, strict=True)]
            terms, connected, refusal = self._recorded.along(direction, u)
            widened = terms if self._widened is None else self._widened.along(direction, u)[0]
            reached = [r or c for r, c in zip(reached, connected, strict=True)]
            norm = float(np.linalg.norm(terms))
            projection = np.concatenate([v.ravel() for v in u])
            move = functools.partial(self._shifted, direction)
            estimate = self._along(move, largest, largest, projection)
            self._judge(
                [f"direction {i}"],
                terms.sum(keepdims=True),
                widened.sum(keepdims=True),
                estimate,
                scale=np.array([norm]),
                value=np.abs(projection * self._value).sum(keepdims=True) / max(largest, 1.0),
                magnitude=np.abs(projection * self._magnitude).sum(keepdims=True) / largest,
                connected=any(reached),
                refusals=[refusal],
                of_terms=norm,
            )
        for name, is_reached in zip(self._names, reached, strict=True):
            self._note_unconnected(name, is_reached)

    def _judge(
        self,
        names: Sequence[str],
        embedded: Array,
        widened: Array,
        estimate: finite_differences.Estimate,
        *,
        scale: Array,
        value: Array,
        magnitude: Array,
        connected: bool,
        refusals: Sequence[str],
        of_terms: float = 0.0,
    ) -> None:
        """Appends the entries for the derivatives `[m]` along one line.

        Args:
            names: The names of the entries.
            embedded: The derivatives that the tape returns.
            widened: The same in the dtype of the differences.
            estimate: The derivatives by differences.
            scale: The size of the derivatives that autodiff rounds together with these.
            value: The size of the values divided by that of `x`. Derivatives below a millionth of
                it are indistinguishable from zero.
            magnitude: The size of what derivatives are rounded with, divided by that of `x`.
            connected: Whether the tape returned a gradient.
            refusals: The messages of functions that refused these derivatives, which are then NaN.
            of_terms: The norm of the terms summed in `embedded`, to which `rtol` applies too.
        """
        larger = np.fmax(np.abs(embedded), np.abs(estimate.derivative))
        size = np.fmax(larger, of_terms)
        tolerance = self._rtol * size + self._absolute(scale)
        visible = np.fmax(tolerance, VISIBLE * np.fmax(np.fmax(size, scale), 1e-6 * value))
        if self._atol is None:
            # Rounding alone, as of 1 - tanh(x)^2 where tanh is almost 1: in float64 they agree.
            agree = np.abs(widened - estimate.derivative) <= tolerance + estimate.error
            rounding = np.where(agree, ROUNDINGS * self._unit * magnitude, 0.0)
            tolerance = np.fmax(tolerance, rounding)
        verdicts = _verdicts(embedded, estimate, tolerance, visible)
        absolutes = np.abs(embedded - estimate.derivative)
        with np.errstate(invalid="ignore"):  # derivatives may be infinite
            relatives = np.divide(
                absolutes, larger, out=np.zeros_like(larger), where=absolutes != 0
            )
        for i, (name, verdict) in enumerate(zip(names, verdicts, strict=True)):
            remark = "" if connected else "no gradient"
            if verdict == "kink":
                remark = f"{estimate.left[i]:.3g} | {estimate.right[i]:.3g}"
            if np.isnan(embedded[i]):
                verdict, remark = "refused", refusals[i] or UNEXPLAINED
            self.entries.append(
                Entry(
                    order=self._order,
                    name=name,
                    embedded=float(embedded[i]) + 0.0,  # no minus zero
                    numerical=float(estimate.derivative[i]),
                    uncertainty=float(estimate.error[i]),
                    absolute=float(absolutes[i]),
                    relative=float(relatives[i]),
                    allowed=float(tolerance[i] + estimate.error[i]),
                    verdict=verdict,
                    remark=remark,
                    steps=estimate.steps,
                    differences=estimate.differences[:, i],
                )
            )

    def _absolute(self, scale: Any) -> Any:
        """The absolute tolerance, for derivatives of which the largest are of this size."""
        return 16 * self._unit * scale + self._least if self._atol is None else self._atol

    def _along_entry(self, leaf: int, index: tuple[int, ...]) -> finite_differences.Estimate:
        """The derivatives of all values with respect to one entry of `x`."""
        start = self._point[leaf][index]

        def move(step: float) -> tuple[list[Array], float]:
            moved = list(self._point)
            moved[leaf] = moved[leaf].copy()
            moved[leaf][index] = start + np.asarray(step, moved[leaf].dtype)
            return moved, float(moved[leaf][index]) - float(start)

        size = self._sizes[leaf]
        return self._along(move, size, abs(float(start)) or min(size, 1.0), None)

    def _shifted(self, direction: Sequence[Array], step: float) -> tuple[list[Array], float]:
        moved = [
            np.asarray(x + step * v, x.dtype) for x, v in zip(self._point, direction, strict=True)
        ]
        return moved, step

    def _along(
        self,
        move: Callable[[float], tuple[list[Array], float]],
        size: float,
        position: float,
        projection: Array | None,
    ) -> finite_differences.Estimate:
        def project(values: Array) -> Array:
            return values if projection is None else np.sum(projection * values, keepdims=True)

        def at(step: float) -> tuple[Array, float]:
            moved, taken = move(step)
            tensors = [tf.constant(x) for x in moved]
            values = self._call(list(zip(self._names, tensors, strict=True)))
            return project(concatenate(values)), taken

        rounding = self._roundoff * np.abs(self._value)
        if projection is not None:
            rounding = np.sqrt(np.sum((projection * rounding) ** 2, keepdims=True))
        steps = finite_differences.sweep(size, position, self._eps)
        return finite_differences.differentiate(at, project(self._value), steps, rounding)

    def _call(self, inputs: Named) -> Named:
        self.evaluations += 1
        return self._function(inputs)

    def _widen(self) -> None:
        """Switches to float64 for the differences if the function supports it."""
        narrow = ", ".join(sorted({t.dtype.name for t in [*self._xs, *(y for _, y in self._ys)]}))
        inputs = [
            (name, tf.cast(x, tf.float64)) for name, x in zip(self._names, self._xs, strict=True)
        ]
        try:
            recorded = Recorded(self._call, inputs)
            value = concatenate(recorded.ys)
        except Exception as error:  # functions of a fixed dtype may raise anything
            why = f"in float64 it raises {type(error).__name__}"
        else:
            if any(y.dtype != tf.float64 for _, y in recorded.ys):
                why = "it does not return float64 for float64"
            elif value.shape != self._value.shape or not np.all(
                np.abs(value - self._value)
                <= 0.01 * np.abs(self._value).max() + ROUNDINGS * self._unit * self._magnitude
            ):
                why = "its value in float64 differs"
            else:
                self._widened = recorded
                self._point, self._value = [array(x) for _, x in inputs], value
                self._roundoff = np.full_like(self._roundoff, np.finfo(np.float64).eps)
                self.notes.append(
                    f"embedded gradient in {narrow}, differences in float64 (rtol {self._rtol:.1g})"
                )
                return
        self._narrow = f"f was evaluated in {narrow}, because {why}"

    def _note_precision(self) -> None:
        """Notes how accurate the differences are without float64."""
        if self._narrow is None:
            return
        errors = [
            e.uncertainty / size
            for e in self.entries
            if np.isfinite(e.uncertainty) and (size := np.fmax(abs(e.numerical), abs(e.embedded)))
        ]
        seen = f"; the median error of the differences is {np.median(errors):.0e}" if errors else ""
        self.notes.append(f"{self._narrow}{seen} (rtol {self._rtol:.1g})")

    def _note_unconnected(self, name: str, connected: bool) -> None:
        if not connected:
            self.notes.append(
                f"No gradient with respect to {name}: the tape returns None, compared as zero."
            )

    def _note_asymmetry(self, hessian: Array) -> None:
        """Notes the pair of mixed derivatives that should be equal but differ the most."""
        n = hessian.shape[1]
        hessians = hessian.reshape(-1, n, n)  # of each entry of the value
        size = np.fmax(np.abs(hessians), np.abs(np.swapaxes(hessians, 1, 2)))
        tolerance = self._rtol * size + self._absolute(size.max(initial=0.0))
        excess = np.abs(hessians - np.swapaxes(hessians, 1, 2)) - tolerance
        if not np.any(excess > 0):  # NaN entries have their own verdict
            return
        k, i, j = np.unravel_index(np.nanargmax(excess), excess.shape)
        rows = [name for name, *_ in entries_of(self._ys)]
        columns = [name for name, *_ in entries_of(list(zip(self._names, self._xs, strict=True)))]
        first, second = (
            f"{rows[k * n + a]} by {columns[b]} is {hessians[k, a, b]:.8g}"
            for a, b in ((i, j), (j, i))
        )
        self.notes.append(f"The embedded Hessian is not symmetric: {first}, {second}.")

    def _check_finite(self) -> None:
        for (name, *_), value in zip(entries_of(self._ys), self._value, strict=True):
            if not np.isfinite(value):
                raise ValueError(
                    f"{name}, which f returns, is {value} at x, so it has no derivative there. "
                    "Choose an x where f is finite."
                )

    def _check_repeatable(self) -> None:
        tensors = [tf.constant(x) for x in self._point]
        again = concatenate(self._call(list(zip(self._names, tensors, strict=True))))
        # Multithreaded sums differ in the last digits.
        slack = 1e3 * self._roundoff * np.abs(self._value).max(initial=0.0)
        off = ~(np.abs(again - self._value) <= slack)
        if off.any():
            i = int(np.argmax(off))
            name = [name for name, *_ in entries_of(self._ys)][i]
            raise ValueError(
                f"f is not deterministic: at the same x, {name} was first {self._value[i]:.8g} and "
                f"then {again[i]:.8g}. Fix its seed (tf.random.stateless_*), or keep its state "
                "constant."
            )


def _verdicts(
    embedded: Array, estimate: finite_differences.Estimate, tolerance: Array, visible: Array
) -> list[str]:
    numerical, error = estimate.derivative, estimate.error
    low = np.minimum(estimate.left, estimate.right)
    high = np.maximum(estimate.left, estimate.right)
    with np.errstate(invalid="ignore"):
        absolute = np.abs(embedded - numerical)
        allowed = tolerance + error
        kink = estimate.kink & (high - low > 4 * tolerance)
        between = (embedded >= low - allowed) & (embedded <= high + allowed)
        wrong = np.isfinite(error) & ~np.isfinite(embedded)
        # Twice the estimated error, because the estimate may be off by as much as that error.
        wrong |= (absolute > allowed) & (absolute > 2 * error)
        ok = (absolute <= allowed) & (error <= visible)
    return [
        str(verdict)
        for verdict in np.select(
            [kink & between, kink | wrong, ok], ["kink", "wrong", "ok"], "cannot tell"
        )
    ]
