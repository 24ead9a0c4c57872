"""Functions, gradients and shorthands for the tests of `check_gradient`."""

import pytest
import tensorflow as tf

import sgtrick
from sgtrick import check_gradient

MODES = pytest.mark.parametrize("mode", ["full", "random"])


@sgtrick.custom_jvp
def by_jvp(x):
    return tf.sin(x)


@by_jvp.defjvp
def _(primals, tangents):
    return tf.sin(*primals), tf.cos(*primals) * tangents[0]


def report(f, x, **options):
    return check_gradient(f, x, raise_exception=False, **options)


def density(x):  # [..., 3] -> [...]
    return -tf.reduce_sum(x**4, -1) / 4 + tf.sin(x[..., 0] * x[..., 1])


@tf.function(autograph=False)
def density_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = density(x)
    return tape.gradient(y, x)
