"""What the tests of Equinox, jaxopt, Optimistix, Keras and TFP ask of custom derivatives.

Each test has the name of the case there: Equinox' tests/test_ad.py, jaxopt's
tests/implicit_diff_test.py, Optimistix' tests/test_ad.py, test_root_find.py and
test_fixed_point.py, and the tests of `custom_gradient` in Keras and TFP, as of August 2026.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import constant, derivative, gradient, gradients, pushed, with_jvp

close = np.testing.assert_allclose


class TestEquinox:
    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["", "jit"])
    def test_methods(self, wrap):
        class M:
            def __init__(self, increment):
                self.increment = increment

            @sgtrick.custom_vjp
            def method(self, x):
                return x + self.increment, lambda u: 2 * u

        close(gradient(wrap(M(5.0).method), constant(1.0)), 2)

    def test_closure_convert_custom_jvp(self):
        call = with_jvp(
            lambda f, primals, tangents: (call(f, *primals), sum(tangents)),
            lambda f, y, x1, x2: f(y, x1, x2),
            nondiff_argnums=0,
        )
        run = lambda x1, x2: call(lambda y, x1, x2: x1 * y + x2, constant(3.0), x1, x2)
        close(gradients(run, constant(2.0), constant(4.0)), [1, 1])

    def test_filter_custom_jvp_no_kwargs(self):
        call = with_jvp(lambda ps, ts: (ps[0](ps[1]), 3 * ts[1]), lambda f, x: f(x))
        f = lambda x: call(lambda a: a**2 + 1, x)
        close(f(constant(2.0)), 5)
        close(pushed(f, constant(2.0), constant(3.0)), 9)

    def test_filter_custom_jvp_kwargs(self):
        call = with_jvp(
            lambda ps, ts, *, fn: (fn(*ps), 3 * ts[0] + ts[1]), lambda x, y, *, fn: fn(x, y)
        )
        f = lambda x, y: call(x, y, fn=lambda a, b: a**2 + b)
        close(f(constant(2.0), constant(1.5)), 5.5)
        close(gradients(f, constant(2.0), constant(1.5)), [3, 1])

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["", "jit"])
    def test_filter_custom_jvp_exact(self, wrap):
        h = with_jvp(lambda ps, ts: (ps[1], ts[1]), lambda i, y: tf.identity(y))
        g = lambda y, i: tf.cond(tf.cast(i, y.dtype) < y, lambda: h(i, y), lambda: y)
        close(gradient(lambda y: wrap(g)(y, tf.constant(1)), constant(2.0)), 1)

    def test_filter_hessian_and_jacfwd_and_jacrev(self):
        def f(x, y):
            c, s = tf.cos(x), tf.sin(x)
            return tf.sin(x) * y, lambda u: (c * u * y, s * u)

        h, x, y = sgtrick.custom_vjp(f), constant(1.0), constant(2.0)
        close(derivative(derivative(h))(x, y), -np.sin(1) * 2)
        close(derivative(derivative(h, 0), 1)(x, y), np.cos(1))
        close(pushed(lambda x: gradient(lambda y: h(x, y), y), x, constant(1.0)), np.cos(1))

    def test_filter_custom_vjp_nondiff_args(self):
        """Equinox has no derivative by `y`, which the rule leaves out; here it is counted."""
        h = sgtrick.custom_vjp(lambda x, y: (x + y, lambda u: u))
        with pytest.raises(ValueError, match="returned 1 gradient, expected 2"):
            gradient(lambda x: h(x, x), constant(1.0))

    def test_filter_custom_vjp_defvjp(self):
        @sgtrick.custom_vjp
        def h(x):
            a, b = x
            return (a + 1, b + 2, b + 3), lambda u, v, w: ((u + v, w),)

        found = gradients(lambda a, b: h((a, b)), constant(1.0), constant(1.0))
        close(found, [2, 1])

    def test_filter_custom_vjp_nonarray_residual(self):
        def f(x):
            token = object()
            return 2 * x, lambda u: (token, 2 * u)[1]

        close(gradient(sgtrick.custom_vjp(f), constant(1.0)), 2)


RNG = np.random.default_rng(0)
A, B, LAM = constant(RNG.standard_normal((10, 3))), constant(RNG.standard_normal(10)), constant(0.5)


def ridge(lam, a, b):
    """The solution of ridge regression."""
    eye = tf.eye(a.shape[1], dtype=a.dtype)
    left = tf.linalg.matmul(a, a, transpose_a=True) + 10 * lam * eye
    return tf.linalg.solve(left, tf.linalg.matvec(a, b, transpose_a=True)[:, None])[:, 0]


def optimality(x, lam, a, b):
    """The gradient of the loss that `ridge` minimises."""
    residuals = tf.linalg.matvec(a, x) - b
    return tf.linalg.matvec(a, residuals, transpose_a=True) / 10 + lam * x


def ridge_root(lam, a=A, b=B):
    return sgtrick.implicit_root(optimality, tf.stop_gradient(ridge(lam, a, b)), lam, a, b)


class TestJaxopt:
    def test_root_vjp(self):
        for u in np.eye(3):
            close(gradient(ridge_root, LAM, u), gradient(lambda lam: ridge(lam, A, B), LAM, u))

    def test_root_jvp(self):
        found = pushed(ridge_root, LAM, constant(1.0))
        close(found, pushed(lambda lam: ridge(lam, A, B), LAM, constant(1.0)))

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["", "jit"])
    def test_custom_root(self, wrap):
        f = wrap(ridge_root)
        close(f(LAM, A, B), ridge(LAM, A, B))
        for g, e in zip(gradients(f, LAM, A, B), gradients(ridge, LAM, A, B), strict=True):
            close(g, e, rtol=1e-6)

    def test_custom_fixed_point(self):
        step = lambda x, lam: x - optimality(x, lam, A, B)
        f = lambda lam: sgtrick.implicit_root(
            lambda x, lam: step(x, lam) - x, tf.stop_gradient(ridge(lam, A, B)), lam
        )
        close(gradient(f, LAM), gradient(lambda lam: ridge(lam, A, B), LAM))

    def test_custom_root_with_kwargs_grad(self):
        f = lambda **kw: ridge_root(kw["lam"], a=kw["a"], b=kw["b"])[0]
        run = lambda lam: f(b=B, a=A, lam=lam)
        expected = gradient(lambda lam: ridge(lam, A, B)[0], LAM)
        close(gradient(run, LAM), expected)
        close(tf.function(derivative(run))(LAM), expected)


class TestOptimistix:
    def test_residual_nonarray_no_jit(self):
        f = lambda x: sgtrick.implicit_root(
            lambda r, x: r - (x - 2) ** 2, tf.stop_gradient((x - 2) ** 2), x
        )
        close(gradient(lambda x: f(x) + 5, constant(4.0)), 4)

    @pytest.mark.parametrize("solve", [None, lambda matvec, b: b / matvec(tf.ones_like(b))])
    def test_root_find_jvp(self, solve):
        """Newton's method, in a loop that nothing differentiates."""

        def newton(a):
            x = tf.ones_like(a)
            for _ in range(20):
                x = x - (x**3 - a) / (3 * x**2)
            return tf.stop_gradient(x)

        f = lambda a: sgtrick.implicit_root(lambda x, a: x**3 - a, newton(a), a, solve=solve)
        a = constant(8.0)
        close(pushed(f, a, a), 8 / 12)
        close(gradient(f, a), 1 / 12)
        close(derivative(derivative(f))(a), -2 / 9 * 8 ** (-5 / 3))

    @pytest.mark.long
    def test_fixed_point_jvp(self):
        """The fixed point of a layer, in a structure."""
        w = constant([[0.1, 0.3], [-0.2, 0.2]])

        def layer(x, w):
            return {
                "a": tf.tanh(tf.linalg.matvec(w, x["a"]) + x["b"]),
                "b": 0.5 * x["b"] + 0.1 * w[0, 0],
            }

        def solved(w, n):
            x = {"a": tf.zeros([2], tf.float64), "b": tf.zeros([], tf.float64)}
            for _ in range(n):
                x = layer(x, w)
            return x

        def root(w):
            star = tf.nest.map_structure(tf.stop_gradient, solved(w, 60))
            residual = lambda x, w: tf.nest.map_structure(tf.subtract, layer(x, w), x)
            return sgtrick.implicit_root(residual, star, w)

        total = lambda f: lambda w: tf.add_n(list(map(tf.reduce_sum, tf.nest.flatten(f(w)))))
        close(gradient(total(root), w), gradient(total(lambda w: solved(w, 60)), w), rtol=1e-7)
        close(pushed(total(root), w, w), pushed(total(lambda w: solved(w, 60)), w, w), rtol=1e-7)


class TestKeras:
    @pytest.mark.parametrize("use_variable", [False, True])
    def test_custom_gradient(self, use_variable):
        import keras

        import sgtrick.keras

        @sgtrick.keras.custom_vjp
        def log1pexp(x):
            e = keras.ops.exp(x)

            def grad(*args, upstream=None):
                if upstream is None:
                    (upstream,) = args
                return keras.ops.multiply(upstream, 1.0 - 1.0 / keras.ops.add(1, e))

            return keras.ops.log(1 + e), grad

        v = keras.Variable(5.0, trainable=False)
        f = (lambda x: log1pexp(v) + x) if use_variable else log1pexp
        if keras.backend.backend() != "tensorflow":
            pytest.skip("the tests of each backend are in keras_backends/")
        close(gradient(f, tf.constant(100.0)), 1)


class TestTFP:
    """Of `tfp.math.custom_gradient`; TFP's own tests run unchanged in tfp/."""

    def test_works_correctly(self):
        f = lambda x: sgtrick.custom_gradient(x**2 / 2 + x, 4 * x - 4, x)
        for x in (1.0, 2.0):
            close(gradient(f, tf.constant(x)), 4 * x - 4)

    def test_works_correctly_both_f_g_zero(self):
        x = tf.constant(0.0)
        close(gradient(lambda x: sgtrick.custom_gradient(x**2 / 2, 3 * x**2 / 3, x), x), 0)

    def test_works_correctly_vector_of_vars(self):
        x = tf.Variable(0.0)
        y = tf.Variable(1.0)
        with tf.GradientTape() as tape:
            z = sgtrick.custom_gradient(x * y, [3.0, [4.0, 5.0]], [x, tf.stack([y, y])])
        close(tape.gradient(z, [x, y]), [3, 9])

    def test_works_correctly_side_vars(self):
        x, y, z = map(constant, (2.1, 3.0, 1.0))

        def f(x, z):
            return z * x**2 - x

        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, z])
            fx = sgtrick.custom_gradient(f(x, z), f(x, z) * y, x)
        close(tape.gradient(fx, x), f(x, z) * y)
        assert tape.gradient(fx, z) is None

    def test_works_correctly_fx_gx_manually_stopped(self):
        x, y = constant(2.1), constant(3.0)

        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            s = tf.stop_gradient(x)
            fx = sgtrick.custom_gradient(s * y, s * y, x, fx_gx_manually_stopped=True)
        close(tape.gradient(fx, x), 6.3)
        close(tape.gradient(fx, y), 2.1)
