"""Peak memory of the value form, in temporaries of the size of `x`."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import tensorflow as tf
import sgtrick

n = 20_000_000

def run(fx, gx, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = sgtrick.custom_gradient(fx, gx, x)
    return tape.gradient(y, x)

if sys.argv[1] == "tf.function":
    run = tf.function(run)
run(tf.constant(1.0), tf.ones([2]), tf.ones([2]))
if sys.argv[1] == "tf.function":
    run = run.get_concrete_function(*(tf.TensorSpec(s) for s in ([], [n], [n])))
fx, gx, x = tf.constant(1.0), tf.ones([n]), tf.ones([n])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(fx, gx, x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (4 * n))
"""


# In a graph the formula needs z, gx * z and the gradient, in eager the gradient alone.
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize(("mode", "needed"), [("eager", 1), ("tf.function", 3)])
def test_at_most_one_temporary_more_than_needed(mode, needed):
    out = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, check=True)
    assert float(out.stdout) < needed + 1.2
