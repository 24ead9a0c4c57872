"""Rules in rules, as TensorFlow's documentation of `tf.custom_gradient` has them.

With `custom_vjp` in its place. The numbers are those of the documentation.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import tangent_form
from matrix import spread
from sgtrick import custom_vjp
from shared import WAYS, WRAPS_AND_XLA, derivative, forward_derivative, mapped_with_loops


class TestNesting:
    """`op(x)`, whose gradient function is decorated too."""

    @staticmethod
    @custom_vjp
    def op(x):
        y = tf.sin(x)

        @custom_vjp
        def grad_fn(dy):
            gdy = dy * tf.cos(x)

            def grad_grad_fn(ddy):  # Not the 2nd order gradient of op w.r.t. x.
                return 7 * ddy * tf.cos(x)

            return gdy, grad_grad_fn

        return y, grad_fn

    @WRAPS_AND_XLA
    def test_the_inner_rule_is_by_the_upstream_gradient(self, wrap):
        x = tf.constant([0.3, 1.2], tf.float64)

        def run(x, dy):
            with tf.GradientTape() as outer:
                outer.watch(dy)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = self.op(x)
                first = inner.gradient(y, x, dy)
            return first, outer.gradient(first, dy)

        first, by_dy = wrap(run)(x, 2 * tf.ones_like(x))
        np.testing.assert_allclose(first, 2 * np.cos(x), rtol=1e-12)
        np.testing.assert_allclose(by_dy, 7 * np.cos(x), rtol=1e-12)

    def test_there_is_no_second_derivative(self):
        with pytest.raises(LookupError, match="differentiated again"):
            derivative(derivative(self.op))(tf.constant(0.3))


def of_sine(first_order_gradient_of):
    return custom_vjp(lambda x: (tf.sin(x), first_order_gradient_of(x, tf.cos(x))))


@of_sine
def with_fused_backprop(x, x_grad):
    @custom_vjp
    def first_order_custom(unused_x):
        return x_grad, lambda ddy: 7 * ddy

    return lambda dy: dy * first_order_custom(x)


@of_sine
def with_transpose(x, x_grad):
    """The same, whose inner function has `dy` as an additional argument."""

    def first_order_gradient(dy):
        @custom_vjp
        def first_order_custom(unused_x, unused_dy):
            return dy * x_grad, lambda ddy: (7 * ddy * dy, ddy * x_grad)

        return first_order_custom(x, dy)

    return first_order_gradient


def slope(x):
    x_grad = tf.cos(x)
    return custom_vjp(lambda unused_x: (x_grad, lambda ddy: 7 * ddy))(x)


FUSED = {
    "with_fused_backprop": with_fused_backprop,
    "with_transpose": with_transpose,
    "with_gradient": sgtrick.with_gradient(lambda x: tf.sin(x), slope),
    "custom_jvp": tangent_form(lambda x: tf.sin(x), slope),
}


class TestFusedBackprop:
    """TensorFlow's way to a second derivative: the inner function closes over `x_grad`."""

    X = tf.constant([0.3, 1.2], tf.float64)

    @pytest.mark.parametrize(
        ("name", "way"),
        spread(
            FUSED,
            ["eager", "in tf.function", "in XLA", "around tf.function"],
            # TensorFlow has no x_grad there.
            valid=lambda *case: case != ("with_transpose", "around tf.function"),
        ),
    )
    def test_second_derivatives_are_those_of_the_inner_rule(self, name, way):
        """And of a loss, whose second derivative also goes through the upstream gradient."""
        twice = WAYS[way](FUSED[name], lambda f: derivative(derivative(lambda x: f(x) ** 3)))
        sin, cos = np.sin(self.X), np.cos(self.X)
        np.testing.assert_allclose(twice(self.X), 6 * sin * cos**2 + 3 * sin**2 * 7, rtol=1e-12)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("op", "wrap"),
        [(with_fused_backprop, tf.function), (with_transpose, lambda f: f)],
        ids=["with_fused_backprop", "with_transpose"],
    )
    def test_where_tensorflow_drops_it(self, op, wrap):
        ways = [
            derivative(tf.function(derivative(op))),
            forward_derivative(derivative(op)),
            mapped_with_loops(derivative(derivative(op))),
            derivative(mapped_with_loops(derivative(op))),
        ]
        if op is with_fused_backprop:  # the other's inner rule does not depend on its arguments
            ways.append(derivative(forward_derivative(op)))
        for twice in ways:
            np.testing.assert_array_equal(wrap(twice)(self.X), [7.0, 7.0])
