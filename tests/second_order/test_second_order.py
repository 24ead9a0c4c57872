"""Second derivatives of forms of first order: an error for who asks, and for nobody else."""

import cProfile
import itertools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras

import sgtrick
from asinh_forms import (
    ALL,
    CALLS_HOST,
    FIRST_ORDER,
    POINTS,
    exact,
    hidden,
    host_slope,
    slope,
    true,
    verdict,
)
from matrix import LOUD, spread, traced
from shared import (
    EXECUTED,
    MODES,
    TWICE,
    WAYS,
    WRAPS,
    Way,
    by_jacobian,
    compiled,
    derivative,
    forward_derivative,
    looped,
    mapped,
    on_host,
)

FORMS = pytest.mark.parametrize("name", FIRST_ORDER)

NESTINGS = list(itertools.product(MODES.values(), repeat=2))


def persistent(f):
    def run(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                y = f(x)
            g = inner.gradient(y, x)
        return tape.gradient(g, x)

    return run


def hessians(f):
    @tf.function
    def run(x):
        return tf.linalg.diag_part(tf.hessians(tf.reduce_sum(f(x)), x)[0])

    return run


WHERE = WAYS | {"around vectorized_map": Way(inside=mapped, around=traced)}
OTHER_WAYS = {
    "jacobian": Way(modes=(derivative, by_jacobian)),
    "jacobian in tf.function": Way(around=tf.function, modes=(derivative, by_jacobian)),
    "persistent": Way(modes=(persistent,)),
    "persistent in tf.function": Way(around=tf.function, modes=(persistent,)),
    "tf.hessians": Way(modes=(hessians,)),
}


def without_another(x):
    """Beside an argument without gradient."""

    @sgtrick.custom_vjp
    def form(x, other):
        return hidden(x), lambda upstream: (upstream * host_slope(x), None)

    return form(x, tf.ones_like(x))


@sgtrick.custom_vjp
def computed_in_the_forward_pass(x):
    computed = host_slope(x)
    return hidden(x), lambda upstream: upstream * computed


def in_a_product(x):
    """That a factor can be differentiated says nothing about the host call."""
    form = sgtrick.with_gradient(lambda x, w: hidden(x) * w, lambda x, w: host_slope(x) * w)
    return form(x, tf.exp(x)) / tf.exp(x)


def in_a_product_of_both(x):
    form = sgtrick.from_value_and_gradient(lambda x, w: (hidden(x) * w, host_slope(x) * w))
    return form(x, tf.exp(x)) / tf.exp(x)


RULES_WITH_HOST_CALLS = (
    without_another,
    computed_in_the_forward_pass,
    in_a_product,
    in_a_product_of_both,
)


def is_run(name, where, modes):
    if where == "around vectorized_map":  # where native functions have no other derivatives
        return modes == (derivative, derivative) or (
            modes == (derivative, forward_derivative)
            and name in ("custom_gradient", "custom_vjp, host", "from_numpy")
        )
    if where == "around tf.function" and forward_derivative in modes:
        return name in ("custom_gradient", "custom_vjp, stopped", "from_numpy")  # others take long
    return not (where == "in XLA" and name in CALLS_HOST)


class TestLoud:
    """No finite wrong number, zero or None."""

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("name", "where", "modes"), spread(FIRST_ORDER, WHERE, NESTINGS, valid=is_run)
    )
    def test_in_every_nesting(self, name, where, modes):
        outer, inner = modes
        run = WHERE[where](FIRST_ORDER[name], inner, outer)
        assert verdict(run, exact(2)) in LOUD

    @pytest.mark.long
    @pytest.mark.parametrize(("name", "way"), spread(FIRST_ORDER, OTHER_WAYS, together=1))
    def test_in_other_ways(self, name, way):
        assert verdict(OTHER_WAYS[way](FIRST_ORDER[name]), exact(2)) in LOUD

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("form", "outer", "inner", "wrap"),
        spread(RULES_WITH_HOST_CALLS, MODES.values(), MODES.values(), EXECUTED.values()),
    )
    def test_of_rules_with_host_calls(self, form, outer, inner, wrap):
        assert verdict(wrap(outer(inner(form))), exact(2)) in LOUD

    @WRAPS
    def test_by_one_of_two_arguments(self, wrap):
        """A host call is an error by both, whichever of them it gets."""

        @sgtrick.custom_vjp
        def form(x, factor):
            def grad_fn(upstream):
                return upstream * host_slope(x) * factor, upstream * true(x)

            return hidden(x) * factor, grad_fn

        x = tf.constant(POINTS)
        by_x = derivative(lambda x: form(x, 2 * tf.ones_like(x)))
        assert verdict(wrap(derivative(by_x)), 2 * exact(2)) in LOUD

        def by_factor(factor):
            return derivative(lambda x: form(x, factor))(x)

        assert verdict(wrap(derivative(by_factor)), exact(1)) in LOUD

    @WRAPS
    def test_what_is_stopped_beside_another_connection_is_taken_at_its_word(self, wrap):
        """As in TensorFlow: the derivative of the gradient by the point is zero."""
        form = sgtrick.with_gradient(
            lambda x, w: hidden(x) * w, lambda x, w: tf.stop_gradient(slope(x)) * w
        )

        def by_x(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = form(x, w)
            return tape.gradient(y, x)

        def run(x):
            w = tf.exp(x)
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                g = by_x(x, w)
            zero = tape.gradient(g, [x, w], unconnected_gradients="zero")
            return tf.stack(zero)

        x = tf.constant(POINTS)
        np.testing.assert_allclose(wrap(run)(x), [0 * POINTS, exact(1)], rtol=1e-12)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("around", "wrap"),
        # Forward mode over a mapped function takes TensorFlow ten seconds in eager execution.
        [(lambda f: f, lambda f: f), (lambda f: f, tf.function), (mapped, tf.function)],
        ids=["eager", "tf.function", "mapped"],
    )
    def test_of_an_upstream_gradient_that_the_host_gets(self, around, wrap):
        @sgtrick.custom_vjp
        def form(x):
            def grad_fn(upstream):
                copy = tf.numpy_function(np.copy, [upstream], upstream.dtype)
                return tf.reshape(copy, x.shape) * slope(x)

            return hidden(x), grad_fn

        def twice(f, outer=derivative):
            return wrap(outer(derivative(around(f))))

        x = tf.constant(POINTS)
        square = derivative(derivative(lambda x: true(x) ** 2))(x)
        for outer in (derivative, forward_derivative):
            assert verdict(twice(lambda x: form(x) ** 2, outer), square) in LOUD
        assert verdict(twice(form), exact(2)) in {*LOUD, "right"}

    def test_an_upstream_gradient_that_is_stopped_counts_as_a_constant(self):
        @sgtrick.custom_vjp
        def form(x):
            return hidden(x), lambda upstream: tf.stop_gradient(upstream) * slope(x)

        x = tf.constant(POINTS)
        expected = 2 * true(x) * exact(2)
        np.testing.assert_allclose(derivative(derivative(lambda x: form(x) ** 2))(x), expected)

    @pytest.mark.parametrize("x", [0.0, 0.7])
    def test_in_forward_mode_by_a_point_of_zeros_under_xla(self, x):
        """Which cannot raise, and where value and slope of `x**2` are zero, too."""
        h = lambda x: sgtrick.custom_gradient(x**2, 2 * x, x)  # noqa: E731
        run = compiled(forward_derivative(derivative(derivative(h))))
        assert np.isnan(run(tf.constant(x, tf.float64)))

    @FORMS
    def test_of_third_order_around_a_gradient_in_a_function(self, name):
        inside = tf.function(derivative(FIRST_ORDER[name]))
        assert verdict(derivative(derivative(inside)), exact(3)) in LOUD

    OF = {
        "a square": lambda f: lambda x: f(x) ** 2,
        "a sum with native terms": lambda f: lambda x: f(x) + x**3,
        "a product with native terms": lambda f: lambda x: f(x) * tf.sin(x),
        "a loop": looped,
        "itself twice": lambda f: lambda x: f(f(x)),
    }

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("name", "of", "way"),
        spread(
            FIRST_ORDER,
            OF,
            ["eager", "in tf.function", "around tf.function"],
            valid=lambda name, of, way: (
                name in ("custom_gradient", "custom_vjp, host")
                or (of, way) == ("a square", "eager")
            ),
        ),
    )
    def test_of_what_is_made_of_it(self, name, of, way):
        of = self.OF[of]
        expected = Way()(of(true), *TWICE)(tf.constant(POINTS))
        assert verdict(WAYS[way](of(FIRST_ORDER[name]), *TWICE), expected) in LOUD

    @pytest.mark.parametrize(
        ("name", "advice"),
        [("custom_gradient", "hx="), ("from_numpy", "hessp="), ("with_gradient, host", "0 [*] x")],
    )
    def test_the_error_says_what_to_do(self, name, advice):
        twice = derivative(derivative(FIRST_ORDER[name]))
        x = tf.constant(POINTS)
        with pytest.raises(LookupError, match=advice):
            twice(x)
        with pytest.raises(tf.errors.InvalidArgumentError, match=advice):
            tf.function(twice)(x)


NAMED = "second derivative|differentiated again"  # by the messages of all forms


def second_by(form, w, x_of, *, persistent=False):
    """The second derivative by `w` of the form at a point that is made of it, by two tapes."""
    with tf.GradientTape(persistent=persistent) as outer:
        if not hasattr(w, "assign"):
            outer.watch(w)
        x = x_of(w)
        with tf.GradientTape(persistent=persistent) as inner:
            inner.watch(x)
            y = form(x)
        gradient = inner.gradient(y, x)
    return outer.gradient(gradient, w)


def tf_keras_weight(value):
    layer = tf_keras.layers.Layer(dtype="float64")
    return layer.add_weight(shape=value.shape, initializer=lambda *_, **__: value)


@pytest.mark.parametrize("persistent", [False, True])
class TestByWhatThePointIsMadeOf:
    """In eager execution: an error, or NaN with a warning that has its message."""

    VARIABLES = {
        "variable": tf.Variable,
        "Keras": lambda value: keras.Variable(value, dtype="float64"),
        "tf_keras": tf_keras_weight,
    }
    MADE = {
        "a read": (tf.Variable, tf.convert_to_tensor),
        "a product of a variable": (tf.Variable, lambda w: 1 * w),
        "a product of a tensor": (tf.constant, lambda w: 1 * w),
        "a part": (lambda value: tf.constant([*value, 7.0], tf.float64), lambda w: w[:3]),
    }

    @FORMS
    @pytest.mark.parametrize("variable", VARIABLES)
    def test_a_variable(self, name, variable, persistent):
        w = self.VARIABLES[variable](POINTS)
        with tf.GradientTape(persistent=persistent) as outer:
            with tf.GradientTape(persistent=persistent) as inner:
                y = FIRST_ORDER[name](w)
            gradient = inner.gradient(y, w)
        np.testing.assert_allclose(gradient, exact(1), rtol=1e-9)
        with pytest.raises(LookupError, match=NAMED):
            outer.gradient(gradient, w)

    @FORMS
    @pytest.mark.parametrize("made", MADE)
    def test_something_else(self, name, made, persistent):
        make, x_of = self.MADE[made]
        with pytest.warns(RuntimeWarning, match=f"(?s)A gradient is NaN.*({NAMED})") as warned:
            second = second_by(FIRST_ORDER[name], make(POINTS), x_of, persistent=persistent)
        assert np.isnan(second[:3]).all()
        assert [w.filename for w in warned] == [__file__]

    @pytest.mark.parametrize("read", ["the point", "another"])
    def test_a_variable_that_the_host_gets(self, read, persistent):
        v = tf.Variable(2.0, dtype=tf.float64)
        double = on_host(lambda a: 2 * a)
        form = sgtrick.with_gradient(lambda x: v * x**2, lambda x: double(x) * double(v) / 2)
        x = tf.constant(3.0, tf.float64)
        with tf.GradientTape(persistent=persistent) as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = form(x)
            gradient = inner.gradient(y, x)
        with pytest.raises(LookupError, match=NAMED):
            outer.gradient(gradient, x if read == "the point" else v)

    def test_a_jacobian(self, persistent):
        w = tf.Variable(POINTS)
        with tf.GradientTape(persistent=persistent) as outer:
            gradient = derivative(FIRST_ORDER["custom_gradient"])(1 * w)
        with pytest.raises(tf.errors.InvalidArgumentError, match=NAMED):
            outer.jacobian(gradient, w)

    @staticmethod
    def of_a_product(persistent):
        form, x = FIRST_ORDER["custom_gradient"], tf.constant(POINTS)
        return second_by(form, x, lambda w: 1 * w, persistent=persistent)

    def test_who_turns_warnings_into_errors_gets_one(self, persistent):
        with pytest.raises(RuntimeWarning, match="hx="):
            self.of_a_product(persistent)

    def test_under_a_profiler(self, persistent):
        called = set()

        def profile(frame, event, arg):
            called.add((frame.f_code.co_name, event))

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            with pytest.warns(RuntimeWarning, match="hx="):
                self.of_a_product(persistent)
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(before)
        assert {("second_by", "return"), ("gradient", "return")} <= called

    def test_under_a_profiler_in_c(self, persistent):
        with cProfile.Profile(), pytest.warns(RuntimeWarning, match="hx="):
            self.of_a_product(persistent)


class TestNoFalseAlarms:
    """Who does not ask for the second derivative gets what they asked for."""

    @pytest.mark.parametrize("name", ALL)
    @WRAPS
    def test_watched_by_another_tape(self, name, wrap):
        def run(x):
            with tf.GradientTape(persistent=True) as outer:
                outer.watch(x)
                with tf.GradientTape(persistent=True) as tape:
                    tape.watch(x)
                    y = ALL[name](x)
                    g = tape.gradient(y, x)
                    z = y**2
                by_z, other = tape.gradient(z, x), tf.sin(x)
            return g, by_z, outer.gradient(other, x)

        g, by_z, other = wrap(run)(tf.constant(POINTS))
        np.testing.assert_allclose(g, exact(1), rtol=1e-9)
        np.testing.assert_allclose(by_z, 2 * exact(0) * exact(1), rtol=1e-9)
        np.testing.assert_allclose(other, np.cos(POINTS))

    @FORMS
    @pytest.mark.parametrize("persistent", [False, True])
    def test_a_factor_beside_parameters_of_the_point(self, name, persistent):
        """As where a network has parameters of its own behind those that made its input."""
        behind, before = tf.Variable(3.0, dtype=tf.float64), tf.Variable(POINTS)
        with tf.GradientTape(persistent=persistent) as outer:
            gradient = derivative(FIRST_ORDER[name])(1 * before)
            penalty = tf.reduce_sum(gradient * behind**2)
        by_behind = outer.gradient(penalty, behind)
        np.testing.assert_allclose(by_behind, 6 * np.sum(exact(1)), rtol=1e-9)

    @FORMS
    @WRAPS
    def test_a_step_differentiated_by_its_rate(self, name, wrap):
        """The gradient in the step is a factor of what is asked for, and not differentiated."""
        form = FIRST_ORDER[name]

        def run(x, rate):
            with tf.GradientTape(watch_accessed_variables=False) as outer:
                outer.watch([x, rate])
                stepped = x - rate * derivative(form)(x)
            return outer.gradient(stepped, rate)

        by_rate = wrap(run)(tf.constant(POINTS), tf.constant(0.1, tf.float64))
        np.testing.assert_allclose(by_rate, -np.sum(exact(1)), rtol=1e-9)

    def test_a_mapped_step_differentiated_by_its_rate(self):
        x, rate = tf.constant(POINTS), tf.constant(0.1, tf.float64)
        slope = derivative(FIRST_ORDER["custom_gradient"])
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch([x, rate])
            stepped = mapped(lambda x: x - rate * slope(x))(x)
        np.testing.assert_allclose(outer.gradient(stepped, rate), -np.sum(exact(1)), rtol=1e-9)

    @pytest.mark.parametrize(
        ("name", "wrap"),
        [
            ("custom_gradient", tf.function),
            ("with_gradient, host", tf.function),
            ("from_numpy", lambda f: f),
        ],
    )
    def test_hmc_in_a_tape(self, name, wrap):
        form = FIRST_ORDER[name]

        def log_prob(x):
            return -tf.reduce_sum(form(x) ** 2, -1)

        def run(x, seed):
            with tf.GradientTape() as tape:
                tape.watch(x)
                draws = tfp.mcmc.sample_chain(
                    2,
                    current_state=x,
                    kernel=tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.1, 2),
                    trace_fn=None,
                    seed=seed,
                )
                other = tf.reduce_sum(x**2)
            return draws, tape.gradient(other, x)

        x = tf.constant(POINTS)
        draws, by_x = wrap(run)(x, tf.constant([1, 2]))
        assert np.all(np.isfinite(draws))
        assert np.all(draws[0] != POINTS)
        np.testing.assert_allclose(by_x, 2 * POINTS)
