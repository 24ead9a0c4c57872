"""`check_gradient`: comparison of embedded gradients with finite differences."""

from __future__ import annotations  # signatures that show the names of types

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, structures
from sgtrick._check.comparison import (
    DIRECTIONS,
    Line,
    compared,
    entry_lines,
    random_line,
    random_weights,
)
from sgtrick._check.function_at_point import FunctionAtPoint
from sgtrick._check.recorded import gradient_of
from sgtrick._check.report import GradientCheckError, GradientReport
from sgtrick._check.vectors import Named, OfLeaves, concatenate
from sgtrick._types import Array, Function, Structure, Tensor

# None: by the size of x. Otherwise the largest step, or the smallest and the largest.
StepBounds: TypeAlias = float | Sequence[float] | None


def check_gradient(
    f: Function,
    x: Structure,
    *,
    order: int = 1,
    mode: str = "full",
    max_step: StepBounds = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    raise_exception: bool = True,
) -> GradientReport:
    """Compares a function's gradient in TensorFlow with finite differences of its values.

    Differences are taken for a sweep of step sizes and extrapolated, with an estimate of their
    error. So the verdict does not depend on a lucky step: functions that are noisy or badly scaled
    pass if their gradient is right, and if the differences are too inaccurate to decide, the report
    says so. If all errors have something in common, such as one factor or a reversed sign, it says
    that too.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> wrong = sgtrick.with_gradient(lambda x: tf.sin(x), lambda x: 1.01 * tf.cos(x))
        >>> sgtrick.check_gradient(tf.sin, tf.constant([0.5, 1.0])).passed
        True
        >>> report = sgtrick.check_gradient(wrong, tf.constant(0.5), raise_exception=False)
        >>> report.worst.verdict, round(report.worst.relative, 4)
        ('wrong', 0.0099)

    Args:
        f: The function. It is called eagerly with `x` as tensors, and may be a `tf.function`. Wrap
            a NumPy function with `from_numpy` first, and one that returns `(value, gradient)` with
            `from_value_and_gradient`. It returns a real tensor, or a list, dict or named tuple of
            them, of any shapes. If it is a `custom_vjp` with a JVP rule, that rule is compared
            along the same lines, in entries of its own.
        x: The point, a structure of real tensors, variables, arrays and numbers. A plain tuple
            holds several arguments, `f(*x)`, as for `torch.autograd.gradcheck` and JAX's
            `check_grads`; anything else is one argument, `f(x)`. Leaves without derivatives
            (integers, booleans, strings) are passed on. Variables that `f` reads but does not take
            as arguments are not checked.
        order: 1 checks the gradient. 2 also checks the derivative of the gradient against
            differences of the gradient, in float64 if `f` accepts and returns it, and finds `hx`
            and `hessp` that are wrong.
        mode: "full" compares every entry of the Jacobian with respect to `x`. It takes about 25
            evaluations for each entry of `x` and two backward passes for each entry of the value.
            "random" compares the derivatives of 10 random projections of the value along random
            directions, in which every entry moves by half to all of its own size, up or down. Its
            cost does not depend on dimensions. A single wrong entry changes every projection by its
            error times these sizes, so it is found if half of that exceeds the tolerance. Several
            errors can cancel, but hardly in all directions: see the page on checking.
        max_step: The largest step, in the units of `x`, or a pair of the smallest and the largest
            step, if `f` needs a narrower range. None: from 0.1 times the larger of 1 and the
            largest entry of the leaf, down to 1e-7 times the entry, and further if the differences
            have not settled there.
        rtol: The relative tolerance. It is relative to the larger of the two derivatives; in random
            mode, to the root of the sum of squares of the entries' contributions. None: the square
            root of the rounding unit, 3e-4 for float32, but at least 1e-6. A gradient from a solver
            needs more than the tolerance of the solver.
        atol: The absolute tolerance, added to the relative one. None: 16 rounding units of the
            largest derivative of the same value with respect to the same leaf, about the rounding
            error of autodiff; plus the smallest normal number of the dtype, since TensorFlow takes
            smaller ones for zero.
        seed: The seed of the random directions.
        raise_exception: Whether to raise if an entry is wrong, refused or cannot be decided.

    Rules are asked with upstream gradients of both signs that are not 1, since one that forgets its
    upstream gradient, squares it or clips it is right at 1. The worse answer is compared.

    Returns:
        The report. An entry is `ok` if the two derivatives differ by no more than the tolerance
        plus the estimated error of the numerical one, and if that error is small enough to detect
        a gradient that is off by 1 %, relative to the derivative or to the largest derivative of
        the same value with respect to the same leaf. It is `refused` if `f` does not know the
        derivative and raises or returns NaN; the remark of the entry is the message. It is `cannot
        tell` if the estimated error is too large to decide, a `kink` if the one-sided derivatives
        differ and the embedded one lies between them, and `wrong` otherwise. A gradient that is
        None is compared as zero, with a note.

    Raises:
        GradientCheckError: An entry is wrong, refused or cannot be decided. It carries the report.
        TypeError: Arguments or values are complex, or have no derivatives; or `f` returns a plain
            tuple of two, which may be two outputs, or a value and its gradient.
        ValueError: `f` or `x` is not finite, `f` returns different values for the same `x`, or an
            option is invalid. What `f` raises beside `x` is no error, but a note.

    If `x` has a smaller dtype than float64, the differences are still computed in float64 if `f`
    accepts and returns it. The embedded gradient is computed in the dtype of `x`; where it
    is off by rounding alone, an entry is ok too: if the gradient in float64 agrees, and the
    difference is at most 64 rounding units of the size of `f` between `x` and zero, divided by the
    size of `x` if that is below 1. This is so where `tanh` is almost 1, or in `1 - tanh(x)`. With
    `atol`, that is the tolerance instead.

    If `f` computes in a lower precision than its dtypes say, its values do not move over small
    steps, and jump where they begin to. The size of the jumps is then taken for the rounding unit,
    and a note says so. The entries are often `cannot tell`, since the value says too little. Then
    check `f` in a higher precision, or with a larger `max_step`.

    The extrapolation follows C. J. F. Ridders, Advances in Engineering Software 4 (1982) 75-76.
    Central differences with a single step, as in `tf.test.compute_gradient`, have no error
    estimate.
    """
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order!r}.")
    if mode not in ("full", "random"):
        raise ValueError(f"mode must be 'full' or 'random', got {mode!r}.")
    rtol, atol = (
        _checked(name, number, " or a non-negative number", lambda n: n.shape == () and n >= 0)
        for name, number in (("rtol", rtol), ("atol", atol))
    )
    bounds = _checked(
        "max_step",
        max_step,
        ", the largest step, or a pair of the smallest and the largest step, all positive",
        lambda h: h.shape in ((), (2,)) and np.all(h > 0) and (h.shape == () or h[0] < h[1]),
    )
    if not tf.executing_eagerly():
        raise RuntimeError("check_gradient runs eagerly: call it outside tf.function and graphs.")
    function, inputs = _of_leaves(f, x)
    random, notes = np.random.default_rng(seed), list[str]()
    first = FunctionAtPoint(function, inputs)
    forward = getattr(f, "has_both_rules", False)
    if mode == "full":
        lines = list(entry_lines(first, forward=forward))
    else:
        lines = [
            random_line(first, random, i, f"direction {i}", forward=forward)
            for i in range(DIRECTIONS)
        ]
    points, entries = [first], compared(lines, 1, bounds, rtol, atol)
    if order == 2 and not all(np.isfinite(entry.embedded) for entry in entries):
        notes.append("Not every gradient is finite, so second derivatives were not checked.")
    elif order == 2:
        gradients, lines = _of_gradient(function, first, mode, random)
        points += gradients
        entries += compared(lines, 2, bounds, rtol, atol)
    for point in points:
        point.check_repeatable()  # a state may have changed since
        notes += _notes(point, rtol)
    report = GradientReport(
        tuple(sorted(entries, key=lambda e: e.rank)),
        sum(point.evaluations for point in points),
        tuple(dict.fromkeys(notes)),
    )
    if raise_exception and not report.passed:
        raise GradientCheckError(report)
    return report


def _of_gradient(
    function: OfLeaves, point: FunctionAtPoint, mode: str, random: np.random.Generator
) -> tuple[list[FunctionAtPoint], list[Line]]:
    """The gradient of a function as functions at the point, and lines along which these move."""
    # In float64: it is not the rounding of the gradient that is checked here.
    names, wide = point.leaves, point.widened
    inputs = list(zip(names, wide.xs, strict=True))
    if mode == "full":
        gradient = FunctionAtPoint(gradient_of(function, names), inputs)
        return [gradient], list(entry_lines(gradient))
    gradients = []
    for i in range(DIRECTIONS):  # a projection for each line, as errors of several may cancel
        weights = random_weights(wide.ys, random, i)
        gradients.append(FunctionAtPoint(gradient_of(function, names, weights), inputs))
    return gradients, [
        random_line(gradient, random, i, f"direction of the gradient {i}")
        for i, gradient in enumerate(gradients)
    ]


def _notes(point: FunctionAtPoint, rtol: float | None) -> Iterator[str]:
    dtypes = point.narrow_dtypes
    tolerance = f"(rtol {point.rtol if rtol is None else rtol:.1g})"
    if point.why_narrow:
        yield f"f was evaluated in {dtypes}, because {point.why_narrow} {tolerance}"
    elif dtypes:
        yield f"embedded gradient in {dtypes}, differences in float64 {tolerance}"
    if point.jump:
        yield (
            f"The values of f move by jumps of {point.jump:.0e} of their size, as those of a lower "
            f"precision than {dtypes or 'float64'}, or of a solver with adaptive steps {tolerance}"
        )
    if point.beyond:
        yield f"f raises beside x, so not all steps could be taken: {point.beyond}"
    for name, is_connected in zip(point.leaves, point.recorded.connected, strict=True):
        if not is_connected:
            yield f"No gradient with respect to {name}: the tape returns None, compared as zero."


def _checked(name: str, option: Any, expected: str, fits: Callable[[Array], Any]) -> Any:
    if option is None:
        return None
    numbers = np.asarray(option)
    if numbers.dtype.kind not in "iuf" or not np.all(np.isfinite(numbers)) or not fits(numbers):
        raise ValueError(f"{name} must be None{expected}, got {option!r}.")
    return numbers


def _of_leaves(f: Function, x: Structure) -> tuple[OfLeaves, Named]:
    """Returns `f` as a function of those leaves of `x` that have derivatives, and the leaves."""
    leaves = list(structures.flatten(x, "x"))
    places = [i for i, (_, leaf) in enumerate(leaves) if structures.has_derivatives(leaf)]
    # Copies, as tapes tell tensors apart by identity, and the same tensor may occur twice.
    inputs = [
        (name, tf.identity(structures.to_tensor(leaf, name)))
        for name, leaf in (leaves[i] for i in places)
    ]
    if not any(tf.size(leaf) for _, leaf in inputs):
        raise TypeError(
            "x has nothing to differentiate with respect to. Pass tensors, arrays or numbers that "
            "are floating and not empty."
        )
    for name, leaf in inputs:
        if leaf.dtype.is_complex:
            raise TypeError(
                f"{name} is {leaf.dtype.name}, but check_gradient takes real arguments. Check a "
                "function of the real and imaginary parts: lambda re, im: f(tf.complex(re, im))."
            )
        if not np.all(np.isfinite(concatenate([leaf]))):
            raise ValueError(
                f"{name} is not finite, so no differences can be taken there. Pass a finite point."
            )

    def call(tensors: Sequence[Tensor]) -> Named:
        flat = [leaf for _, leaf in leaves]
        for i, tensor in zip(places, tensors, strict=True):
            flat[i] = tensor
        packed = tf.nest.pack_sequence_as(x, flat)
        y = f(*packed) if type(x) is tuple else f(packed)
        if type(y) is tuple and len(y) == 2:
            raise TypeError(
                f"{calls.name_of(f)} returns a tuple of two. If these are its value and gradient, "
                "pass sgtrick.from_value_and_gradient(f), with argnums for several arguments. If "
                "they are two outputs, return them as a list."
            )
        outputs = []
        for name, leaf in structures.flatten(y, "y"):
            leaf = structures.to_tensor(leaf, f"{name}, the result of {calls.name_of(f)},")
            if leaf.dtype.is_complex:
                raise TypeError(
                    f"{name}, which f returns, is {leaf.dtype.name}, but check_gradient takes real "
                    "values. Return the real and the imaginary part as a list."
                )
            if leaf.dtype.is_floating:
                outputs.append((name, leaf))
        if not any(tf.size(leaf) for _, leaf in outputs):
            raise TypeError(
                "f returns nothing of a floating dtype, or only empty tensors, so it has no "
                "derivatives. Return a floating tensor."
            )
        return outputs

    return call, inputs
