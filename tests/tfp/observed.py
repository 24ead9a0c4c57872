"""A likelihood of two observations in TensorFlow, and its posterior under a normal prior."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions

OBSERVED, SD = np.array([3.0, -1.0]), 0.5
POSTERIOR_VARIANCE = 1 / (1 + 1 / SD**2)
POSTERIOR_MEAN = OBSERVED / SD**2 * POSTERIOR_VARIANCE


def native(x):
    sd = tf.constant([SD, SD], x.dtype)
    return tfd.MultivariateNormalDiag(x, sd).log_prob(tf.constant(OBSERVED, x.dtype))


def value_and_gradient(f, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return y, tape.gradient(y, x)


def points(dtype, *shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=shape), dtype)
