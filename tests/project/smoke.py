"""What an installed sgtrick does at least: run by `.ci/package`, outside of the checkout.

python smoke.py [version]
"""

import importlib.resources
import pathlib
import sys

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick

package = importlib.resources.files("sgtrick")
assert "site-packages" in pathlib.Path(str(package)).parts, f"that is no installation: {package}"
assert package.joinpath("py.typed").is_file()
assert sys.argv[1:] in ([], [sgtrick.__version__]), (sys.argv[1:], sgtrick.__version__)
for name in sgtrick.__all__:
    getattr(sgtrick, name)


@sgtrick.from_numpy
def log_prob(x):
    return -0.5 * np.sum(x**2), -x


x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
value, gradient = tf.function(lambda x: tfp.math.value_and_gradient(log_prob, x))(x)
np.testing.assert_allclose(value, [-2.5, -12.5])
np.testing.assert_allclose(gradient, -x)


def slope(x):
    return 3 * x**2


cube = sgtrick.with_gradient(lambda x: x**3, slope)
with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as tangents:
    y = tf.vectorized_map(cube, x)
np.testing.assert_allclose(tangents.jvp(y), 3 * x**2)

sgtrick.check_gradient(cube, tf.constant([1.0, 2.0], tf.float64))  # raises where it is wrong
print(f"sgtrick {sgtrick.__version__} works in {package}")
