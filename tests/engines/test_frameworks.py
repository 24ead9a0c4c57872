"""Functions of PyTorch and JAX beside native code of the same model"""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from shared import WRAPS, value_and_gradients

tfd = tfp.distributions

POINTS = np.random.default_rng(5).normal(size=(2, 4, 3))


@pytest.fixture(params=["torch", "jax"])
def framework(request):
    package = pytest.importorskip(request.param)
    if request.param == "torch":
        return SimpleNamespace(form=sgtrick.from_torch, np=package, jvp=package.func.jvp)
    return SimpleNamespace(form=sgtrick.from_jax, np=package.numpy, jvp=package.jvp)


def model(xp):
    def log_prob(p, x):
        z = (x - p["loc"]) / xp.exp(p["log_scale"])
        return (-0.5 * z**2 - p["log_scale"]).sum() - 1.5 * float(np.log(2 * np.pi))

    return log_prob


def native(p, x):
    scale = tf.exp(p["log_scale"])[..., tf.newaxis]
    return tf.reduce_sum(tfd.Normal(p["loc"][..., tf.newaxis], scale).log_prob(x), -1)


@WRAPS
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_value_and_gradient(framework, wrap, dtype):
    seen = []

    def log_prob(p, x):
        seen.append((x.ndim, str(x.dtype)))
        return model(framework.np)(p, x)

    h = framework.form(log_prob, event_ndims=({"loc": 0, "log_scale": 0}, 1))
    p = {"loc": tf.constant(0.5, dtype), "log_scale": tf.constant(POINTS[:, :1, 0], dtype)}
    x = tf.constant(POINTS, dtype)
    came = wrap(value_and_gradients)(h, p, x)
    want = value_and_gradients(native, p, x)
    rtol = 1e-5 if dtype == "float32" else 1e-12
    for a, b in zip(tf.nest.flatten(came), tf.nest.flatten(want), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    assert h.calls == 1
    assert all(ndim == 1 and "float64" in of for ndim, of in seen)


def test_errors_of_the_framework(framework):
    def f(x):
        return x @ x[:1]  # shapes that do not fit

    h = framework.form(f)
    message = r"(?s)f raised .*Error: .*arguments of the shapes \[2\], .*use from_numpy with"
    with pytest.raises(TypeError, match=message):
        h(tf.constant([1.0, 2.0]))


def test_nothing_to_differentiate_by(framework):
    h = framework.form(lambda n: n * 1.0, event_ndims=0)
    with pytest.raises(TypeError, match="has no argument of a floating dtype"):
        h(3)


def test_values_of_another_shape_than_stated(framework):
    message = r"the value of f must have the shape \[\], got \[2\]. .*value_shape=\(2,\)"
    h = framework.form(lambda x: x, name="f", on_error=-np.inf, value_shape=())
    with pytest.raises(ValueError, match=message):
        h(tf.constant([1.0, 2.0]))


def test_many_calls(framework):
    h = framework.form(lambda x: -0.5 * (x**2).sum())
    graph = tf.function(value_and_gradients)
    x = tf.constant(POINTS)

    def some(n):
        for i in range(n):
            _, (g,) = graph(h, x) if i % 2 else value_and_gradients(h, x)
            np.testing.assert_array_equal(g, -POINTS)

    def living():
        gc.collect()
        return len(gc.get_objects())

    some(20)
    before = living()
    some(300)
    assert h.calls == 320
    assert living() - before < 100


def test_what_is_no_function_is_refused_when_it_is_passed(framework):
    for options in ({}, *([{"native": True}] if framework.form is sgtrick.from_jax else [])):
        with pytest.raises(TypeError, match="fn must be a function, got int"):
            framework.form(3, **options)


def test_forward_mode_of_the_function_itself(framework):
    """In two engines that TensorFlow calls at the same time. PyTorch has one for all threads."""

    def f(x):
        y = x
        for _ in range(6):
            y = framework.jvp(lambda x: framework.np.sin(x) * x.sum() + x, (y,), (x,))[1]
        return y.sum()

    x = tf.constant(POINTS.reshape(8, 3))
    first, second = framework.form(f), framework.form(f)
    run = tf.function(lambda x: value_and_gradients(lambda x: first(x) + second(x), x))
    expected = value_and_gradients(first, x)
    for _ in range(10):
        for came, want in zip(tf.nest.flatten(run(x)), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(came, 2 * want, rtol=1e-12)
