"""The protocols of `custom_jvp` and `custom_vjp`, case by case as JAX documents its own.

Where the two differ on purpose, the test says so: the value is that of the function and not of the
rule, and what has no derivative has None in the place of JAX's float0.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from forms import POINTS, derivative, exact, forward_derivative, hidden, mapped, slope

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
BOTH = pytest.mark.parametrize("derivative", [derivative, forward_derivative])


def constant(value):
    return tf.constant(value, tf.float64)


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
    @BOTH
    def test_the_rule_decides(self, wrap, derivative):
        form = sgtrick.custom_jvp(lambda x: tf.sin(x))
        form.defjvp(lambda primals, tangents: (tf.sin(primals[0]), 2 * tangents[0]))
        x = constant([0.3, 0.5])
        np.testing.assert_array_equal(wrap(form)(x), tf.sin(x))
        np.testing.assert_array_equal(wrap(derivative(form))(x), [2, 2])

    def test_the_value_is_that_of_f(self):
        """In JAX the primal output of the rule takes its place."""
        form = sgtrick.custom_jvp(lambda x: x + 1)
        form.defjvp(lambda primals, tangents: (primals[0] + 100, tangents[0]))
        with tf.autodiff.ForwardAccumulator(constant(1.0), constant(1.0)):
            assert form(constant(1.0)).numpy() == 2

    @WRAPS
    def test_structures(self, wrap):
        @sgtrick.custom_jvp
        def f(x, deep):
            return {"a": x * deep[0]["b"], "c": (x**2,)}

        @f.defjvp
        def _(primals, tangents):
            (x, [deep]), (dx, [moved]) = primals, tangents
            return f(x, [deep]), {"a": 3 * (dx * deep["b"] + x * moved["b"]), "c": (5 * x * dx,)}

        @wrap
        def run(x, b):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([x, b])
                y = f(x, [{"b": b}])
            return (
                y, tape.gradient(y["a"], [x, b]), tape.gradient(y["c"][0], x),
                jvp(lambda x, b: f(x, [{"b": b}]), [x, b], [constant(1.0), constant(10.0)]),
            )  # fmt: skip

        y, by_a, by_c, moved = run(constant(2.0), constant(7.0))
        assert tf.nest.map_structure(float, y) == {"a": 14, "c": (4,)}
        assert [g.numpy() for g in by_a] == [21, 6]
        assert by_c.numpy() == 10
        assert tf.nest.map_structure(float, moved) == {"a": 3 * 27, "c": (10,)}

    @WRAPS
    def test_functions_among_the_arguments(self, wrap):
        """As nondiff_argnums: the rule gets them first, whatever their place."""

        @functools.partial(sgtrick.custom_jvp, nondiff_argnums=(0, 2))
        def apply(f, x, n):
            return tf.stop_gradient(f(x)) * n

        @apply.defjvp
        def _(f, n, primals, tangents):
            return None, 4 * n * f(primals[0]) * tangents[0]

        run = wrap(lambda x: apply(tf.exp, x, 3))
        x = constant([0.0, 1.0])
        np.testing.assert_allclose(run(x), 3 * np.exp(x))
        np.testing.assert_allclose(wrap(derivative(run))(x), 12 * np.exp(x))
        np.testing.assert_allclose(wrap(forward_derivative(run))(x), 12 * np.exp(x))

    @WRAPS
    def test_ints_have_no_tangent(self, wrap):
        seen = []

        @sgtrick.custom_jvp
        def power(x, n):
            return x ** tf.cast(n, x.dtype)

        @power.defjvp
        def _(primals, tangents):
            (x, n), (t, tn) = primals, tangents
            seen.append(tn)
            n = tf.cast(n, x.dtype)
            return None, n * x ** (n - 1) * t

        f = wrap(lambda x: power(x, tf.constant(3)))
        assert gradients(f, constant(2.0))[0].numpy() == 12
        assert forward_derivative(f)(constant(2.0)).numpy() == 12
        assert seen
        assert set(seen) == {None}

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
    def test_closed_over_tensors(self, wrap, derivative):
        def outer(c):
            f = sgtrick.custom_jvp(lambda x: tf.stop_gradient(x) * tf.stop_gradient(c))
            f.defjvp(lambda primals, tangents: (None, tangents[0] * c))
            return f(constant(3.0)), lambda x: f(x)

        @wrap
        def run(c):
            return derivative(outer(c)[1])(constant(1.0))

        assert run(constant(5.0)).numpy() == 5

    @WRAPS
    def test_the_second_derivative_by_what_the_rule_closes_over(self, wrap):
        @wrap
        def run(x, c):
            f = sgtrick.custom_jvp(lambda x: x * tf.stop_gradient(c))
            f.defjvp(lambda primals, tangents: (None, tangents[0] * c**2))
            with tf.GradientTape() as tape:
                tape.watch(c)
                first = derivative(f)(x)
            return first, tape.gradient(first, c)

        assert [t.numpy() for t in run(constant(2.0), constant(3.0))] == [9, 6]

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

    @pytest.mark.autograph
    def test_in_an_if_of_autograph(self):
        @sgtrick.custom_jvp
        def double(x):
            if x > 0:
                return 2 * x
            return 3 * x

        @double.defjvp
        def _(primals, tangents):
            x, t = primals[0], tangents[0]
            if x > 0:
                moved = 2 * t
            else:
                moved = 3 * t
            return double(x), moved

        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = double(x) if x < 10 else x
            return y, tape.gradient(y, x)

        assert [t.numpy() for t in run(constant(5.0))] == [10, 2]
        assert [t.numpy() for t in run(constant(-5.0))] == [-15, 3]
        assert [t.numpy() for t in run(constant(50.0))] == [50, 1]

    @WRAPS
    @BOTH
    def test_nested(self, wrap, derivative):
        """A rule in a rule: each is asked for its own derivative."""
        inner = sgtrick.custom_jvp(lambda x: tf.stop_gradient(tf.sin(x)))
        inner.defjvp(lambda primals, tangents: (None, 10 * tf.cos(primals[0]) * tangents[0]))
        outer = sgtrick.custom_jvp(lambda x: inner(x) ** 2)
        outer.defjvp(lambda primals, tangents: (None, 3 * inner(primals[0]) * tangents[0]))
        x = constant([0.3, 0.7])
        np.testing.assert_allclose(wrap(derivative(outer))(x), 3 * np.sin(x))
        np.testing.assert_allclose(wrap(derivative(derivative(outer)))(x), 30 * np.cos(x))

    @WRAPS
    def test_partial_with_keywords(self, wrap):
        @sgtrick.custom_jvp
        def f(x, scale, power=constant(2.0)):  # noqa: B008
            return scale * tf.stop_gradient(x) ** power

        @f.defjvp
        def _(primals, tangents):
            (x, scale, power), (t, *_) = primals, tangents
            return None, scale * power * x ** (power - 1) * t

        for form in (
            functools.partial(f, scale=constant(5.0)),
            lambda x: f(scale=constant(5.0), x=x),
        ):
            assert wrap(derivative(form))(constant(3.0)).numpy() == 30
        form = functools.partial(f, scale=constant(5.0), power=constant(3.0))
        assert wrap(derivative(form))(constant(3.0)).numpy() == 135

    @WRAPS
    def test_of_a_partial(self, wrap):
        form = sgtrick.custom_jvp(functools.partial(lambda scale, x: scale * x, constant(2.0)))
        form.defjvp(lambda primals, tangents: (None, 7 * tangents[0]))
        assert wrap(form)(constant(3.0)).numpy() == 6
        assert wrap(derivative(form))(constant(3.0)).numpy() == 7

    @WRAPS
    def test_the_rule_is_not_called_for_others(self, wrap):
        @sgtrick.custom_jvp
        def f(x):
            return 2 * x

        @f.defjvp
        def _(primals, tangents):
            raise AssertionError("called")

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                f(x)
                y = x**2
            return tape.gradient(y, x), f(x)

        assert [t.numpy() for t in wrap(run)(constant(3.0))] == [6, 6]

    @WRAPS
    @BOTH
    def test_loops(self, wrap, derivative):
        form = sgtrick.custom_jvp(lambda x: tf.stop_gradient(1.5 * x))
        form.defjvp(lambda primals, tangents: (None, 2 * tangents[0]))

        def looped(x):
            return tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, form(y)), (0, x), maximum_iterations=3
            )[1]

        np.testing.assert_array_equal(wrap(derivative(looped))(constant([1.0, 2.0])), [8, 8])


class TestVjp:
    @WRAPS
    def test_residuals_are_of_the_forward_pass(self, wrap):
        """A variable that is assigned in between does not move them."""
        v = tf.Variable(constant(2.0))

        @sgtrick.custom_vjp
        def f(x):
            read = v.read_value()
            return x * tf.stop_gradient(read), lambda u, variables=None: (
                u * read,
                [tf.zeros_like(w) for w in variables],
            )

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            v.assign(100.0)
            return tape.gradient(y, x)

        assert wrap(run)(constant(3.0)).numpy() == 2

    @WRAPS
    def test_structures_of_arguments_and_outputs(self, wrap):
        @sgtrick.custom_vjp
        def f(params, x):
            def grad_fn(by_a, by_b):  # the leaves of the output in the order of tf.nest
                return {"w": (2 * by_a, 3 * by_b)}, 5 * by_a + 7 * by_b

            return {"b": (params["w"][1] * x,), "a": params["w"][0] * x}, grad_fn

        @wrap
        def run(w0, w1, x):
            return gradients(lambda w0, w1, x: tf.nest.flatten(f({"w": (w0, w1)}, x)), w0, w1, x)

        assert [g.numpy() for g in run(*map(constant, (1.0, 2.0, 3.0)))] == [2, 3, 12]

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
    def test_int_outputs(self, wrap):
        @sgtrick.custom_vjp
        def f(x):
            return (tf.cast(x, tf.int32), 2 * x), lambda n, u: 7 * u

        assert wrap(derivative(lambda x: f(x)[1]))(constant(3.5)).numpy() == 7
        assert wrap(f)(constant(3.5))[0].numpy() == 3

    @WRAPS
    def test_closed_over_tensors(self, wrap):
        """In the rule they are live: the second derivative finds them."""

        @wrap
        def run(x, c):
            f = sgtrick.custom_vjp(lambda x: (x * tf.stop_gradient(c), lambda u: u * c**2))
            with tf.GradientTape() as tape:
                tape.watch(c)
                first = derivative(f)(x)
            return first, tape.gradient(first, c)

        assert [t.numpy() for t in run(constant(2.0), constant(3.0))] == [9, 6]

    @WRAPS
    def test_the_order_of_calls(self, wrap):
        """Forms of forms, where the inner one is in the forward pass, the rule, or both."""
        square = sgtrick.custom_vjp(lambda x: (x**2, lambda u: u * 20 * x))
        cube = sgtrick.custom_vjp(lambda x: (x * square(x), lambda u: u * 30 * square(x)))
        x = constant([2.0, 3.0])
        np.testing.assert_allclose(wrap(derivative(cube))(x), 30 * x**2)
        np.testing.assert_allclose(wrap(derivative(derivative(cube)))(x), 600 * x)
        np.testing.assert_allclose(wrap(derivative(mapped(cube)))(x), 30 * x**2)

    @WRAPS
    def test_shared_by_two_calls(self, wrap):
        f = sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: 3 * u))
        run = wrap(derivative(lambda x: f(x) + f(2 * x) + f(f(x))))
        np.testing.assert_allclose(run(constant([1.0])), [3 + 6 + 9])

    @WRAPS
    def test_zero_upstream(self, wrap):
        """Exactly zero, also where the rule divides by nothing."""
        f = sgtrick.custom_vjp(lambda x: (tf.sqrt(x), lambda u: tf.math.divide_no_nan(u, x)))
        run = wrap(derivative(lambda x: 0 * f(x)))
        assert run(constant(0.0)).numpy() == 0

    @WRAPS
    def test_batched_by_hand_and_by_map(self, wrap):
        """Different shapes of one form are separate calls of the rule."""
        shapes = []

        @sgtrick.custom_vjp
        def f(x):
            shapes.append(x.shape.as_list())
            return tf.reduce_sum(hidden(x)), lambda u: u * slope(x)

        x = tf.constant(np.stack([POINTS, POINTS]))
        np.testing.assert_allclose(wrap(derivative(f))(x), exact(1, x.numpy()))
        np.testing.assert_allclose(wrap(derivative(mapped(f)))(x), exact(1, x.numpy()))
        assert {str(s) for s in shapes} == {"[2, 3]", "[3]"}

    @WRAPS
    @pytest.mark.parametrize("upstream", [1.0, [2.0, -3.0]])
    def test_upstream_of_any_size(self, wrap, upstream):
        x = constant([0.3, 0.5])
        f = sgtrick.custom_vjp(lambda x: (x, lambda u: u**1 * 3))

        @wrap
        def run(x, u):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            return tape.gradient(y, x, output_gradients=u)

        u = constant(upstream) * tf.ones_like(x)
        np.testing.assert_array_equal(run(x, u), 3 * u)

    @pytest.mark.parametrize("dtype", [tf.float32, tf.complex64, tf.complex128])
    @pytest.mark.parametrize(
        "wrap",
        [lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)],
        ids=["eager", "tf.function", "XLA"],
    )
    def test_complex(self, wrap, dtype):
        """TensorFlow's convention: the conjugate of the derivative."""
        x = tf.cast(tf.complex([0.3, 1.0], [0.2, -0.4]), dtype)
        vjp = sgtrick.custom_vjp(
            lambda x: (tf.stop_gradient(x**3), lambda u: u * tf.math.conj(3 * x**2))
        )
        jvp = sgtrick.custom_jvp(lambda x: tf.stop_gradient(x**3))
        jvp.defjvp(lambda primals, tangents: (None, 3 * primals[0] ** 2 * tangents[0]))
        gradient = sgtrick.with_gradient(lambda x: tf.stop_gradient(x**3), lambda x: 3 * x**2)
        expected = derivative(lambda x: x**3)(x)
        for form in (vjp, jvp, gradient):
            np.testing.assert_allclose(wrap(derivative(form))(x), expected, rtol=1e-5)
            np.testing.assert_allclose(wrap(derivative(mapped(form)))(x), expected, rtol=1e-5)
