"""Functions drawn at random: `check_gradient` says where the gradient is wrong, and nowhere else."""

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sgtrick
from fuzz.checks import Check
from fuzz.strategies import SETTINGS, check_checker, checks


@given(checks())
@settings(SETTINGS, max_examples=15, derandomize=True)
def test_verdicts(drawn):
    check_checker(drawn)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_kink_in_a_function_that_is_rough_at_larger_steps(dtype):
    """It was seen at too large a step, where it is small beside all else."""
    terms = (("cubic", 5.0, 1.0), ("bell", 1.0, -0.4))
    check_checker(Check((-0.3, -1.5, 1.8), terms, size_x=1e-3, size_y=1e-5, dtype=dtype, kink=1))


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
