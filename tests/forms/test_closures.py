"""Derivatives with respect to what a function closes over, and then with respect to its arguments.

The function and its rule are those of `a**3 x**3 + sin(a)`, and what is differentiated is the
square of it, so that each second derivative has a part that does not depend on how the function's
own derivative moves. The oracle is autodiff of the true function.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread, traced
from shared import compiled, on_host
from shared import derivative as reverse
from shared import forward_derivative as forward
from slope_forms import FORMS

X, A = tf.constant(1.5, tf.float64), tf.constant(0.7, tf.float64)


def true(x, a):
    return a**3 * x**3 + tf.sin(a)


def slope(x, a):
    return 3 * a**3 * x**2


def hidden(x, a):
    """The value, with twice the derivative by `x`."""
    return true(2 * x - tf.stop_gradient(x), a)


def closing_over(a, name):
    return FORMS[name](lambda x: hidden(x, a), lambda x: slope(x, a))


def closing_over_a_tensor(name, beside):
    """The square of a form that closes over its second argument, and over a variable, if so."""
    one = tf.Variable(tf.ones_like(A)) if beside == "variable" else 1

    def f(x, a):
        form = FORMS[name](lambda x: one * hidden(x, a), lambda x: one * slope(x, a))
        return form(x) ** 2

    return f


PASSED = {
    "with_gradient": sgtrick.with_gradient(hidden, slope),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda x, a: (hidden(x, a), slope(x, a))
    ),
}


def chain(modes, by):
    """The derivative with respect to arguments of these numbers, the first first."""

    def of(f):
        for mode, k in zip(modes, by, strict=True):
            f = mode(f, k)
        return f

    return of


WAYS = {
    "eager": lambda f, modes, by: chain(modes, by)(f),
    "in tf.function": lambda f, modes, by: traced(chain(modes, by)(f)),
    "around tf.function": lambda f, modes, by: chain(modes, by)(traced(f)),
    "around the inner": lambda f, modes, by: chain(modes[1:], by[1:])(
        tf.function(chain(modes[:1], by[:1])(f))
    ),
    "XLA": lambda f, modes, by: compiled(chain(modes, by)(f)),
}


def squared(f):
    return lambda x, a: f(x, a) ** 2


@functools.cache
def expected(by):
    return chain([reverse] * len(by), by)(squared(true))(X, A).numpy()


def came(run, *args):
    """The number, or a word: that of an exception is its type."""
    try:
        y = run(*args)
    except Exception as error:
        return type(error).__name__
    return "None" if y is None else float(y)


def is_right_or_loud(run, exact, *args):
    """What is not promised to be right must not be finite and wrong."""
    y = came(run, *args)
    if isinstance(y, str):
        return y != "None"
    return bool(np.isnan(y)) or y == pytest.approx(exact, rel=1e-12)


def in_words(part):
    """The id of a parameter: modes by their names."""
    if isinstance(part, str) or isinstance(part[0], int):
        return str(part)
    return " then ".join(mode.__name__ for mode in part)


MODES = list(itertools.product([reverse, forward], repeat=2))
ORDERS = [(1, 0), (0, 1)]


@pytest.mark.parametrize(("name", "way", "by"), spread(FORMS, WAYS, ORDERS), ids=str)
def test_of_variables_by_tapes(name, way, by):
    v = tf.Variable(A)
    form = closing_over(v, name)
    run = WAYS[way](squared(lambda x, _: form(x)), (reverse, reverse), by)
    np.testing.assert_allclose(run(X, v), expected(by), rtol=1e-12)


# What the others close over is passed as with_gradient passes it.
@pytest.mark.parametrize(
    ("name", "way", "modes", "by"),
    spread(
        FORMS,
        ["eager", "in tf.function", "around tf.function", "around the inner"],
        MODES[1:],
        ORDERS,
        valid=lambda name, way, *case: (
            not way.startswith("around")
            or (name == "with_gradient" and case != ((forward, forward), (0, 1)))  # takes long
        ),
    ),
    ids=in_words,
)
def test_of_variables_with_forward_mode(name, way, modes, by):
    v = tf.Variable(A)
    form = closing_over(v, name)
    y = came(WAYS[way](squared(lambda x, _: form(x)), modes, by), X, v)
    if isinstance(y, str):  # TensorFlow has no forward mode around functions for variables
        assert way.startswith("around")
        assert y in ("TypeError", "ValueError")
    else:
        np.testing.assert_allclose(y, expected(by), rtol=1e-12)


class TestPassed:
    """What is passed and has no rule."""

    @pytest.mark.parametrize(("name", "way", "by"), spread(PASSED, WAYS, ORDERS), ids=str)
    def test_by_tapes(self, name, way, by):
        run = WAYS[way](squared(PASSED[name]), (reverse, reverse), by)
        np.testing.assert_allclose(run(X, A), expected(by), rtol=1e-12)

    @pytest.mark.parametrize(
        ("name", "way", "modes", "by"),
        spread(PASSED, ["eager", "in tf.function"], MODES[1:], ORDERS, together=3),
        ids=in_words,
    )
    def test_with_forward_mode(self, name, way, modes, by):
        run = WAYS[way](squared(PASSED[name]), modes, by)
        np.testing.assert_allclose(run(X, A), expected(by), rtol=1e-12)

    @pytest.mark.parametrize("way", ["eager", "in tf.function", "around tf.function", "XLA"])
    @pytest.mark.parametrize("name", PASSED)
    def test_and_is_closed_over_as_well(self, name, way):
        def f(x, a):
            form = {
                "with_gradient": sgtrick.with_gradient(
                    lambda x, p: p * hidden(x, a), lambda x, p: p * slope(x, a)
                ),
                "from_value_and_gradient": sgtrick.from_value_and_gradient(
                    lambda x, p: (p * hidden(x, a), p * slope(x, a))
                ),
                "custom_jvp": sgtrick.custom_jvp(
                    lambda p, x: p * hidden(x, a), nondiff_argnums=(0,)
                ),
            }[name]
            if name != "custom_jvp":
                return form(x, a)
            form.defjvp(lambda p, primals, tangents: (None, p * slope(*primals, a) * tangents[0]))
            return form(a, x)

        exact = chain([reverse] * 2, (1, 0))(lambda x, a: a * true(x, a))(X, A)
        run = WAYS[way](f, (reverse, reverse), (1, 0))
        np.testing.assert_allclose(run(X, A), exact, rtol=1e-12)

    @pytest.mark.parametrize("name", PASSED)
    def test_the_same_tensor_twice(self, name):
        run = chain([reverse] * 2, (0, 0))(lambda x: PASSED[name](x, x) ** 2)
        exact = chain([reverse] * 2, (0, 0))(lambda x: true(x, x) ** 2)
        np.testing.assert_allclose(run(X), exact(X), rtol=1e-12)


class TestTensors:
    """What an operation used and did not make is known, in graphs and in eager execution."""

    @pytest.mark.parametrize(
        ("name", "way", "by"),
        spread(FORMS, ["in tf.function", "around tf.function", "XLA"], ORDERS),
        ids=str,
    )
    def test_in_graphs(self, name, way, by):
        run = WAYS[way](squared(lambda x, a: closing_over(a, name)(x)), (reverse,) * len(by), by)
        np.testing.assert_allclose(run(X, A), expected(by), rtol=1e-12)

    @pytest.mark.parametrize("beside", ["nothing", "variable"])
    @pytest.mark.parametrize("name", FORMS)
    def test_in_eager(self, name, beside):
        f = closing_over_a_tensor(name, beside)
        np.testing.assert_allclose(reverse(reverse(f, 0), 1)(X, A), expected((0, 1)), rtol=1e-12)
        np.testing.assert_allclose(reverse(reverse(f, 0), 0)(X, A), expected((0, 0)), rtol=1e-12)
        np.testing.assert_allclose(reverse(f, 1)(X, A), expected((1,)), rtol=1e-12)
        np.testing.assert_allclose(reverse(reverse(f, 1), 0)(X, A), expected((1, 0)), rtol=1e-12)

    @pytest.mark.parametrize(
        ("name", "by", "modes"), spread(FORMS, ORDERS, MODES[1:]), ids=in_words
    )
    def test_in_eager_by_forward_mode(self, name, by, modes):
        run = chain(modes, by)(closing_over_a_tensor(name, "nothing"))
        assert is_right_or_loud(run, expected(by), X, A)

    @pytest.mark.parametrize(
        ("name", "way", "modes"),
        spread(
            FORMS,
            ["eager", "in tf.function", "around tf.function"],
            MODES,
            # Forward mode twice around a function takes TensorFlow ten seconds.
            valid=lambda name, way, modes: way != "around tf.function" or modes != MODES[3],
        ),
        ids=in_words,
    )
    def test_all_that_a_rule_uses(self, name, way, modes):
        run = WAYS[way](lambda x, a: FORMS[name](lambda x: a * x, lambda *_: a)(x), modes, (0, 1))
        native = WAYS[way](lambda x, a: a * x, modes, (0, 1))
        assert came(run, X, A) == came(native, X, A)

    @pytest.mark.parametrize(("name", "modes"), spread([*FORMS, "custom_vjp"], MODES), ids=in_words)
    def test_that_the_host_gets_in_a_graph(self, name, modes):
        """Eager execution does not tell it from NumPy, which is a constant."""
        form = custom_vjp if name == "custom_vjp" else FORMS[name]
        cube = on_host(lambda a: a**3)
        run = traced(
            chain(modes, (0, 1))(lambda x, a: form(lambda x: x * cube(a), lambda *_: cube(a))(x))
        )
        y = came(run, X, A)
        assert y == "InvalidArgumentError" or np.isnan(y)

    def test_that_the_host_gets_in_a_function_with_all_derivatives(self):
        cube = on_host(lambda a: a**3)
        run = traced(reverse(lambda x, a: custom_vjp(lambda x: x * cube(a), cube)(x), 1))
        with pytest.raises(tf.errors.InvalidArgumentError, match="a tensor that it closes over"):
            run(X, A)


def custom_vjp(f, slope):
    @sgtrick.custom_vjp
    def form(x):
        return f(x), lambda u: u * slope(x)

    return form


class TestLists:
    """What is in a `tf.TensorArray` that a function closes over."""

    @staticmethod
    def read(make, x, a):
        array = tf.TensorArray(a.dtype, 1, element_shape=[], clear_after_read=False).write(0, a)
        return make(lambda x: hidden(x, array.read(0)), lambda x: slope(x, array.read(0)))(x)

    @pytest.mark.parametrize(
        ("name", "way", "by"),
        spread(FORMS, ["in tf.function", "around tf.function"], [(0,), (1,), (0, 0), (1, 0)]),
        ids=str,
    )
    def test_first_derivatives_are_right_and_no_second_is_wrong(self, name, way, by):
        f = functools.partial(self.read, FORMS[name])
        run = WAYS[way](squared(f), (reverse,) * len(by), by)
        if len(by) == 1:
            np.testing.assert_allclose(run(X, A), expected(by), rtol=1e-12)
        else:
            assert is_right_or_loud(run, expected(by), X, A)

    def test_where_a_rule_gives_all_derivatives(self):
        """Nothing tells what the array was made of."""
        with pytest.raises(ValueError, match=r"form closes over a tf\.TensorArray.*Read the array"):
            tf.function(functools.partial(self.read, custom_vjp))(X, A)


class TestTables:
    """Gathered rows have sparse gradients, which stay so; errors where it would cost that."""

    @staticmethod
    def form(table):
        def f(x, factor):
            return factor * tf.reduce_sum(tf.gather(table, [2, 0]) ** 2) * x**3

        return sgtrick.with_gradient(lambda x: f(x, 1.0), lambda x: 3 * f(x, 1.0) / x)

    def test_first_derivatives(self):
        table = tf.Variable(np.arange(8.0).reshape(4, 2))
        form = self.form(table)
        for wrap in (lambda f: f, tf.function):

            @wrap
            def run(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = form(x)
                return tape.gradient(y, [x, table])

            by_x, by_table = run(X)
            assert isinstance(by_table, tf.IndexedSlices)
            assert tf.reduce_all(by_table.indices == [2, 0])
            np.testing.assert_allclose(by_x, 42 * 3 * X**2)

    def test_second_derivatives_are_right_or_loud(self):
        table = tf.Variable(np.arange(8.0).reshape(4, 2))
        form = self.form(table)

        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    y = form(x)
                g = tf.reduce_sum(tape.gradient(y, table))
            return outer.gradient(g, x)

        exact = 3 * X**2 * 2 * (4 + 5 + 0 + 1)
        assert is_right_or_loud(run, exact, X)
        with pytest.raises(tf.errors.InvalidArgumentError, match="closes over"):
            tf.function(run)(X)
        # That with respect to x alone is none of it.
        second = tf.function(chain([reverse] * 2, (0, 0))(form))
        np.testing.assert_allclose(second(X), 42 * 6 * X, rtol=1e-12)
        second = chain([reverse] * 2, (0, 0))(tf.function(form))
        np.testing.assert_allclose(second(X), 42 * 6 * X, rtol=1e-12)
