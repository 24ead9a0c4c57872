"""Models whose values are arrays, with their derivatives, and the same models in TensorFlow.

The array is `a sin(W x)` of a vector `x` and a number `a`. The structure has `a |x|^2` beside it.
"""

import numpy as np
import tensorflow as tf

import sgtrick
from shared import forward_derivative

RANDOM = np.random.default_rng(7)
W = RANDOM.normal(size=(3, 2))
X, A, U = RANDOM.normal(size=(4, 2)), RANDOM.normal(size=4), RANDOM.normal(size=(4, 3))


def true(x, a):
    return a[..., tf.newaxis] * tf.sin(tf.linalg.matvec(tf.constant(W), x))


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


OPTIONS = {"value_shape": (3,), "event_ndims": (1, 0)}


def engines(**options):
    """One for each way to give the derivatives."""
    options = OPTIONS | options
    return {
        "with the value": sgtrick.from_numpy(
            lambda x, a: (value(x, a), jacobian(x, a)), name="value", **options
        ),
        "grad": sgtrick.from_numpy(value, grad=jacobian, **options),
        "products": sgtrick.from_numpy(value, vjp=vjp, jvp=jvp, **options),
    }


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


def engines_of_pair(**options):
    """The same for a value that is a structure."""
    options = OPTIONS | {"value_shape": {"curve": (None,), "size": ()}} | options
    return {
        "structure, with the value": sgtrick.from_numpy(
            lambda x, a: (pair(x, a), jacobian_of_pair(x, a)), **options
        ),
        "structure, products": sgtrick.from_numpy(
            pair, vjp=vjp_of_pair, jvp=jvp_of_pair, **options
        ),
    }


def added(f):
    """The sum of the parts of such a value."""

    def sum_of_parts(x, a):
        parts = f(x, a)
        return parts["curve"] + parts["size"][..., tf.newaxis]

    return sum_of_parts


def mapped(f):
    return lambda *args: tf.vectorized_map(lambda args: f(*args), args)


def gradients(f, args=(X, A), upstream=U):
    args = [tf.convert_to_tensor(arg) for arg in args]

    def run(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return [y, *tape.gradient(y, args, upstream)]

    return run(*args)


def by_forward_mode(f):
    return [forward_derivative(f, k)(tf.constant(X), tf.constant(A)) for k in (0, 1)]
