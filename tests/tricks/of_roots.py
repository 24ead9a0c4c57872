"""Derivatives of roots, for the tests of `implicit_root`."""

import tensorflow as tf


def grad(h, xs, upstream=None):
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = h(xs)
    return tape.gradient(y, xs, upstream)


def hessians(h, x):
    """Gradient and Hessian of a scalar function of a vector."""
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        g = grad(h, x)
    return g, outer.jacobian(g, x, experimental_use_pfor=False)
