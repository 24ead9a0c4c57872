"""Functions drawn at random: `check_gradient` says where the gradient is wrong, and nowhere else."""

import pytest
from hypothesis import given, settings

from fuzz.checks import Check
from fuzz.drawing import SETTINGS
from fuzz.strategies import check_checker, checks


@pytest.mark.long
@given(checks())
@settings(SETTINGS, max_examples=15, derandomize=True)
def test_verdicts(drawn):
    check_checker(drawn)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_kink_in_a_function_that_is_rough_at_larger_steps(dtype):
    """It was seen at too large a step, where it is small beside all else."""
    terms = (("cubic", 5.0, 1.0), ("bell", 1.0, -0.4))
    check_checker(Check((-0.3, -1.5, 1.8), terms, size_x=1e-3, size_y=1e-5, dtype=dtype, kink=1))


SATURATED = [
    # Rounded to something else in float32, where 1 - tanh(x)^2 cancels.
    Check((2.0,), (("tanh", 5.0, 1.0),), size_y=1e3, dtype="float32"),
    Check((-1.4,), (("tanh", 5.0, 1.0),), dtype="float32", order=2),
    Check((1.8,), (("softplus", 5.0, -0.4),), size_x=1e-3, dtype="float32", order=2),
    Check((-1.6,), (("tanh", 5.0, -0.4),), size_x=1e4, dtype="float32", mode="random"),
    # Visible only between steps at which it is flat and steps at which it is noise.
    Check((-0.8, -0.3), (("bell", 5.0, -0.4),), "number", 1, 1e-3, 1e3, 1e3, "narrow"),
    Check((1.4, 0.8), (("tanh", 5.0, -0.4),), "number", 2, 1e-3, 1e-5, 0.0, "narrow",
          mode="random", order=2),
    # Of float64, but computed in float32.
    Check((0.0, 0.6, 1.0), (("sin", 1.0, -0.4),), "number", 1, 1e4, 1.0, 1e3, "narrow", order=2),
    # Second derivatives too small for a normal number, which TensorFlow takes for zero.
    Check((-1.2, -1.4, -1.4), (("bell", 5.0, -0.8),), size_x=1e4, dtype="narrow", order=2),
    # Off by 0.1 % in float32, whoever differentiates.
    Check((1.2,), (("softplus", 0.3, 1.0), ("tanh", 5.0, 1.0)), "entries", 1, 1e4, 1e3, 1e3,
          "narrow", mode="random", order=2),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("drawn", SATURATED, ids=range(len(SATURATED)))
def test_rounding_is_not_wrong(drawn):
    check_checker(drawn)
