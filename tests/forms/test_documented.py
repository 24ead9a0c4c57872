"""The examples of TensorFlow's documentation of `tf.custom_gradient`, as they stand.

With `custom_vjp` in place of `tf.custom_gradient`. Both give the same numbers where the
documentation says what they are.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import WRAPS, WRAPS_AND_XLA, derivative, forward_derivative, mapped_with_loops

DECORATORS = {"sgtrick": sgtrick.custom_vjp, "tf": tf.custom_gradient}
decorators = pytest.mark.parametrize("custom_gradient", DECORATORS.values(), ids=DECORATORS)


@WRAPS_AND_XLA
@decorators
class TestTheFirstExample:
    def test_of_a_stable_gradient(self, custom_gradient, wrap):
        @custom_gradient
        def log1pexp(x):
            e = tf.exp(x)

            def grad(upstream):
                return upstream * (1 - 1 / (1 + e))

            return tf.math.log(1 + e), grad

        x = tf.constant(100.0)
        assert np.isnan(derivative(lambda x: tf.math.log(1 + tf.exp(x)))(x))
        assert wrap(derivative(log1pexp))(x) == 1.0
        assert derivative(wrap(log1pexp))(x) == 1.0


@WRAPS_AND_XLA
@decorators
def test_of_several_arguments(custom_gradient, wrap):
    @custom_gradient
    def bar(x, y):
        def grad(upstream):
            dz_dx = y
            dz_dy = x
            return upstream * dz_dx, upstream * dz_dy

        z = x * y
        return z, grad

    def run(x, y):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            tape.watch(y)
            z = bar(x, y)
        return z, tape.gradient(z, x), tape.gradient(z, y)

    assert wrap(run)(tf.constant(2.0), tf.constant(3.0)) == (6.0, 3.0, 2.0)


class TestNesting:
    """`op(x)`, whose gradient function is decorated too."""

    @staticmethod
    def op(custom_gradient):
        @custom_gradient
        def op(x):
            y = tf.sin(x)

            @custom_gradient
            def grad_fn(dy):
                gdy = dy * tf.cos(x)

                def grad_grad_fn(ddy):  # Not the 2nd order gradient of op w.r.t. x.
                    return 7 * ddy * tf.cos(x)

                return gdy, grad_grad_fn

            return y, grad_fn

        return op

    @WRAPS_AND_XLA
    @decorators
    def test_the_inner_rule_is_by_the_upstream_gradient(self, custom_gradient, wrap):
        op, x = self.op(custom_gradient), tf.constant([0.3, 1.2], tf.float64)

        def run(x, dy):
            with tf.GradientTape() as outer:
                outer.watch(dy)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = op(x)
                first = inner.gradient(y, x, dy)
            return first, outer.gradient(first, dy)

        first, by_dy = wrap(run)(x, 2 * tf.ones_like(x))
        np.testing.assert_allclose(first, 2 * np.cos(x), rtol=1e-12)
        np.testing.assert_allclose(by_dy, 7 * np.cos(x), rtol=1e-12)

    def test_there_is_no_second_derivative(self):
        with pytest.raises(LookupError, match="differentiated again"):
            derivative(derivative(self.op(sgtrick.custom_vjp)))(tf.constant(0.3))


def fused_op(x):
    return tf.sin(x), tf.cos(x)


def with_fused_backprop(custom_gradient, second_order_for_x):
    @custom_gradient
    def op_with_fused_backprop(x):
        y, x_grad = fused_op(x)

        def first_order_gradient(dy):
            @custom_gradient
            def first_order_custom(unused_x):
                def second_order_and_transpose(ddy):
                    return second_order_for_x(ddy, x)

                return x_grad, second_order_and_transpose

            return dy * first_order_custom(x)

        return y, first_order_gradient

    return op_with_fused_backprop


def with_transpose(custom_gradient, second_order_for_x):
    """The same, whose inner function has `dy` as an additional argument."""

    @custom_gradient
    def op_with_fused_backprop(x):
        y, x_grad = fused_op(x)

        def first_order_gradient(dy):
            @custom_gradient
            def first_order_custom(unused_x, unused_dy):
                def second_order_and_transpose(ddy):
                    return second_order_for_x(ddy, x) * dy, ddy * x_grad

                return dy * x_grad, second_order_and_transpose

            return first_order_custom(x, dy)

        return y, first_order_gradient

    return op_with_fused_backprop


def slope_with(second_order_for_x):
    def slope(x):
        x_grad = tf.cos(x)

        @sgtrick.custom_vjp
        def first_order_custom(unused_x):
            return x_grad, lambda ddy: second_order_for_x(ddy, x)

        return first_order_custom(x)

    return slope


def in_with_gradient(_, second_order_for_x):
    return sgtrick.with_gradient(lambda x: tf.sin(x), slope_with(second_order_for_x))


def in_custom_jvp(_, second_order_for_x):
    form, slope = sgtrick.custom_jvp(lambda x: tf.sin(x)), slope_with(second_order_for_x)
    form.defjvp(lambda primals, tangents: (None, tangents[0] * slope(primals[0])))
    return form


FUSED = [
    ("tf", with_fused_backprop),
    ("tf", with_transpose),
    ("sgtrick", with_fused_backprop),
    ("sgtrick", with_transpose),
    ("sgtrick", in_with_gradient),
    ("sgtrick", in_custom_jvp),
]


@WRAPS_AND_XLA
@pytest.mark.parametrize(("decorator", "fused"), FUSED)
class TestFusedBackprop:
    """TensorFlow's way to a second derivative: the inner function closes over `x_grad`."""

    @pytest.mark.long
    def test_second_derivatives_are_those_of_the_inner_rule(self, decorator, fused, wrap):
        op = fused(DECORATORS[decorator], lambda ddy, _: 7 * ddy)
        x = tf.constant([0.3, 1.2], tf.float64)
        np.testing.assert_allclose(wrap(derivative(op))(x), np.cos(x), rtol=1e-12)
        np.testing.assert_array_equal(wrap(derivative(derivative(op)))(x), [7.0, 7.0])
        np.testing.assert_array_equal(derivative(wrap(derivative(op)))(x), [7.0, 7.0])
        if fused is not with_transpose:  # TensorFlow has no x_grad there
            np.testing.assert_array_equal(derivative(derivative(wrap(op)))(x), [7.0, 7.0])

    def test_of_a_loss(self, decorator, fused, wrap):
        """Its second derivative also goes through the upstream gradient."""
        op = fused(DECORATORS[decorator], lambda ddy, x: -ddy * tf.sin(x))
        x = tf.constant([0.3, 1.2], tf.float64)
        expected = derivative(derivative(lambda x: tf.sin(x) ** 3))(x)
        found = wrap(derivative(derivative(lambda x: op(x) ** 3)))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.long
@WRAPS_AND_XLA
@pytest.mark.parametrize("fused", [with_fused_backprop, with_transpose])
def test_fused_backprop_where_tensorflow_drops_it(fused, wrap):
    op = fused(sgtrick.custom_vjp, lambda ddy, _: 7 * ddy)
    x = tf.constant([0.3, 1.2], tf.float64)

    np.testing.assert_array_equal(wrap(forward_derivative(derivative(op)))(x), [7.0, 7.0])
    if fused is with_fused_backprop:  # the other's inner rule does not depend on its arguments
        np.testing.assert_array_equal(wrap(derivative(forward_derivative(op)))(x), [7.0, 7.0])
    np.testing.assert_array_equal(
        wrap(mapped_with_loops(derivative(derivative(op))))(x), [7.0, 7.0]
    )
    np.testing.assert_array_equal(
        wrap(derivative(mapped_with_loops(derivative(op))))(x), [7.0, 7.0]
    )


@WRAPS_AND_XLA
@decorators
def test_of_variables(custom_gradient, wrap):
    weights = tf.Variable(tf.ones([2]))  # Trainable variable weights

    @custom_gradient
    def linear_poly(x):
        # Creating polynomial
        poly = weights[1] * x + weights[0]

        def grad_fn(dpoly, variables):
            # dy/dx = weights[1] and we need to left multiply dpoly
            grad_xs = dpoly * weights[1]  # Scalar gradient

            grad_vars = []  # To store gradients of passed variables
            assert variables is not None
            assert len(variables) == 1
            assert variables[0] is weights
            # Manually computing dy/dweights
            dy_dw = dpoly * tf.stack([x**1, x**0])
            grad_vars.append(tf.reduce_sum(tf.reshape(dy_dw, [2, -1]), axis=1))
            return grad_xs, grad_vars

        return poly, grad_fn

    def run(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            poly = linear_poly(x)
        by_weights = tf.convert_to_tensor(tape.gradient(poly, weights))
        return poly, tape.gradient(poly, x), by_weights

    found = wrap(run)(tf.constant([1.0, 2.0, 3.0]))
    for t, expected in zip(found, ([2.0, 3.0, 4.0], [1.0, 1.0, 1.0], [6.0, 3.0]), strict=True):
        np.testing.assert_array_equal(t, expected)


@WRAPS_AND_XLA
@decorators
def test_variables_are_none_where_none_is_read(custom_gradient, wrap):
    @custom_gradient
    def double(x):
        def grad_fn(*grad_ys, variables=None):
            assert variables is None
            return 2 * grad_ys[0]

        return 2 * x, grad_fn

    assert wrap(derivative(double))(tf.constant(0.5)) == 2.0


@WRAPS
@decorators
def test_of_an_operation_without_a_gradient(custom_gradient, wrap):
    @custom_gradient
    def test_func_with_stop_grad(x):
        @tf.function
        def _inner_func():
            # Avoid exception during the forward pass
            return tf.stop_gradient(tf.random.shuffle(x))

        res = _inner_func()

        def grad(upstream):
            return upstream  # Arbitrarily defined custom gradient

        return res, grad

    x = tf.constant([0.3, 0.5], dtype=tf.float32)
    np.testing.assert_array_equal(wrap(derivative(test_func_with_stop_grad))(x), [1.0, 1.0])
