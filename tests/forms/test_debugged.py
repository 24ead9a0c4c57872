"""TensorFlow's modes for debugging, and for code of TensorFlow 1."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from asinh_forms import EVERY_ORDER, OF_SLOPE, POINTS
from shared import WRAPS, derivative, forward_derivative

TESTS = Path(__file__).parents[1]
EXACT = (1 + POINTS**2) ** -0.5


@WRAPS
@pytest.mark.parametrize("name", OF_SLOPE)
def test_checked_numerics(name, wrap):
    """Nothing is NaN that is not asked for; and what was traced meanwhile serves later."""
    form, x = EVERY_ORDER[name], tf.constant(POINTS[:3])  # a shape of its own
    tf.debugging.enable_check_numerics()
    try:
        checked = [wrap(mode(form))(x) for mode in (derivative, forward_derivative)]
    finally:
        tf.debugging.disable_check_numerics()
    after = [wrap(mode(form))(x) for mode in (derivative, forward_derivative)]
    for found in (*checked, *after):
        np.testing.assert_allclose(found, EXACT[:3], rtol=1e-9)


SCRIPT = """
import tensorflow as tf
tf.compat.v1.{mode}()
if "{mode}" == "disable_v2_behavior":
    tf.compat.v1.enable_resource_variables()
import numpy as np
from asinh_forms import EVERY_ORDER, OF_SLOPE, POINTS
from shared import derivative, forward_derivative

x = tf.constant(POINTS)
run = tf.compat.v1.Session().run if not tf.executing_eagerly() else lambda t: t
for form in EVERY_ORDER.values():
    for mode in (derivative, forward_derivative)[: 2 if tf.executing_eagerly() else 1]:
        for wrap in (lambda f: f, tf.function)[: 2 if tf.executing_eagerly() else 1]:
            found = run(wrap(mode(form))(x))
            np.testing.assert_allclose(found, (1 + POINTS**2) ** -0.5, rtol=1e-9)
print("right")
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disable_v2_tensorshape", "disable_v2_behavior"])
def test_as_in_tensorflow_1(mode):
    """In a process of its own, since the mode is that of a process."""
    command = [sys.executable, "-c", SCRIPT.format(mode=mode)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=TESTS)
    assert ran.stdout.strip().endswith("right"), ran.stderr[-3000:]
