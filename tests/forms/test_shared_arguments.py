"""Rules under `tf.vectorized_map` with arguments that are the same for all members.

TensorFlow maps no operation with such inputs alone. But what a rule returns may be another for each
member, and need not be linear in the upstream gradient.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread
from shared import EXECUTED, WRAPS, compiled, derivative

W = np.array([1.0, -2.0, 0.3])
MEMBERS = np.array([1.0, -2.0, 0.5, 3.0])


def added(x):
    return tf.reduce_sum(x)


def by_jvp(w, e):
    form = sgtrick.custom_jvp(added)
    form.defjvp(lambda p, t: (None, e * tf.reduce_sum(p[0] * t[0])))
    return form(w)


def normalized(w, e):
    return tf.reduce_sum(sgtrick.custom_vjp(lambda x: (x + 0.0, tf.math.l2_normalize))(w) * e)


# Functions of what is shared and of the member, and the derivative of one by the former.
FORMS = {
    "with_gradient": (
        lambda w, e: sgtrick.with_gradient(added, lambda x: x * e)(w),
        lambda e: W * e,
    ),
    "custom_vjp": (
        lambda w, e: sgtrick.custom_vjp(lambda x: (tf.reduce_sum(x), lambda u: u * x * e))(w),
        lambda e: W * e,
    ),
    "custom_vjp, not linear": (normalized, lambda e: np.sign(e) * np.ones(3) / np.sqrt(3)),
    "custom_jvp": (by_jvp, lambda e: W * e),
    "custom_gradient": (
        lambda w, e: sgtrick.custom_gradient(tf.reduce_sum(w), w * e, w, hx=lambda v: v * e),
        lambda e: W * e,
    ),
    "clip_gradient": (
        lambda w, e: tf.reduce_sum(sgtrick.clip_gradient(w, -1.0, 1.0) * e),
        lambda e: np.clip(e, -1, 1) * np.ones(3),
    ),
}
EXPECTED = {"atol": 1e-12, "rtol": 1e-12}


def total(f):
    return lambda w: tf.reduce_sum(tf.vectorized_map(lambda e: f(w, e), tf.constant(MEMBERS)))


RUNS = EXECUTED | {"XLA": compiled}


@pytest.mark.parametrize(
    ("name", "wrap", "make"), spread(FORMS, RUNS, [tf.constant, tf.Variable], together=1)
)
def test_derivatives_are_sums_over_members(name, wrap, make):
    (f, slope), w = FORMS[name], make(W)
    came = RUNS[wrap](lambda: derivative(total(f))(w))()
    np.testing.assert_allclose(came, sum(map(slope, MEMBERS)), **EXPECTED)


class Named(tf.Module):
    @tf.Module.with_name_scope
    def scaled(self, w, e, f):
        return f(w, e)


def in_scope(name, scope=tf.name_scope):
    def of(f):
        def scoped(w, e):
            with scope(name):
                return f(w, e)

        return scoped

    return of


SCOPES = {
    "absolute": in_scope("a/"),
    "none": in_scope("", tf.compat.v1.name_scope),
    "of a module": lambda f: lambda w, e: Named().scaled(w, e, f),
    "called like TensorFlow's": in_scope("loop_body"),
    "in a branch": lambda f: (
        lambda w, e: tf.cond(e < 9, lambda: in_scope("a/")(f)(w, e), lambda: e + w[0])
    ),
}


@WRAPS
@pytest.mark.parametrize(
    ("scope", "name"), spread(SCOPES, ["custom_vjp, not linear", "clip_gradient"])
)
def test_whatever_the_name_scope(scope, name, wrap):
    f, slope = FORMS[name]
    came = wrap(derivative(total(SCOPES[scope](f))))(tf.constant(W))
    np.testing.assert_allclose(came, sum(map(slope, MEMBERS)), **EXPECTED)


AROUND = {
    "map": lambda f: (
        lambda w, e: tf.reduce_sum(
            tf.vectorized_map(lambda k: k * f(w, e * k), tf.constant([1.0, 2.0], e.dtype))
        )
    ),
    "branch": lambda f: lambda w, e: 5 * tf.cond(w[0] > 0, lambda: f(w, e), lambda: e),
    "loop": lambda f: (
        lambda w, e: tf.while_loop(
            lambda i, _: i < 5, lambda i, y: (i + 1, y + f(w, e)), (0, tf.zeros([], e.dtype))
        )[1]
    ),
}


@pytest.mark.long
@WRAPS
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_within_what_is_mapped(around, wrap):
    f, slope = FORMS["with_gradient"]
    came = wrap(derivative(total(around(f))))(tf.constant(W))
    np.testing.assert_allclose(came, 5 * sum(map(slope, MEMBERS)), **EXPECTED)


def engine():
    return sgtrick.from_numpy(lambda x: (x @ x / 2, x))


def native():
    pytest.importorskip("jax")
    return sgtrick.from_jax(lambda x: x @ x / 2, native=True)


@WRAPS
@pytest.mark.parametrize("make", [engine, native])
def test_engines_are_called_once(make, wrap):
    """They say what they depend on: their gradients are linear, and the same for all members."""
    h = make()
    came = wrap(derivative(total(lambda w, e: h(w) * e)))(tf.constant(W))
    np.testing.assert_allclose(came, W * MEMBERS.sum(), **EXPECTED)
    assert make is native or h.calls == 1
