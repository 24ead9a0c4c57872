"""Numbers of Python, which have no dtype: they get that of what stands beside them."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread
from shared import EXECUTED, WRAPS, derivative, forward_derivative


def times(x, a):
    return tf.cast(x, tf.float64) * tf.cast(a, tf.float64)


def slopes(x, a):
    return tf.linalg.diag(0 * x + a), x + 0 * a


def jvp(primals, tangents):
    (x, a), (t, s) = primals, tangents
    return x * a, a * t + x * s


by_jvp = sgtrick.custom_jvp(lambda x, a: x * a)
by_vjp = sgtrick.custom_vjp(lambda x, a: (x * a, lambda u: (u * a, tf.reduce_sum(u * x))))
for form in (by_jvp, by_vjp):
    form.defjvp(jvp)


def root(x, a):
    star = np.array([0.1, 0.2])
    return sgtrick.implicit_root(lambda y, x, a: y - x * a, star, x, a)


# Functions of a tensor and a number.
PRODUCTS = {
    "with_gradient": sgtrick.with_gradient(times, slopes, argnums=(0, 1)),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda x, a: (times(x, a), slopes(x, a)), argnums=(0, 1)
    ),
    "custom_jvp": by_jvp,
    "custom_vjp": by_vjp,
    "implicit_root": root,
}


@pytest.mark.parametrize(
    ("name", "mode", "wrap"), spread(PRODUCTS, [derivative, forward_derivative], EXECUTED)
)
def test_an_argument(name, mode, wrap):
    f, wrap = PRODUCTS[name], EXECUTED[wrap]
    x = tf.constant([1.0, 2.0], tf.float64)
    np.testing.assert_array_equal(wrap(lambda x: f(x, 0.1))(x), [0.1, 0.2])
    came = wrap(mode(lambda x: f(x, 0.1)))(x)
    np.testing.assert_array_equal(came, [0.1, 0.1])


# Functions that return a number, or more.
CONSTANTS = {
    "with_gradient": sgtrick.with_gradient(lambda x: 0.1, lambda x: 0 * x),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(lambda x: (0.1, 0 * x)),
    "custom_vjp": sgtrick.custom_vjp(lambda x: (0.1, lambda u: 0 * x)),
    "custom_gradient": lambda x: sgtrick.custom_gradient(0.1, [None, 0 * x], [0.5, x]),
    "beside a number": lambda x: sgtrick.custom_gradient(0.1, [0.3, 0 * x], [0.5, x]),
}


@WRAPS
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("f", CONSTANTS.values(), ids=CONSTANTS)
def test_a_value(f, dtype, wrap):
    y = wrap(f)(tf.constant([1.0, 2.0], dtype))
    assert y.dtype == tf.float64
    assert y.numpy() == 0.1


@WRAPS
@pytest.mark.parametrize("tangent", [0, 0.0])
def test_a_value_and_its_tangent(tangent, wrap):
    h = sgtrick.custom_jvp(lambda x: (2 * x, 0.1))
    h.defjvp(lambda primals, tangents: (None, (2 * tangents[0], tangent)))
    x = tf.constant(1.0, tf.float64)
    assert wrap(h)(x)[1].numpy() == 0.1
    assert wrap(derivative(h))(x).numpy() == 2


@WRAPS
def test_roots_and_samples(wrap):
    a = tf.constant(2.0, tf.float64)
    square = lambda a: sgtrick.implicit_root(lambda x, a: x**2 - a, 2**0.5, a)  # noqa: E731
    np.testing.assert_allclose(wrap(derivative(square))(a), 2**-1.5, rtol=1e-12)
    star = tf.constant(2**0.5, tf.float64)
    by_c = lambda c: sgtrick.implicit_root(lambda x, c, a: x**2 - a * c, star, c, 2.0)  # noqa: E731
    np.testing.assert_allclose(wrap(derivative(by_c))(a / 2), 2**-0.5, rtol=1e-12)
    cdf = lambda x, rate: 1 - tf.exp(-rate * x)  # noqa: E731
    sample = lambda a: sgtrick.implicit_reparameterize(cdf, 0.1, a)  # noqa: E731
    np.testing.assert_allclose(wrap(derivative(sample))(a), -0.05, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([], "float32"),
        (["int32"], "float32"),
        (["float16"], "float16"),
        (["float16", "bfloat16"], "float32"),
        (["float32", "float64"], "float64"),
        (["complex64", "float16"], "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("number", [0.1, 0.1j], ids=str)
def test_beside_several(dtypes, expected, number):
    """The widest dtype, and real for a real number."""
    beside = [tf.constant(1, dtype) for dtype in dtypes]
    seen = []
    h = sgtrick.with_gradient(lambda a, *_: seen.append(a) or 1.0, lambda a, *_: 0 * a)
    h(number, *beside)
    if isinstance(number, complex):
        expected = {"float64": "complex128"}.get(expected, "complex64")
        expected = expected if set(dtypes) - {"int32"} else "complex128"
    assert seen[0].dtype == expected
