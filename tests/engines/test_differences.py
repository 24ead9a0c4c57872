"""Gradients of engines by finite differences; the oracles are autodiff and SciPy."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from scipy.optimize._numdiff import approx_derivative

import sgtrick
from array_model import OPTIONS, A, U, X, by_forward_mode, gradients, mapped, true, value
from matrix import traced

WITHIN = {"2-point": 1e-7, "3-point": 1e-10}
SCHEMES = pytest.mark.parametrize("scheme", WITHIN)
VECTORIZED = pytest.mark.parametrize("vectorized", [True, False])
WAYS = {
    "eager": gradients,
    "in tf.function": lambda f: traced(lambda: gradients(f))(),
    "around tf.function": lambda f: gradients(tf.function(f)),
    "around vectorized_map": lambda f: gradients(mapped(f)),
}


@SCHEMES
@VECTORIZED
@pytest.mark.parametrize("way", WAYS)
def test_equal_autodiff(scheme, vectorized, way):
    h = sgtrick.from_numpy(value, grad=scheme, vectorized=vectorized, **OPTIONS)
    for came, expected in zip(WAYS[way](h), gradients(true), strict=True):
        np.testing.assert_allclose(came, expected, atol=WITHIN[scheme])
    points = 1 + (3 if scheme == "2-point" else 6)
    assert h.calls == (1 if vectorized else 4 * points)
    for came, expected in zip(by_forward_mode(h), by_forward_mode(true), strict=True):
        np.testing.assert_allclose(came, expected, atol=WITHIN[scheme])


@SCHEMES
def test_steps_are_those_of_scipy(scheme):
    x = np.array([1e-3, -0.7, 0.0, -1e8, 250.0])
    f = lambda x: np.exp(np.sin(x)).prod()  # noqa: E731
    h = sgtrick.from_numpy(f, grad=scheme)
    _, came = gradients(h, (x,), None)
    np.testing.assert_allclose(came, approx_derivative(f, x, scheme), rtol=1e-12)


@SCHEMES
def test_beside_arguments_without_derivatives(scheme):
    def engine(data, n, x):
        return n * np.sum(x**2 * data["scale"])

    h = sgtrick.from_numpy(engine, grad=scheme, event_ndims=(1, 0, 2))
    x, scale = np.ones([2, 3]), np.array([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        x, scale = tf.constant(x), tf.constant(scale)
        tape.watch([x, scale])
        y = h({"scale": scale}, tf.constant(5), x)
    by_x, by_scale = tape.gradient(y, [x, scale])
    np.testing.assert_allclose(y, 60)
    np.testing.assert_allclose(by_x, 10 * x * scale, rtol=WITHIN[scheme])
    np.testing.assert_allclose(by_scale, [10, 10, 10], rtol=WITHIN[scheme])


@SCHEMES
def test_in_float64_of_tensors_of_float32(scheme):
    h = sgtrick.from_numpy(value, grad=scheme, **OPTIONS)
    args = X.astype("float32"), A.astype("float32")
    for came, expected in zip(
        gradients(h, args, U.astype("float32")), gradients(true), strict=True
    ):
        assert came.dtype == tf.float32
        np.testing.assert_allclose(came, expected, rtol=1e-5)


@SCHEMES
@VECTORIZED
def test_an_empty_batch_makes_no_call(scheme, vectorized):
    h = sgtrick.from_numpy(value, grad=scheme, vectorized=vectorized, **OPTIONS)
    y, by_x, by_a = gradients(h, (X[:0], A[:0]), U[:0])
    assert [y.shape, by_x.shape, by_a.shape] == [[0, 3], [0, 2], [0]]
    assert h.calls == 0


def test_of_methods_with_aux_and_by_an_executor():
    class Model:
        factor = 3.0

        def energy(self, x):
            return self.factor * np.sum(x**3), x + self.factor

    with ThreadPoolExecutor(2) as executor:
        h = sgtrick.from_numpy(Model().energy, grad="3-point", has_aux=True, executor=executor)
        with tf.GradientTape() as tape:
            x = tf.constant(X)
            tape.watch(x)
            y, aux = h(x)
    np.testing.assert_allclose(tape.gradient(y, x), 9 * X**2, atol=1e-8)
    np.testing.assert_array_equal(aux, X + 3)


class TestFailures:
    @staticmethod
    def engine(x):
        if np.any(np.abs(x) > 1):
            raise ArithmeticError("no solution")
        return np.sum(x, -1)

    @SCHEMES
    @VECTORIZED
    def test_of_the_point_and_of_its_neighbours(self, scheme, vectorized):
        h = sgtrick.from_numpy(self.engine, grad=scheme, vectorized=vectorized, on_error=-5.0)
        x = [[0.5, 0.5], [3.0, 0.5], [1.0, 0.5]]  # right, failed, failed beside
        y, g = gradients(h, (np.array(x),), None)
        np.testing.assert_allclose(y, [1, -5, 1.5])
        np.testing.assert_allclose(g, [[1, 1], [0, 0], [np.nan, 1]], rtol=1e-6)

    def test_raise(self):
        h = sgtrick.from_numpy(self.engine, grad="2-point")
        with pytest.raises((RuntimeError, tf.errors.OpError), match="no solution"):
            h(tf.constant([1.0, 0.0]))


def test_other_names_are_refused():
    message = r"grad must be a function, or one of \['2-point', '3-point'\], got 'cs'"
    with pytest.raises(ValueError, match=message):
        sgtrick.from_numpy(value, grad="cs")


def test_the_choice_is_shown():
    assert "grad='2-point'" in repr(sgtrick.from_numpy(value, grad="2-point"))
