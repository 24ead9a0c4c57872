"""One model with values of three shapes, its derivatives by NumPy, and laws of these.

A value may be an array, `a sin(W x)` of a vector `x` and a number `a`; a structure, which has
`a |x|^2` beside that; or a number, the sum of the array.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from matrix import traced
from shared import Way, forward_derivative, mapped

RAISED = (RuntimeError, TypeError, ValueError, LookupError, tf.errors.OpError)
VECTORIZED = pytest.mark.parametrize("vectorized", [True, False], ids=["vectorized", "by member"])

RANDOM = np.random.default_rng(7)
W = RANDOM.normal(size=(3, 2))
X, A, U = RANDOM.normal(size=(4, 2)), RANDOM.normal(size=4), RANDOM.normal(size=(4, 3))
V, B = RANDOM.normal(size=(4, 2)), RANDOM.normal(size=4)  # along which the point moves


def true(x, a):
    return a[..., tf.newaxis] * tf.sin(tf.linalg.matvec(tf.constant(W), x))


def joint(f):
    """A distribution of the point and of observations of the array."""
    tfd = tfp.distributions

    @tfd.JointDistributionCoroutineAutoBatched
    def model():
        x = yield tfd.MultivariateNormalDiag(tf.zeros(2, tf.float64), name="x")
        a = yield tfd.Normal(tf.zeros([], tf.float64), 1.0, name="a")
        yield tfd.MultivariateNormalDiag(f(x, a), tf.ones(3, tf.float64), name="y")

    return model


def value(x, a):
    return np.asarray(a)[..., None] * np.sin(x @ W.T)


def jacobian(x, a):
    return np.asarray(a)[..., None, None] * np.cos(x @ W.T)[..., None] * W, np.sin(x @ W.T)


def vjp(x, a, u):
    by_x, by_a = jacobian(x, a)
    return np.einsum("...r,...rd->...d", u, by_x), np.sum(u * by_a, -1)


def jvp(x, a, t):
    by_x, by_a = jacobian(x, a)
    return np.einsum("...rd,...d->...r", by_x, t[0]) + np.asarray(t[1])[..., None] * by_a


def hessp(x, a, u, v):
    """Of the sum of `u * value`, times `v`."""
    phase, (v, w) = x @ W.T, v
    by_x = (
        -np.asarray(a)[..., None] * np.sin(phase) * (v @ W.T)
        + np.cos(phase) * np.asarray(w)[..., None]
    )
    return np.einsum("...r,...r,rd->...d", u, by_x, W), np.sum(u * np.cos(phase) * (v @ W.T), -1)


def true_pair(x, a):
    return {"curve": true(x, a), "size": a * tf.reduce_sum(x**2, -1)}


def pair(x, a):
    return {"curve": value(x, a), "size": a * np.sum(x**2, -1)}


def jacobian_of_pair(x, a):
    size = 2 * np.asarray(a)[..., None] * x, np.sum(x**2, -1)
    return {"curve": jacobian(x, a), "size": size}


def vjp_of_pair(x, a, u):
    size = jacobian_of_pair(x, a)["size"]
    by_x, by_a = vjp(x, a, u["curve"])
    return by_x + np.asarray(u["size"])[..., None] * size[0], by_a + u["size"] * size[1]


def jvp_of_pair(x, a, t):
    by_x, by_a = jacobian_of_pair(x, a)["size"]
    return {"curve": jvp(x, a, t), "size": np.sum(by_x * t[0], -1) + by_a * t[1]}


def hessp_of_pair(x, a, u, v):
    by_x, by_a = hessp(x, a, u["curve"], v)
    size = np.asarray(u["size"])
    return (
        by_x + 2 * (size * a)[..., None] * v[0] + 2 * (size * v[1])[..., None] * x,
        by_a + 2 * size * np.sum(x * v[0], -1),
    )


ONES = np.ones(3)


def total(x, a):
    return np.sum(value(x, a), -1)


def gradient_of_total(x, a):
    return vjp(x, a, ONES)


def vjp_of_total(x, a, u):
    return vjp(x, a, np.asarray(u)[..., None] * ONES)


def jvp_of_total(x, a, t):
    return np.sum(jvp(x, a, t), -1)


def hessp_of_total(x, a, v):
    return hessp(x, a, ONES, v)


class Model(NamedTuple):
    """A function by TensorFlow, and functions for `from_numpy`.

    Attributes:
        spread: Makes the value of a function an array `[..., 3]`, for which there is one upstream
            gradient.
    """

    true: Callable[..., Any]
    value: Callable[..., Any]
    jacobian: Callable[..., Any]
    vjp: Callable[..., Any]
    jvp: Callable[..., Any]
    hessp: Callable[..., Any]
    value_shape: Any
    spread: Callable[[Callable[..., Any]], Callable[..., Any]]

    def engine(self, given, vectorized=False, **options):
        """The function of tensors by derivatives that are given in one of these ways."""
        return sgtrick.from_numpy(
            **GIVEN[given](self),
            **{"event_ndims": (1, 0), "value_shape": self.value_shape, **options},
            vectorized=vectorized,
        )


GIVEN = {
    "with the value": lambda m: {"fn": lambda x, a: (m.value(x, a), m.jacobian(x, a))},
    "grad": lambda m: {"fn": m.value, "grad": m.jacobian},
    "products": lambda m: {"fn": m.value, "vjp": m.vjp, "jvp": m.jvp},
    "2-point": lambda m: {"fn": m.value, "grad": "2-point"},
    "3-point": lambda m: {"fn": m.value, "grad": "3-point"},
}


def added(f):
    """The sum of the parts of a structure."""

    def sum_of_parts(x, a):
        parts = f(x, a)
        return parts["curve"] + parts["size"][..., tf.newaxis]

    return sum_of_parts


def repeated(f):
    return lambda x, a: f(x, a)[..., tf.newaxis] * tf.constant([1.0, 2.0, -1.0], x.dtype)


MODELS = {
    "number": Model(
        lambda x, a: tf.reduce_sum(true(x, a), -1), total, gradient_of_total, vjp_of_total,
        jvp_of_total, hessp_of_total, (), repeated,
    ),
    "array": Model(true, value, jacobian, vjp, jvp, hessp, (3,), lambda f: f),
    "structure": Model(
        true_pair, pair, jacobian_of_pair, vjp_of_pair, jvp_of_pair, hessp_of_pair,
        {"curve": (None,), "size": ()}, added,
    ),
}  # fmt: skip


WAYS = {
    "eager": Way(),
    "in tf.function": Way(around=traced),
    "around tf.function": Way(inside=tf.function),
    "around vectorized_map": Way(inside=mapped),
}


def found_in(way, law, f):
    """What a law finds of a function in one of these ways."""
    return way(f, lambda f: lambda: law(f))()


# Laws of first order.


def gradients(f, args=(X, A), upstream=U):
    args = [tf.convert_to_tensor(arg) for arg in args]
    with tf.GradientTape() as tape:
        tape.watch(args)
        y = f(*args)
    return [y, *tape.gradient(y, args, upstream)]


def jacobians(f):
    x, a = tf.constant(X[0]), tf.constant(A[0])
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        y = f(x, a)
    return tape.jacobian(y, [x, a])


def by_forward_mode(f):
    return [forward_derivative(f, k)(tf.constant(X), tf.constant(A)) for k in (0, 1)]


def likelihood_gradient(f):
    """Of something around the engine, whose upstream gradient depends on the point."""
    return gradients(lambda x, a: -tf.reduce_sum((f(x, a) - U) ** 2, -1), upstream=None)


# Of second order: all derivatives of the gradients, or of the tangent, along `V` and `B`.


def pulled(f, x, a):
    return gradients(f, (x, a))[1:]


def reverse_over_reverse(f, pulled=pulled):
    x, a = tf.constant(X), tf.constant(A)
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        first = pulled(f, x, a)
    return tape.gradient(first, [x, a], [V, B])


def forward_over_reverse(f):
    x, a = tf.constant(X), tf.constant(A)
    with tf.autodiff.ForwardAccumulator([x, a], [tf.constant(V), tf.constant(B)]) as accumulator:
        first = pulled(f, x, a)
    return accumulator.jvp(first)


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

    def pulled(f, x, a):
        return gradients(lambda *args: -tf.reduce_sum((f(*args) - U) ** 2), (x, a), None)[1:]

    return reverse_over_reverse(f, pulled)
