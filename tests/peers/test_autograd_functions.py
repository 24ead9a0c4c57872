"""What PyTorch's tests of `torch.autograd.Function` ask, asked of `custom_vjp` with `defjvp`.

Each test has the name of the case in PyTorch's test/test_autograd.py or
test/functorch/test_eager_transforms.py, as of 2.9.
"""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import constant, derivative, gradient, gradients, mapped, pushed

close = np.testing.assert_allclose
X = constant([1.0, 2.0])


def with_both(pull, push, f=lambda x: x):
    h = sgtrick.custom_vjp(lambda *xs: (f(*xs), lambda *us: pull(*xs, *us)))
    h.defjvp(push)
    return h


class TestAutograd:
    def test_function(self):
        h = sgtrick.custom_vjp(lambda a, b, c: (a + c * b * 2, lambda u: (u + 3 * b, u * a, None)))
        a, b = constant([1.0, 2.0]), constant([3.0, 4.0])
        close(gradients(lambda a, b: h(a, b, 2.0), a, b), [1 + 3 * b, a])
        second = derivative(lambda b: gradient(lambda a: h(a, b, 2.0), a))
        close(second(b), [3, 3])

    @pytest.mark.parametrize("shape", [(1,), ()])
    def test_function_returns_input(self, shape):
        h, x = sgtrick.custom_vjp(lambda x: (x, lambda u: 2 * u)), tf.ones(shape)
        close(gradient(h, x), np.full(shape, 2))
        close(gradient(lambda x: h(tf.identity(x)), x), np.full(shape, 2))

    def test_function_returns_undefined_tensor(self):
        h = sgtrick.custom_vjp(lambda x: (2 * x, lambda u: None))
        for f in (h, lambda x: h(x**2), lambda x: tf.reduce_sum(h(x))):
            assert gradient(f, X) is None

    def test_materialize_grads(self):
        h = sgtrick.custom_vjp(lambda x: ((x, 2 * x), lambda u, v: u + 3 * v))
        close(gradient(lambda x: h(x)[0], X), [1, 1])
        close(gradient(lambda x: h(x)[1], X), [3, 3])

    def test_mark_non_differentiable(self):
        h = sgtrick.custom_vjp(lambda x: ((x > 1, x * 2), lambda _, u: 2 * u))
        assert list(h(X)[0].numpy()) == [False, True]
        close(gradient(lambda x: h(x)[1], X), [2, 2])

    def test_custom_function_exception(self):
        def fail(u):
            raise RuntimeError("on the way back")

        with pytest.raises(RuntimeError, match="on the way back"):
            gradient(sgtrick.custom_vjp(lambda x: (x + 0, fail)), X)

    def test_custom_function_non_tensor_inputs_outputs(self):
        @sgtrick.custom_vjp
        def h(t1, t2, scale, t3):
            def pull(u1, _, u2, u3):
                return (u1 + u2 * t2) * scale + u3, (u1 * t3 + u2 * t1) * scale, None, u2 * scale

            return (scale * (t1 + t2 * t3), None, scale * (t1 * t2 + t3), t1), pull

        t1, t2, t3 = X, constant([3.0, 4.0]), constant([5.0, 6.0])
        assert h(t1, t2, 7, t3)[1] is None
        found = gradients(lambda t1, t2: [h(t1, t2, 7, t3)[i] for i in (0, 2, 3)], t1, t2)
        close(found, [7 * (1 + t2) + 1, 7 * (t3 + t1)])

    def test_custom_function_no_tensors(self):
        h = sgtrick.custom_vjp(lambda a, b: ((a + b, a * b), lambda u, v: (u + b * v, u + a * v)))
        close(h(2.0, 3.0), [5, 6])

    def test_invalid_gradients(self):
        h = sgtrick.custom_vjp(lambda x: (2 * x, lambda u: tf.zeros([10], tf.float64)))
        with pytest.raises(ValueError, match=r"shape \[10\] for x, expected \[2\]"):
            gradient(h, X)

    def test_unrelated_inputs(self):
        h = sgtrick.custom_vjp(lambda x, y: (x * x, lambda u: (2 * x * u, None)))
        sgtrick.check_gradient(lambda x: h(x, constant([3.0, 4.0])), X, order=2)

    def test_custom_function_setup_context_simple(self):
        close(gradient(sgtrick.custom_vjp(lambda x: (x**2, lambda u: u * 2 * x)), X), 2 * X)

    def test_custom_function_setup_context_multi_output(self):
        h = sgtrick.custom_vjp(lambda x: ((x**2, 2 * x), lambda u, v: u * 2 * x))
        close(gradient(lambda x: h(x)[0], X), 2 * X)

    def test_custom_function_setup_context_multi_input(self):
        @sgtrick.custom_vjp
        def h(x, shape, forward, backward):
            back = x.shape
            return tf.reshape(x, shape) * forward, lambda u: (
                *(tf.reshape(u, back) * backward,),
                *(None, None, None),
            )

        x = tf.ones([24])
        close(gradient(lambda x: h(x, tf.constant([3, 8]), 7, 11.0), x), np.full([24], 11))

    def test_custom_function_forward_mode_wrong_formula(self):
        h = with_both(lambda x, u: 2 * u, lambda xs, ts: (xs[0], ts[0] + 3), lambda x: 2 * x)
        close(pushed(h, X, tf.ones_like(X)), [4, 4])  # the JVP rule is taken at its word
        with pytest.raises(sgtrick.GradientCheckError):
            sgtrick.check_gradient(h, X)

    def test_custom_function_forward_mode_non_differentiable(self):
        h = with_both(
            lambda x, _, u: u,
            lambda xs, ts: ((xs[0] > 1, xs[0]), (None, ts[0])),
            lambda x: (x > 1, x),
        )
        close(pushed(lambda x: h(x)[1], X, X), X)

    def test_custom_function_forward_mode_forward_is_no_op(self):
        h = with_both(lambda x, u: u, lambda xs, ts: (xs[0], 2 * ts[0]))
        close(pushed(h, X, tf.ones_like(X)), [2, 2])

    def test_custom_function_save_for_forward(self):
        h = with_both(
            lambda x, y, u: (2 * x * u, u),
            lambda xs, ts: (xs[0] ** 2 + xs[1], 2 * xs[0] * ts[0] + ts[1]),
            lambda x, y: x**2 + y,
        )
        y = constant([3.0, 4.0])
        close(pushed(lambda x: h(x, y), X, tf.ones_like(X)), 2 * X)
        close(gradient(lambda x: h(x, y), X), 2 * X)

    def test_custom_function_cycle(self):
        class Result:
            def __init__(self, x):
                self.y = sgtrick.custom_vjp(lambda x: (x * 2, lambda u: (self, 2 * u)[1]))(x)

        with tf.GradientTape() as tape:
            tape.watch(X)
            result = Result(X)
        gone = weakref.ref(result)
        del result, tape
        gc.collect()
        assert gone() is None

    def test_custom_function_error(self):
        with pytest.raises(TypeError, match="grad_fn"):
            sgtrick.custom_vjp(lambda x: x)(X)
        only_pull = sgtrick.custom_vjp(lambda x: (x + 0, lambda u: u))
        close(pushed(only_pull, X, X), X)  # transposed: no error, as in PyTorch

    def test_custom_function_return_view_in_nograd(self):
        h = sgtrick.custom_vjp(lambda x: (tf.identity(x), lambda u: 2 * u))
        close(gradient(lambda x: h(x) + tf.stop_gradient(h(x)), X), [2, 2])

    def test_naughty_autograd_function_stashing_ctx(self):
        saved = []

        def f(x):
            saved.append(x)
            return x**2, lambda u: 2 * saved.pop() * u

        close(gradient(sgtrick.custom_vjp(f), X), 2 * X)

    def test_too_many_grads(self):
        h = sgtrick.custom_vjp(lambda x: (x + 0, lambda u: (u, None, None)))
        with pytest.raises(ValueError, match="returned 3 gradients, expected 1"):
            gradient(h, X)

    def test_return_duplicate(self):
        h = sgtrick.custom_vjp(lambda x: ((x * 2,) * 2, lambda u, v: 2 * u + 5 * v))
        close(gradient(lambda x: h(x)[0] + h(x)[1], X), [7, 7])

    def test_return_leaf(self):
        h = sgtrick.custom_vjp(lambda a, b: ((a, a + b), lambda u, v: (u + v, v)))
        a, b = X, constant([3.0, 4.0])
        close(gradients(lambda a, b: h(a, b), a, b), [[2, 2], [1, 1]])

    def test_save_none_for_backward(self):
        h = sgtrick.custom_vjp(lambda x: (x * x, lambda u, nothing=None: 2 * x * u))
        close(gradient(h, X), 2 * X)

    def test_dep_nograd(self):
        f1 = sgtrick.custom_vjp(lambda x: ((tf.ones([10]), x), lambda _, u: u))
        f2 = sgtrick.custom_vjp(lambda x, ignored: (tf.identity(x), lambda u: (u, None)))

        def f(x):
            ignored, y = f1(x)
            return f2(y, ignored)

        close(gradient(f, X), [1, 1])

    def test_reentrant_with_callbacks(self):
        inner = sgtrick.custom_vjp(lambda x: (x**2, lambda u: u * gradient(lambda x: x**2, x)))
        outer = sgtrick.custom_vjp(lambda x: (inner(x), lambda u: u * gradient(inner, x)))
        close(gradient(outer, X), 2 * X)
        close(derivative(derivative(outer))(X), [2, 2])


class TestAutogradFunction:
    """Of functorch: composed with `grad`, `jvp` and `vmap`."""

    def test_set_materialize_grads(self):
        h = sgtrick.custom_vjp(lambda x, y: ((x + 0, y + 0), lambda u, v: (u, v)))
        close(gradient(lambda y: h(X, y)[0] ** 2, constant([3.0, 4.0])), [0, 0])

    def test_needs_input_grads(self):
        h = sgtrick.custom_vjp(lambda x, y: (x * y, lambda u: (None, None)))
        assert gradient(lambda x: h(x, X), X) is None

    def test_once_differentiable_autograd_vjp(self):
        def f(x):
            y = tf.numpy_function(lambda x: x**3, [x], tf.float64)
            slope = lambda u: tf.numpy_function(lambda x, u: 3 * x**2 * u, [x, u], tf.float64)
            return tf.ensure_shape(y, x.shape), slope

        h = sgtrick.custom_vjp(f)
        close(gradient(h, X), 3 * X**2)
        with pytest.raises(LookupError, match="differentiated again"):
            derivative(derivative(h))(X)

    def test_function_returns_input(self):
        h = with_both(lambda x, u: u, lambda xs, ts: (xs[0], ts[0]))
        f = lambda x: h(tf.identity(x))
        close(gradient(f, X), [1, 1])
        close(pushed(f, X, X), X)


class TestAutogradFunctionVmapAPI:
    """Functions are mapped without a rule: what a rule of `vmap` is for comes by itself."""

    def test_no_vmap_staticmethod_and_no_generate_vmap_rule(self):
        h = sgtrick.custom_vjp(lambda x: (x**3, lambda u: 3 * x**2 * u))
        close(mapped(h)(X), X**3)
        close(gradient(mapped(h), X), 3 * X**2)

    def test_in_dims_multiple_inputs(self):
        h = sgtrick.custom_vjp(lambda x, ys: ((x + 0, ys[0] + 0), lambda u, v: (u, [v, None])))
        found = mapped(lambda x: h(x, [x, x]))(X)
        close(found, [X, X])

    def test_skips_empty_layer(self):
        h = sgtrick.custom_vjp(lambda x: (x + 0, lambda u: u))
        close(mapped(lambda x: (h(constant(1.0)), x)[1])(X), X)

    def test_none_returns(self):
        h = sgtrick.custom_vjp(lambda x: ((tf.zeros_like(x), tf.zeros_like(x)), lambda u, v: u))
        close(mapped(h)(X), [[0, 0], [0, 0]])

    def test_kwarg_only_tensors(self):
        h = sgtrick.custom_vjp(lambda x, *, y: (x + y, lambda u: (u, 2 * u)))
        close(mapped(lambda x: h(x, y=x))(X), 2 * X)
        close(gradient(lambda x: mapped(lambda x: h(x, y=x))(x), X), [3, 3])
