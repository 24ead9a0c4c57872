"""Sums in half precision, which a form takes in a wider one: there they stop at 2,048."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread
from shared import EXECUTED, WRAPS, derivative, forward_derivative, gradient, mapped

N = 4096
ROWS = np.stack([1 + np.arange(N) % 2, 2 + np.arange(N) % 3], 1).astype("float16")


def product(w):
    return tf.linalg.matvec(ROWS, w)


def each(x, w):
    """A member's product."""
    return tf.reduce_sum(x * w)


with_gradient = sgtrick.with_gradient(each, lambda x, w: x, argnums="w")
custom_vjp = sgtrick.custom_vjp(lambda x, w: (each(x, w), lambda u: (u * w, u * x)))
custom_jvp = sgtrick.custom_jvp(each)
custom_jvp.defjvp(lambda at, t: (None, each(t[0], at[1]) + each(at[0], t[1])))

HOSTED = {
    "from_numpy": sgtrick.from_numpy(lambda x, w: (x @ w, (w, x))),
    "from_numpy, vjp": sgtrick.from_numpy(lambda x, w: x @ w, vjp=lambda x, w, u: (u * w, u * x)),
    "from_numpy, float16": sgtrick.from_numpy(lambda x, w: (x @ w, (w, x)), dtype="float16"),
}

# Functions of an argument that all members of a batch share.
SHARED = {
    "custom_gradient": lambda w: sgtrick.custom_gradient(product(w), ROWS, w),
    "with_gradient": sgtrick.with_gradient(product, lambda w: tf.constant(ROWS)),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(lambda w: (product(w), ROWS)),
    **{name: lambda w, h=h: h(ROWS, w) for name, h in HOSTED.items()},
    "with_gradient, mapped": lambda w: mapped(lambda x: with_gradient(x, w))(ROWS),
    "custom_vjp, mapped": lambda w: mapped(lambda x: custom_vjp(x, w))(ROWS),
    "custom_jvp, mapped": lambda w: mapped(lambda x: custom_jvp(x, w))(ROWS),
}


@pytest.mark.parametrize(("name", "wrap"), spread(SHARED, EXECUTED, together=1))
def test_an_argument_that_a_batch_shares(name, wrap):
    """Its gradient is a sum over the batch."""
    upstream = tf.fill([N], tf.constant(1 / N, tf.float16))
    run = EXECUTED[wrap](lambda w: gradient(SHARED[name], w, upstream))
    came = run(tf.constant([1.0, 2.0], tf.float16))
    assert came.dtype == tf.float16
    np.testing.assert_allclose(came, ROWS.astype("float64").mean(0), rtol=1e-3)


ENGINE = sgtrick.from_numpy(
    lambda x, w: ({"a": x @ w, "b": x * w}, {"a": (w, x), "b": (np.diag(w), np.diag(x))}),
    value_shape={"a": (), "b": (2,)},
)


@WRAPS
def test_several_values_of_an_engine(wrap):
    def of(w):
        y = ENGINE(ROWS, w)
        return y["a"] / N + tf.reduce_sum(y["b"], -1) / N

    came = wrap(derivative(of))(tf.constant([1.0, 2.0], tf.float16))
    np.testing.assert_allclose(came, 2 * ROWS.astype("float64").mean(0), rtol=1e-3)


@WRAPS
def test_an_upstream_gradient_and_a_slope_that_float16_does_not_hold(wrap):
    """Only their product."""

    def f(x):
        return sgtrick.custom_gradient(tf.constant(1.0), tf.constant([2e8, 4e8]), x)

    x = tf.constant([1.0, 1.0], tf.float16)
    came = wrap(lambda x: gradient(f, x, tf.constant(2e-8)))(x)
    np.testing.assert_allclose(came, [4, 8], rtol=1e-3)
    pushed = wrap(forward_derivative(f))(x)
    np.testing.assert_allclose(pushed, 6e8, rtol=1e-3)


HESSIAN = np.array([[2.0, 0.5], [0.5, 1.0]], "float16")


@WRAPS
@pytest.mark.parametrize("outer", [derivative, forward_derivative])
def test_second_derivatives(outer, wrap):
    hx, upstream = np.tile(HESSIAN, [N, 1, 1]), tf.fill([N], tf.constant(1 / N, tf.float16))

    def slope(w):
        f = lambda w: sgtrick.custom_gradient(product(w), ROWS, w, hx=hx)  # noqa: E731
        return gradient(f, w, upstream)

    came = wrap(outer(slope))(tf.constant([1.0, 2.0], tf.float16))
    assert came.dtype == tf.float16
    np.testing.assert_allclose(came, HESSIAN.sum(0), rtol=1e-2)


def of_member(w):
    """With a function for the Hessian that is its own transpose."""
    times = lambda v: tf.linalg.matvec(HESSIAN, v)  # noqa: E731
    return sgtrick.custom_gradient(tf.reduce_sum(w), w, w, hx=times)


@WRAPS
@pytest.mark.parametrize("outer", [derivative, forward_derivative])
def test_second_derivatives_of_one_value(outer, wrap):
    came = wrap(outer(derivative(of_member)))(tf.constant([1.0, 2.0], tf.float16))
    assert came.dtype == tf.float16
    np.testing.assert_allclose(came, HESSIAN.sum(0), rtol=1e-2)
