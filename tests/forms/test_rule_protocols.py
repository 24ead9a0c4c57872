"""The protocols of `custom_jvp` and `custom_vjp`, case by case as JAX documents its own.

Where the two differ on purpose, the test says so: the value is that of the function and not of the
rule, and what has no derivative has None in the place of JAX's float0.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import WRAPS, constant, derivative, forward_derivative, mapped

BOTH = pytest.mark.parametrize("derivative", [derivative, forward_derivative])


def gradients(f, *args):
    with tf.GradientTape() as tape:
        watched = [a for a in tf.nest.flatten(args) if tf.is_tensor(a) and a.dtype.is_floating]
        tape.watch(watched)
        y = f(*args)
    return tape.gradient(y, watched)


def jvp(f, primals, tangents):
    with tf.autodiff.ForwardAccumulator(primals, tangents) as accumulator:
        y = f(*primals)
    return tf.nest.map_structure(accumulator.jvp, y)


class TestJvp:
    @WRAPS
    @pytest.mark.parametrize("args", [(), (7,), (True, "text")], ids=["none", "int", "no number"])
    def test_nothing_to_differentiate(self, wrap, args):
        @sgtrick.custom_jvp
        def f(*args):
            return tf.constant(float(len(args)))

        @f.defjvp
        def _(primals, tangents):
            raise AssertionError("called")

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(*args) + x
            return tape.gradient(y, x)

        assert wrap(run)(tf.constant(1.0)).numpy() == 1

    @WRAPS
    def test_outputs_without_a_derivative(self, wrap):
        @sgtrick.custom_jvp
        def f(x):
            return tf.cast(tf.round(x), tf.int32), x**2

        @f.defjvp
        def _(primals, tangents):
            return None, (None, 7 * tangents[0])

        n, y = wrap(f)(constant(2.4))
        assert (n.dtype, int(n)) == (tf.int32, 2)
        assert wrap(derivative(lambda x: f(x)[1]))(constant(2.4)).numpy() == 7
        assert wrap(forward_derivative(lambda x: f(x)[1]))(constant(2.4)).numpy() == 7

    @WRAPS
    def test_tangents_that_are_zero(self, wrap):
        """A tangent that nobody gave is a zero, of the shape of its primal."""
        shapes = []

        @sgtrick.custom_jvp
        def f(x, y):
            return x + tf.reduce_sum(y)

        @f.defjvp
        def _(primals, tangents):
            dx, dy = tangents
            shapes.append((dx.shape.as_list(), dy.shape.as_list()))
            return None, 2 * dx + 3 * tf.reduce_sum(dy)

        y = constant([1.0, 2.0])
        (moved,) = [wrap(forward_derivative(lambda x: f(x, y)))(constant(1.0))]
        assert moved.numpy() == 2
        assert set(map(str, shapes)) == {"([], [2])"}

    @WRAPS
    @pytest.mark.parametrize("way", ["tape", "mapped", "forward"])
    def test_a_rule_without_one_of_the_tangents(self, wrap, way):
        @sgtrick.custom_jvp
        def f(x, y):
            return x * y

        f.defjvp(lambda primals, tangents: (None, primals[1] * tangents[0]))

        def run(x, y):
            if way == "forward":
                return jvp(f, [x, y], [tf.ones_like(x), tf.ones_like(y)])
            mapping = (
                f if way == "tape" else lambda x, y: tf.vectorized_map(lambda m: f(*m), (x, y))
            )
            by_x, by_y = gradients(mapping, x, y)
            return by_x if by_y is None else by_x + by_y  # zero, where it is not None

        came = wrap(run)(constant([2.0, 3.0]), constant([5.0, 7.0]))
        np.testing.assert_array_equal(came, [5, 7])

    @WRAPS
    @BOTH
    def test_a_rule_that_calls_f_on_primals_and_tangents(self, wrap, derivative):
        """Of a linear function: its derivative is itself."""

        @sgtrick.custom_jvp
        def double(x):
            return 2 * x

        @double.defjvp
        def _(primals, tangents):
            return double(primals[0]), double(tangents[0])

        x = constant([1.0, 2.0])
        np.testing.assert_array_equal(wrap(derivative(double))(x), [2, 2])
        np.testing.assert_array_equal(
            wrap(lambda x: tf.cond(x[0] > 0, lambda: derivative(double)(x), lambda: x))(x), [2, 2]
        )
        np.testing.assert_array_equal(wrap(derivative(mapped(double)))(x), [2, 2])


class TestVjp:
    @WRAPS
    def test_an_output_that_nobody_uses(self, wrap):
        """Its upstream gradient is zero, as in TensorFlow."""

        @sgtrick.custom_vjp
        def f(x):
            return (2 * x, 3 * x), lambda u, v: 10 * u + 100 * v

        run = wrap(lambda x: gradients(lambda x: f(x)[0], x)[0])
        np.testing.assert_array_equal(run(constant([1.0, 2.0])), [10, 10])

    @WRAPS
    def test_ints_and_arguments_without_gradient(self, wrap):
        @sgtrick.custom_vjp
        def f(x, n, y):
            return x * tf.cast(n, x.dtype) + y, lambda u: (5 * u, None, None)

        @wrap
        def run(x, y):
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                z = f(x, tf.constant(3), y)
            by_x, by_y = tape.gradient(z, [x, y])
            assert by_y is None
            return by_x

        assert run(constant(1.0), constant(2.0)).numpy() == 5

    @WRAPS
    def test_zero_upstream(self, wrap):
        """Exactly zero, also where the rule divides by nothing."""
        f = sgtrick.custom_vjp(lambda x: (tf.sqrt(x), lambda u: tf.math.divide_no_nan(u, x)))
        run = wrap(derivative(lambda x: 0 * f(x)))
        assert run(constant(0.0)).numpy() == 0
