"""Embedded gradients against numerical derivatives."""

from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick import _from_value_and_gradient
from sgtrick._check import comparison
from sgtrick._check.leaves import Named, OfLeaves, wide
from sgtrick._check.report import GradientCheckError, GradientReport
from sgtrick._core import calls, structures
from sgtrick._core.types import Function, Structure


def check_gradient(
    f: Function,
    x: Structure,
    *,
    order: int = 1,
    mode: str = "full",
    eps: float | tuple[float, float] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    raise_exception: bool = True,
) -> GradientReport:
    """Compares the gradient that a function has in TensorFlow with differences of its values.

    Differences are taken at a sweep of step sizes and extrapolated, with an estimate of their own
    error. So the verdict does not hang on a lucky step: functions that are noisy or badly scaled
    pass if their gradient is right, and where differences cannot tell, the report says so.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> wrong = sgtrick.with_gradient(lambda x: tf.sin(x), lambda x: 1.01 * tf.cos(x))
        >>> sgtrick.check_gradient(tf.sin, tf.constant([0.5, 1.0])).passed
        True
        >>> report = sgtrick.check_gradient(wrong, tf.constant(0.5), raise_exception=False)
        >>> report.worst.verdict, round(report.worst.relative, 4)
        ('wrong', 0.0099)

    Args:
        f: Called eagerly with `x`, as tensors; may be a `tf.function`. Wrap a NumPy function by
            `from_numpy` first. Returns a real tensor, or a list or dict of them, of any shapes. A
            plain tuple of two is `(value, gradient)`, as `from_value_and_gradient` takes it, with
            the gradient in place of the tape's; so return several outputs as a list, dict or named
            tuple.
        x: The point, a structure of real tensors, variables, arrays and numbers. A plain tuple
            holds several arguments, `f(*x)`, as for `torch.autograd.gradcheck` and JAX's
            `check_grads`; anything else is one, `f(x)`. Leaves without derivatives (integers,
            booleans, strings) are passed on. Variables that `f` reads by itself are not checked:
            make them arguments.
        order: 2 checks the derivative of the gradient too, against differences of the gradient: of
            `hx`, `hess` and `hessp` it finds what is wrong or not symmetric.
        mode: "full" compares every entry of the Jacobian by `x`, which takes about 25 evaluations
            for each entry of `x` and a backward pass for each of the value. "random" compares the
            derivatives of 10 random projections of the value along random directions, in which
            every entry moves by its own size up or down, at a cost that does not depend on
            dimensions. A single wrong entry changes every one of them by its whole error, times
            these sizes, so is found with probability 1 if that is more than what is allowed.
            Several can cancel: all are missed with a probability of at most 2**-10 for a scalar
            `f`, and (3/4)**10 = 0.06 otherwise.
        eps: The largest step, in the units of `x`, or a pair of the smallest and the largest, where
            `f` allows or resolves no others. None: from 0.1 times the larger of 1 and the largest
            entry of the leaf, down to 1e-7 times the entry.
        rtol: The error allowed, relative to the larger of the two derivatives; in random mode, to
            the root of the sum of squares of what the entries contribute. None: the square root of
            the rounding unit, 3e-4 for float32, and no less than 1e-6.
        atol: The error allowed besides. None: 16 units of rounding of the largest derivative of
            the same value by the same leaf, which is what autodiff rounds away.
        seed: Of the random directions.
        raise_exception: Whether to raise where an entry is wrong, refused or cannot be told.

    Returns:
        The report. An entry is `ok` where embedded and numerical derivative differ by no more than
        `atol`, `rtol` and the estimated error of the latter allow, and that error is small enough
        to see a gradient that is off by 1 %: relative to the derivative, or to the largest one of
        the same value by the same leaf. It is `refused` where `f` does not know the derivative, and
        says so by an error or NaN: the message is the entry's remark. It is `cannot tell` where the
        estimated error is larger, a `kink` where the one-sided derivatives differ and the embedded
        one lies between, and `wrong` otherwise. A gradient that is None is compared as zero, and
        said to be None.

    Raises:
        GradientCheckError: An entry is wrong, refused or cannot be told; carries the report.
        TypeError: Arguments or values are complex, or have no derivatives.
        ValueError: `f` or `x` is not finite, `f` returns different values for the same `x`, or an
            option is impossible.

    If `x` has a smaller dtype than float64, differences are in float64 all the same where `f` takes
    and returns it; the embedded gradient is always that in the dtype of `x`.

    Extrapolation follows C. J. F. Ridders, Advances in Engineering Software 4 (1982) 75-76; central
    differences with a single step, as in `tf.test.compute_gradient`, have no error estimate.
    """
    _check_options(order, mode, eps, rtol, atol)
    if not tf.executing_eagerly():
        raise RuntimeError("check_gradient runs eagerly; call it outside tf.function and graphs.")
    function, inputs, notes = _of_leaves(f, x)
    random = np.random.default_rng(seed) if mode == "random" else None
    comparisons = []
    for k in range(1, order + 1):
        comparisons.append(comparison.Comparison(function, inputs, k, eps, rtol, atol, random))
        if k < order and not all(np.isfinite(e.embedded) for e in comparisons[-1].entries):
            notes.append("Not every gradient is finite, so second derivatives were not checked.")
            break
        if k < order:
            function = comparison.derivative(function, random)
    report = GradientReport(
        tuple(sorted((e for c in comparisons for e in c.entries), key=lambda e: e.rank)),
        mode,
        1 + sum(c.evaluations for c in comparisons),  # the one that showed what f returns
        tuple(dict.fromkeys([*notes, *(note for c in comparisons for note in c.notes)])),
    )
    if raise_exception and not report.passed:
        raise GradientCheckError(report)
    return report


def _check_options(order: Any, mode: Any, eps: Any, rtol: Any, atol: Any) -> None:
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, got {order!r}.")
    if mode not in ("full", "random"):
        raise ValueError(f"mode must be 'full' or 'random', got {mode!r}.")
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if tolerance is not None and not 0 <= tolerance < np.inf:
            raise ValueError(f"{name} must be None or a number of at least 0, got {tolerance!r}.")
    if eps is None:
        return
    positive = np.all(np.isfinite(eps)) and np.all(np.greater(eps, 0))
    if not positive or np.shape(eps) not in ((), (2,)) or (np.ndim(eps) and eps[0] >= eps[1]):
        raise ValueError(
            "eps must be None, the largest step, or a pair of the smallest and the largest step, "
            f"all positive, got {eps!r}."
        )


def _of_leaves(f: Function, x: Structure) -> tuple[OfLeaves, Named, list[str]]:
    """Returns `f` as a function of the leaves of `x` that have derivatives, these, and notes."""
    leaves = list(structures.flatten(x, "x"))
    places = [i for i, (_, leaf) in enumerate(leaves) if structures.has_derivatives(leaf)]
    inputs = [(leaves[i][0], structures.to_tensor(leaves[i][1], leaves[i][0])) for i in places]
    if not any(tf.size(leaf) for _, leaf in inputs):
        raise TypeError(
            "x has nothing to differentiate by. Pass tensors, arrays or numbers that are floating "
            "and not empty."
        )
    for name, leaf in inputs:
        if leaf.dtype.is_complex:
            raise TypeError(
                f"{name} is {leaf.dtype.name}, but check_gradient takes real arguments. Check a "
                "function of the real and imaginary parts: lambda re, im: f(tf.complex(re, im))."
            )
        if not np.all(np.isfinite(wide(leaf))):
            raise ValueError(f"{name} is not finite, so there are no differences around it.")

    def arguments(tensors: Named) -> tuple[Any, ...]:
        flat = [leaf for _, leaf in leaves]
        for i, (_, tensor) in zip(places, tensors, strict=True):
            flat[i] = tensor
        packed = tf.nest.pack_sequence_as(x, flat)
        return packed if type(x) is tuple else (packed,)

    y = f(*arguments(inputs))
    notes = []
    if type(y) is tuple and len(y) == 2:
        argnums = tuple(range(len(x))) if type(x) is tuple else 0
        f = _from_value_and_gradient.from_value_and_gradient(f, argnums=argnums)
        notes.append("f returns (value, gradient): this gradient is the embedded one.")

    def call(tensors: Named) -> Named:
        outputs = []
        for name, leaf in structures.flatten(f(*arguments(tensors)), "y"):
            leaf = structures.to_tensor(leaf, f"what {calls.name_of(f)} returns")
            if leaf.dtype.is_complex:
                raise TypeError(
                    f"{name}, which f returns, is {leaf.dtype.name}, but check_gradient takes real "
                    "values. Return the real and the imaginary part as a list."
                )
            if leaf.dtype.is_floating:
                outputs.append((name, leaf))
        if not outputs:
            raise TypeError("f returns nothing of a floating dtype, so it has no derivatives.")
        return outputs

    return call, inputs, notes
