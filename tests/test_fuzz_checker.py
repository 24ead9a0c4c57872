"""Functions drawn at random: `check_gradient` says where the gradient is wrong, and nowhere else."""

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sgtrick
from fuzz.strategies import SETTINGS, check_checker, checks


@given(checks())
@settings(SETTINGS, max_examples=15, derandomize=True)
def test_verdicts(drawn):
    check_checker(drawn)


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=3),
    st.sampled_from(["complex64", "complex128"]),
    st.booleans(),
)
@settings(SETTINGS, max_examples=10, derandomize=True)
def test_complex_is_refused(point, dtype, of_value):
    x = tf.constant(point, tf.float64)
    if of_value:
        f = lambda x: tf.cast(x, dtype)  # noqa: E731
    else:
        f, x = tf.math.abs, tf.cast(x, dtype)
    with pytest.raises(TypeError, match=r"real and.* imaginary"):
        sgtrick.check_gradient(f, x)
