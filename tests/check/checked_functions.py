"""Functions, gradients and shorthands for the tests of `check_gradient`."""

import pytest
import tensorflow as tf

from sgtrick import check_gradient

MODES = pytest.mark.parametrize("mode", ["full", "random"])


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
