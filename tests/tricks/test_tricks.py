"""The small tricks: value of one thing, gradient of another, and loud where that is impossible."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from matrix import CELLS, LOUD, Case, judge, pairs, promised
from matrix import functions as fn
from matrix.values import POINTS
from sgtrick import (
    clip_gradient,
    magic_box,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from shared import WRAPS, WRAPS_AND_XLA, compiled, gradient

WEIGHTS = np.array([1.0, -1.0, 2.0])
FACTORS = np.array([0.5, -2.0, 0.0])
PAYOFF = np.array([1.0, -2.0, 5.0])


def bent(f, slope):
    """Native code: `f` of `x`, as if the derivative of that were `slope`."""
    return lambda x: f(slope * x + tf.stop_gradient(x - slope * x))


def expected_payoff(x):
    """`[..., 3]` to `[...]`, with the softmax as probabilities."""
    return tf.reduce_sum(tf.math.softmax(x) * PAYOFF, -1)


def dice_payoff(x):
    """The same, with the whole sample space as sample."""
    log_prob = tf.math.log_softmax(x)
    frequency = tf.stop_gradient(tf.exp(log_prob))
    return tf.reduce_sum(frequency * magic_box(log_prob) * PAYOFF, -1)


KEPT = np.array([1.0, 0.0, 1.0])
MASK = [False, True, False]


def linear(x):
    return fn.scalar(reverse_gradient(scale_gradient(stop_gradient(x, MASK), FACTORS)))


def clipped(x):
    """To positive ones, so that what flows back is linear in a positive upstream gradient."""
    return WEIGHTS * clip_gradient(x, 0, np.inf)


# `straight_through` is made of the same operations as `stop_gradient`.
CASES = [
    Case("linear", bent(fn.scalar, -KEPT * FACTORS), linear, (POINTS,)),
    Case("magic box", expected_payoff, dice_payoff, (POINTS,)),
]
PAIRS = pairs(CASES, everywhere=set(), twice={"magic box"})


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_matrix(case, cell):
    assert judge(cell, case) == "right"


@tf.custom_gradient
def natively_clipped(x):
    return x, lambda upstream: tf.where(upstream > 0, upstream, 0)


CLIP = Case("clip", lambda x: WEIGHTS * natively_clipped(x), clipped, (POINTS,))

# There TensorFlow differentiates the gradient of a function with respect to the upstream gradient,
# which might be forward mode.
AS_IN_FORWARD_MODE = {
    "nested tapes around a `tf.function`",
    "nested tapes over a square around a `tf.function`",
    "nested tapes around `vectorized_map`",
    "`tf.gradients` twice in a TF1 graph",
}


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
def test_matrix_of_clip(cell):
    """Right, or loud in forward mode, which it does not have."""
    came = judge(cell, CLIP)
    if "forward" in cell.name.lower():
        assert came in LOUD
    elif cell.order == 2 and "square" not in cell.name:
        # The gradient of a linear function is a constant.
        assert came in {"right", "None", *(LOUD if cell.name in AS_IN_FORWARD_MODE else ())}
    elif cell.name in AS_IN_FORWARD_MODE:
        assert came in {"right", *LOUD}
    else:
        assert came in promised(cell, CLIP)


FLOATS = ["float16", "bfloat16", "float32", "float64"]
NOT_FINITE = np.array([np.inf, -np.inf, np.nan, 2.0])


def grad(h, x, upstream=None):
    return h(x), gradient(h, x, upstream)


BENDS = [
    pytest.param(lambda x: stop_gradient(x, [True, False, False, False]), [0, 1, 1, 1], id="stop"),
    pytest.param(lambda x: straight_through(x, x), [1, 1, 1, 1], id="straight through"),
    pytest.param(lambda x: scale_gradient(x, -3), [-3, -3, -3, -3], id="scale"),
    pytest.param(reverse_gradient, [-1, -1, -1, -1], id="reverse"),
]


@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
@pytest.mark.parametrize(("bend", "slope"), BENDS)
def test_dtypes(bend, slope, dtype):
    x = tf.cast([1.0, 2.0, 3.0, 4.0], dtype)
    y, g = grad(bend, x)
    assert y.dtype == g.dtype == x.dtype
    np.testing.assert_array_equal(tf.cast(y, "complex128"), tf.cast(x, "complex128"))
    np.testing.assert_array_equal(tf.cast(g, "complex128"), slope)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_of_the_real_ones(dtype):
    x = tf.cast([1.0, 2.0], dtype)
    for h, value, slope in [
        (lambda x: clip_gradient(x, -0.5, 0.5), x, [0.5, 0.5]),
        (magic_box, [1, 1], [1, 1]),
    ]:
        y, g = grad(h, x)
        assert y.dtype == g.dtype == x.dtype
        np.testing.assert_array_equal(tf.cast(y, "float64"), tf.cast(value, "float64"))
        np.testing.assert_array_equal(tf.cast(g, "float64"), slope)


@WRAPS
@pytest.mark.parametrize(("bend", "slope"), BENDS)
def test_points_that_are_not_finite_keep_their_value_and_harm_no_other(bend, slope, wrap):
    y, g = wrap(lambda x: grad(bend, x))(tf.constant(NOT_FINITE))
    np.testing.assert_array_equal(y, NOT_FINITE)
    assert g[3] == slope[3]
    assert all(g_i in (0, slope_i) for g_i, slope_i in zip(g[:3].numpy(), slope, strict=False))


def test_clip_and_magic_box_at_points_that_are_not_finite():
    x = tf.constant(NOT_FINITE)
    y, g = grad(lambda x: clip_gradient(x, 0, 0.5), x)
    np.testing.assert_array_equal(y, NOT_FINITE)
    np.testing.assert_array_equal(g, [0.5] * 4)
    y, g = grad(magic_box, x)
    np.testing.assert_array_equal(y, [1] * 4)
    np.testing.assert_array_equal(g, [0, 0, 0, 1])


def test_what_is_stopped_stays_zero_under_any_upstream():
    upstream = tf.constant([np.inf, np.nan, 1.0])
    x = tf.constant([1.0, 2.0, 3.0])
    for h in (
        lambda x: stop_gradient(x, [True, True, False]),
        lambda x: scale_gradient(x, [0, 0, 1]),
    ):
        np.testing.assert_array_equal(grad(h, x, upstream)[1], [0, 0, 1])


def test_infinite_factors_leave_zero_upstream_alone():
    x = tf.constant([1.0, 2.0])
    y, g = grad(lambda x: scale_gradient(x, np.inf), x, tf.constant([0.0, -2.0]))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(g, [0, -np.inf])


def test_factor_is_stopped():
    x, factor = tf.constant([1.0, 2.0]), tf.constant(3.0)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([x, factor])
        _, g = grad(lambda x: scale_gradient(x, factor * x) ** 2, x)
    # 2 x c, and the derivative of 2 h c with c = factor x stopped and dh/dx = c.
    np.testing.assert_allclose(g, 2 * x * 3 * x)
    np.testing.assert_allclose(outer.gradient(g, x), 2 * (3 * x) ** 2)
    assert outer.gradient(g, factor) is None


def test_masks_that_differ_by_member():
    x = tf.reshape(tf.range(6.0), [3, 2])
    masks = tf.constant([[True, False], [False, False], [True, True]])
    h = lambda x: tf.vectorized_map(lambda a: stop_gradient(*a), (x, masks))  # noqa: E731
    np.testing.assert_array_equal(grad(h, x)[1], np.where(masks, 0, 1))


def test_structures():
    x = {"a": [tf.constant([1.0, 2.0])], "b": tf.constant(3.0)}

    def check(h, by_a, by_b):
        y, g = grad(h, x)
        tf.nest.assert_same_structure(y, x)
        np.testing.assert_array_equal(g["a"][0], by_a)
        assert g["b"] == by_b

    check(lambda x: stop_gradient(x, {"a": [np.array([True, False])], "b": False}), [0, 1], 1)
    check(lambda x: stop_gradient(x, {"a": [np.array([False, True])], "b": None}), [1, 0], None)
    check(lambda x: straight_through(tf.nest.map_structure(tf.round, x), x), [1, 1], 1)
    check(lambda x: scale_gradient(x, 2), [2, 2], 2)
    check(lambda x: scale_gradient(x, {"a": [np.array([2, 3])], "b": 4}), [2, 3], 4)
    check(reverse_gradient, [-1, -1], -1)
    check(lambda x: clip_gradient(x, -1, 0.5), [0.5, 0.5], 0.5)
    check(lambda x: clip_gradient(x, -1, {"a": [np.array([0.5, 0.25])], "b": 2}), [0.5, 0.25], 1)
    check(magic_box, [1, 1], 1)


def test_variables():
    v = tf.Variable([1.0, -2.0])
    with tf.GradientTape(persistent=True) as tape:
        ys = [
            stop_gradient(v, [True, False]),
            straight_through(tf.sign(v), v),
            scale_gradient(v, 2),
            clip_gradient(v, 0, 0.5),
            magic_box(v),
        ]
    expected = [[0, 1], [1, 1], [2, 2], [0.5, 0.5], [1, 1]]
    for y, g in zip(ys, expected, strict=True):
        np.testing.assert_array_equal(tape.gradient(y, v), g)


def test_straight_through_has_the_dtype_of_the_value():
    x = tf.constant([0.25, 0.75], tf.float64)
    y, g = grad(lambda x: straight_through(tf.cast(x > 0.5, tf.float16), x), x)
    assert (y.dtype, g.dtype) == (tf.float16, tf.float64)
    y, _ = grad(lambda x: straight_through(0.1, x), x[0])
    assert y.dtype == tf.float64
    assert y == 0.1


# DiCE: the estimator, averaged over the whole sample space, is the expectation with all its
# derivatives.


def derivatives(f, x):
    """`f`, its gradient, Hessian and so on at `x`, beyond the gradient times one vector each."""
    v = tf.constant(np.random.default_rng(4).normal(size=x.shape))
    with contextlib.ExitStack() as stack:
        tapes = [stack.enter_context(tf.GradientTape(persistent=True)) for _ in range(3)]
        for tape in tapes:
            tape.watch(x)
        found = [f(x)]
        for tape in reversed(tapes):
            so_far = found[-1] if len(found) == 1 else tf.reduce_sum(found[-1] * v)
            found.append(tape.gradient(so_far, x))
    return found


def chain(probability, x):
    """Two choices of three, the second hanging on the first, with a payoff after each.

    `probability(log_p)` stands for the probability of all that was chosen before the payoff.
    """
    first = tf.math.log_softmax(x[:3])
    second = tf.math.log_softmax(tf.reshape(x, [3, 3]) * x[0], -1)
    after_first = probability(first) * PAYOFF * tf.sin(x[1])
    after_second = probability(first[:, tf.newaxis] + second) * PAYOFF * np.arange(1.0, 4)[:, None]
    return tf.reduce_sum(after_first) + tf.reduce_sum(after_second)


def sampled(log_p):
    """How often it occurs, and what DiCE makes of an occurrence."""
    return tf.stop_gradient(tf.exp(log_p)) * magic_box(log_p)


AT = np.random.default_rng(3).normal(size=9)


@WRAPS_AND_XLA
def test_magic_box_has_the_derivatives_of_the_expectation(wrap):
    came = wrap(lambda x: derivatives(functools.partial(chain, sampled), x))(tf.constant(AT))
    want = derivatives(functools.partial(chain, tf.exp), tf.constant(AT))
    assert np.abs(want[-1]).max() > 1  # there is something to miss
    for a, b in zip(came, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_clip_is_entry_by_entry_with_bounds_of_any_kind():
    x = tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    upstream = np.array([[-5.0, 0.5, 5.0], [7.0, -7.0, 0.0]], np.float32)
    lo, hi = np.array([-1.0, -2.0, 0.25]), tf.Variable([[2.0], [3.0]])
    _, g = grad(lambda x: clip_gradient(x, lo, hi), x, tf.constant(upstream))
    np.testing.assert_array_equal(g, np.clip(upstream, lo, hi.numpy()))


@pytest.mark.parametrize("wrap", [tf.function, compiled], ids=["graph", "XLA"])
def test_clip_keeps_nan(wrap):
    upstream = tf.constant([np.nan, np.inf, -np.inf])
    run = wrap(lambda x: gradient(lambda x: clip_gradient(x, -1, 1), x, upstream))
    np.testing.assert_array_equal(run(tf.ones([3])), [np.nan, 1, -1])


def test_clip_clips_the_sum_of_what_flows_back():
    """`tf.gather` sends back IndexedSlices, here with one entry in three parts."""
    x = tf.constant([1.0, 2.0])
    _, g = grad(lambda x: tf.gather(clip_gradient(x, -1, 1.5), [0, 0, 0, 1]), x)
    np.testing.assert_array_equal(g, [1.5, 1])


def test_clip_does_not_mind_forward_mode_by_other_things():
    x, t = tf.constant([1.0, 2.0]), tf.constant(3.0)
    with tf.autodiff.ForwardAccumulator(t, tf.constant(1.0)) as accumulator:
        y = tf.reduce_sum(clip_gradient(x, -1, 1)) * t
    assert accumulator.jvp(y) == 3


X = tf.constant([[1.0, 2.0], [3.0, 4.0]])
ERRORS = {
    "float mask": (
        lambda: stop_gradient(X, 0.5),
        TypeError,
        "where must be a bool mask that broadcasts to x, got dtype float32",
    ),
    "mask of another shape": (
        lambda: stop_gradient(X, [True] * 3),
        ValueError,
        r"where has shape \[3\], which does not broadcast to that of x, \[2, 2\]",
    ),
    "index": (lambda: stop_gradient(X, 0), TypeError, r"got dtype int32.*mask\[i\] = True"),
    "mask of another structure": (
        lambda: stop_gradient([X, X], {"a": True}),
        ValueError,
        r"where must have the structure of x",
    ),
    "int value": (
        lambda: straight_through(X > 1, X),
        TypeError,
        "fx has dtype bool, which has no derivatives. Cast it",
    ),
    "complex value": (
        lambda: straight_through(tf.cast(X, tf.complex64), X),
        TypeError,
        "fx has dtype complex64, x float32. Both must be complex",
    ),
    "int scaled": (lambda: scale_gradient([X, 1], 2), TypeError, r"x\[1\] has dtype int32"),
    "complex factor": (
        lambda: scale_gradient(X, 1j),
        TypeError,
        "factor has dtype complex128, expected float32",
    ),
    "complex clipped": (
        lambda: clip_gradient(tf.cast(X, tf.complex64), 0, 1),
        TypeError,
        "x has dtype complex64, expected a real",
    ),
    "bounds reversed": (
        lambda: clip_gradient(X, 1, -1),
        tf.errors.InvalidArgumentError,
        "lo must not exceed hi",
    ),
    "NaN as bound": (
        lambda: clip_gradient(X, np.nan, 1),
        tf.errors.InvalidArgumentError,
        "lo must not exceed hi",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
