"""Second derivatives of engines whose value is an array, and by finite differences of gradients."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from array_model import (
    OPTIONS,
    A,
    U,
    X,
    added,
    hessp,
    jacobian,
    jvp,
    jvp_of_pair,
    mapped,
    pair,
    true,
    true_pair,
    value,
    vjp,
    vjp_of_pair,
)
from matrix import traced
from shared import WRAPS

V, B = np.random.default_rng(8).normal(size=(4, 2)), np.random.default_rng(9).normal(size=4)


def hessp_of_pair(x, a, u, v):
    by_x, by_a = hessp(x, a, u["curve"], v)
    size = np.asarray(u["size"])
    return (
        by_x + 2 * (size * a)[..., None] * v[0] + 2 * (size * v[1])[..., None] * x,
        by_a + 2 * size * np.sum(x * v[0], -1),
    )


def engines(**options):
    """One for each way to give the derivatives, each with the true function and a tolerance."""
    options = OPTIONS | options
    shapes = options | {"value_shape": {"curve": (3,), "size": ()}}
    given, of_pair = {"vjp": vjp, "jvp": jvp}, {"vjp": vjp_of_pair, "jvp": jvp_of_pair}
    # Of "2-point", half the digits are left.
    return {
        "Jacobian, hessp": (value, {"grad": jacobian, "hessp": hessp}, options, 1e-12),
        "products, hessp": (value, {**given, "hessp": hessp}, options, 1e-12),
        "structure, hessp": (pair, {**of_pair, "hessp": hessp_of_pair}, shapes, 1e-12),
        "Jacobian, 3-point": (value, {"grad": jacobian, "hess": "3-point"}, options, 1e-7),
        "products, 3-point": (value, {**given, "hess": "3-point"}, options, 1e-7),
        "products, 2-point": (value, {**given, "hess": "2-point"}, options, 1e-5),
        "structure, 3-point": (pair, {**of_pair, "hess": "3-point"}, shapes, 1e-7),
    }


def made(name, **options):
    fn, given, options, _ = engines(**options)[name]
    h = sgtrick.from_numpy(fn, **given, **options)
    return added(h) if fn is pair else h


def native(name):
    return added(true_pair) if "structure" in name else true


def pulled(f, x, a):
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        y = f(x, a)
    return tape.gradient(y, [x, a], U)


def reverse_over_reverse(f):
    x, a = tf.constant(X), tf.constant(A)
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        by_x, by_a = pulled(f, x, a)
    return tape.gradient([by_x, by_a], [x, a], [V, B])


def forward_over_reverse(f):
    x, a = tf.constant(X), tf.constant(A)
    with tf.autodiff.ForwardAccumulator([x, a], [tf.constant(V), tf.constant(B)]) as accumulator:
        gradients = pulled(f, x, a)
    return accumulator.jvp(gradients)


def reverse_over_forward(f):
    x, a = tf.constant(X), tf.constant(A)
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        with tf.autodiff.ForwardAccumulator([x, a], [tf.constant(V), tf.constant(B)]) as along:
            y = f(x, a)
        t = along.jvp(y)
    return tape.gradient(t, [x, a], U)


def of_a_likelihood(f):
    """By the upstream gradient too, which depends on the point."""
    x, a = tf.constant(X), tf.constant(A)
    with tf.GradientTape() as outer:
        outer.watch([x, a])
        with tf.GradientTape() as tape:
            tape.watch([x, a])
            y = -tf.reduce_sum((f(x, a) - U) ** 2)
        gradients = tape.gradient(y, [x, a])
    return outer.gradient(gradients, [x, a], [V, B])


LAWS = [reverse_over_reverse, forward_over_reverse, reverse_over_forward, of_a_likelihood]
WAYS = {
    "eager": lambda law, f: law(f),
    "in tf.function": lambda law, f: traced(lambda: law(f))(),
    "around tf.function": lambda law, f: law(tf.function(f)),
}


def check(name, law, way, f):
    rtol = engines()[name][-1]
    for came, expected in zip(way(law, f), law(native(name)), strict=True):
        np.testing.assert_allclose(came, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", engines())
def test_equals_autodiff(name, law, way):
    if law is reverse_over_forward and way == "around tf.function":
        pytest.skip("TensorFlow has None for this, of its own operations too")
    check(name, law, WAYS[way], made(name, vectorized=law in LAWS[::2]))


@pytest.mark.parametrize("law", [reverse_over_reverse, of_a_likelihood])
@pytest.mark.parametrize("name", ["Jacobian, hessp", "products, 3-point"])
def test_mapped(name, law):
    check(name, law, WAYS["eager"], mapped(made(name, vectorized=True)))


def test_of_one_number():
    """By differences, beside a gradient that comes with the value, for each member by itself."""

    def engine(x, k):
        if np.any(x == 5):
            raise ArithmeticError("no value")
        return np.sum(x**k), (k * x ** (k - 1), None)

    h = sgtrick.from_numpy(engine, hess="3-point", event_ndims=(1, 0), on_error=-np.inf)
    x = tf.constant([[1.0, -2e3], [1e-3, 3.0], [0.0, 0.0], [5.0, 1.0]], tf.float64)
    v = tf.constant([[2.0, 1.0], [-1.0, 0.5], [0.0, 0.0], [1.0, 1.0]], tf.float64)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x, tf.constant(3))
        gradient = tape.gradient(y, x)
    came = outer.gradient(gradient, x, v)
    expected = (6 * x * v).numpy()
    expected[3] = np.nan  # the value is a constant there, and the Hessian not known
    np.testing.assert_allclose(came, expected, rtol=1e-6, atol=1e-9)
    # Two lines, since the entries of the first v differ by so much relative to x.
    assert (h.calls, h.hess_calls, h.failures) == (4, 16, 3)


def along(h, x, v):
    """The Hessian times `v`."""
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        gradient = tape.gradient(y, x)
    return outer.gradient(gradient, x, v)


@pytest.mark.parametrize("size", [1.0, 1e8, 1e12])
@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_differences_of_entries_of_any_size(scheme, size):
    h = sgtrick.from_numpy(lambda x: (x[0] * x[1], x[::-1]), hess=scheme)
    v = tf.constant([1.0, 1.0], tf.float64)
    np.testing.assert_allclose(along(h, tf.constant([size, 1.0], tf.float64), v), v, rtol=1e-4)


@pytest.mark.parametrize("name", ["Jacobian, 3-point", "products, 3-point"])
def test_a_whole_hessian_by_differences(name):
    """In which the vectors for one argument are mapped, and those for the other are not."""

    def hessian(f):
        x, a = tf.constant(X[0]), tf.constant(A[0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch([x, a])
                y = f(x, a)
            by_x, _ = tape.gradient(y, [x, a], U[0])
        return outer.jacobian(by_x, x)

    np.testing.assert_allclose(hessian(made(name)), hessian(true), rtol=1e-6, atol=1e-7)


def test_of_one_number_by_products():
    cubes = {"vjp": lambda x, a, u: (3 * x**2 * a * u, np.sum(x**3) * u)}
    cubes["jvp"] = lambda x, a, t: 3 * np.sum(x**2 * a * t[0]) + np.sum(x**3) * t[1]
    hessp = lambda x, a, v: (6 * x * a * v[0] + 3 * x**2 * v[1], 3 * np.sum(x**2 * v[0]))  # noqa: E731
    x, v = tf.constant(X, tf.float32), tf.constant(V, tf.float32)
    for second in ({"hessp": hessp}, {"hess": "3-point"}):
        h = sgtrick.from_numpy(lambda x, a: a * np.sum(x**3), event_ndims=(1, 0), **cubes, **second)
        came = along(lambda x: h(x, tf.constant(A)), x, v)  # noqa: B023
        np.testing.assert_allclose(came, 6 * X * A[:, None] * V, rtol=1e-5)
        assert h.hess_calls == (4 if "hessp" in second else 8)


@pytest.mark.parametrize("name", ["Jacobian, hessp", "products, hessp"])
@WRAPS
def test_third_derivatives_raise(name, wrap):
    h = made(name)

    def third(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                (by_x, _) = pulled(h, x, tf.constant(A))
            second = inner.gradient(by_x, x)
        return tape.gradient(second, x)

    with pytest.raises((LookupError, tf.errors.OpError), match="asked for a third derivative"):
        wrap(third)(tf.constant(X))


@pytest.mark.parametrize("name", ["Jacobian, hessp", "products, hessp"])
def test_forward_over_forward_mode_raises(name):
    x, t = tf.constant(X), tf.constant(V)

    def twice():
        with tf.autodiff.ForwardAccumulator(x, t) as outer:
            with tf.autodiff.ForwardAccumulator(x, t) as inner:
                y = made(name)(x, tf.constant(A))
            along = inner.jvp(y)
        return outer.jvp(along)

    message = "forward mode over forward mode, which hessp= does not"
    with pytest.raises((LookupError, tf.errors.OpError), match=message):
        twice()


def test_without_jvp():
    """Some second derivatives need none."""
    h = sgtrick.from_numpy(value, vjp=vjp, hessp=hessp, **OPTIONS)
    for came, expected in zip(reverse_over_reverse(h), reverse_over_reverse(true), strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-12)
    with pytest.warns(RuntimeWarning, match=r"has no jvp=\. Pass jvp="):
        by_x, by_a = of_a_likelihood(h)
    assert np.isnan(by_x).all()
    assert np.isnan(by_a).all()
