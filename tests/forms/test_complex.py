"""Complex numbers, in XLA above all, for every form that takes them."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE
from matrix import spread
from shared import EXECUTED, FIRST_WAYS, FORWARD, MODES, WAYS, Way, compiled, derivative

Z = np.array([0.3 + 0.2j, 1.0 - 0.4j, -0.7 + 1.1j])


def cube(z):
    return z**3


def stopped(z):
    """The value alone."""
    return tf.stop_gradient(z**3)


def slope(z):
    return 3 * z**2


OF_COMPLEX = {
    "custom_gradient": lambda z: sgtrick.custom_gradient(stopped(z), slope(z), z),
    "custom_gradient, hx": lambda z: sgtrick.custom_gradient(
        stopped(z), slope(z), z, batch_ndims=1, hx=6 * z
    ),
    **{name: make(stopped, slope) for name, make in OF_SLOPE.items()},
    "custom_vjp": sgtrick.custom_vjp(lambda z: (stopped(z), lambda u: u * tf.math.conj(slope(z)))),
    "scale_gradient": lambda z: cube(sgtrick.scale_gradient(z, 1.0)),
    "straight_through": lambda z: sgtrick.straight_through(stopped(z), cube(z)),
    "stop_gradient": lambda z: cube(sgtrick.stop_gradient(z, where=[False, False, False])),
    "reverse_gradient": lambda z: cube(sgtrick.reverse_gradient(sgtrick.reverse_gradient(z))),
}


WAYS = WAYS | {
    "in tf.function": FIRST_WAYS["in tf.function"],
    "around XLA": Way(inside=compiled),
    "forward in XLA": Way(around=compiled, modes=FORWARD),
}


def second(f):
    return compiled(derivative(lambda z: derivative(f)(z) * (1 + 2j)))


@functools.cache
def natively(way, dtype):
    """What TensorFlow's own code gives at these points."""
    return way(cube)(tf.cast(Z, dtype)).numpy()


DTYPES = ["complex64", "complex128"]
OF_EACH_ENTRY = [
    name for name in OF_COMPLEX if name not in ("custom_gradient, hx", "stop_gradient")
]
IN_OTHER_WAYS = [
    *spread(OF_COMPLEX, ["forward in XLA"], DTYPES, together=1),
    # A form does not know them.
    *spread(
        OF_EACH_ENTRY,
        ["eager", "around XLA", "in tf.function", "around vectorized_map"],
        DTYPES,
        together=1,
    ),
]


@pytest.mark.parametrize(
    ("name", "way", "dtype"),
    spread(OF_COMPLEX, ["in XLA"], DTYPES)
    + [pytest.param(*case, marks=pytest.mark.long) for case in IN_OTHER_WAYS],
)
def test_first_derivatives(name, way, dtype):
    """By TensorFlow's convention for gradients: the conjugate of the derivative."""
    came = WAYS[way](OF_COMPLEX[name])(tf.cast(Z, dtype))
    np.testing.assert_allclose(came, natively(WAYS[way], dtype), rtol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), spread(OF_COMPLEX, DTYPES, together=1))
def test_value_and_second_derivatives(name, dtype):
    """Right, or not finite, which is all that XLA has to say no."""
    z = tf.cast(Z, dtype)
    y = compiled(OF_COMPLEX[name])(z)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, Z**3, rtol=1e-5)
    came = second(OF_COMPLEX[name])(z)
    if name == "custom_gradient":
        assert not np.any(np.isfinite(came))
    else:
        np.testing.assert_allclose(came, natively(second, dtype), rtol=1e-4)


def test_second_derivatives_by_a_function_for_the_hessian():
    def form(z):
        h = tf.stop_gradient(6 * z)
        return sgtrick.custom_gradient(cube(z), slope(z), z, batch_ndims=1, hx=lambda v: h * v)

    def twice(f):
        return derivative(lambda z: derivative(f)(z) * (1 + 2j))(tf.constant(Z))

    np.testing.assert_allclose(twice(form), twice(cube), rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("product", "outer", "inner", "wrap"),
    spread([False, True], ["reverse", "forward"], ["reverse", "forward"], EXECUTED),
)
def test_complex_values_of_real_points(product, outer, inner, wrap):
    """Whose Hessian is complex, and with it the products with cotangents of the gradient."""

    def native(x):
        return tf.exp(tf.complex(0 * x, 2 * x))

    def form(x):
        y = tf.stop_gradient(native(x))
        hx = (lambda v: tf.complex(-4 * v, 0 * v) * y) if product else -4 * y
        return sgtrick.custom_gradient(y, 2j * y, x, batch_ndims=1, hx=hx)

    def twice(f):
        first = MODES[inner](lambda x: (1 - 3j) * f(x))
        return MODES[outer](lambda x: tf.cast(first(x), tf.complex128) * (1 + 2j))

    x = tf.constant([0.3, -1.2], tf.float64)
    np.testing.assert_allclose(EXECUTED[wrap](twice(form))(x), twice(native)(x), rtol=1e-12)
