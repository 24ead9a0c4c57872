"""Derivatives with respect to what a function closes over and to its arguments, in either order.

The function and its rule are those of `a**3 x**3 + sin(a)`, and what is differentiated is the
square of it, so that each second derivative has a part that does not depend on how the function's
own derivative moves. The oracle is autodiff of the true function. What a rule does not cover, and
then the point, is refused.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, tangent_form
from matrix import spread, traced
from shared import EXECUTED, compiled, gradients, on_host
from shared import derivative as reverse
from shared import forward_derivative as forward

FORMS = {
    "with_gradient": OF_SLOPE["with_gradient"],
    "from_value_and_gradient": OF_SLOPE["from_value_and_gradient"],
    "custom_jvp": tangent_form,
}
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


PASSED = {
    "with_gradient": sgtrick.with_gradient(hidden, slope),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda x, a: (hidden(x, a), slope(x, a))
    ),
}


def of_variable(name):
    v = tf.Variable(A)
    form = closing_over(v, name)
    return lambda x, _: form(x), v


# A form of `x` and `a`, and what to differentiate by.
GIVEN = {
    "variable": of_variable,
    "passed": lambda name: (PASSED[name], A),
    "tensor": lambda name: (lambda x, a: closing_over(a, name)(x), A),
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


def is_loud(run, *args):
    y = came(run, *args)
    return y != "None" if isinstance(y, str) else bool(np.isnan(y))


MODES = list(itertools.product([reverse, forward], repeat=2))
ORDERS = [(1, 0), (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "name", "way", "by"),
    spread(
        GIVEN,
        FORMS,
        WAYS,
        ORDERS,
        together=3,
        valid=lambda given, name, *_: given != "passed" or name in PASSED,
    ),
    ids=str,
)
def test_by_tapes(given, name, way, by):
    """What an operation used and did not make is known, in graphs and in eager execution."""
    f, a = GIVEN[given](name)
    run = WAYS[way](squared(f), (reverse,) * len(by), by)
    if by == (1, 0):
        assert is_loud(run, X, a)
    else:
        np.testing.assert_allclose(run(X, a), expected(by), rtol=1e-12)


def is_run(given, name, way, modes, by):
    """What the others close over is passed as with_gradient passes it."""
    if given == "variable" and way.startswith("around"):
        takes_long = (modes, by) == ((forward, forward), (0, 1))
        return name == "with_gradient" and not takes_long
    if given == "passed":
        return name in PASSED and not way.startswith("around")
    return given == "variable" or way == "eager"


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "name", "way", "modes", "by"),
    spread(
        GIVEN,
        FORMS,
        ["eager", "in tf.function", "around tf.function", "around the inner"],
        MODES[1:],
        ORDERS,
        together=3,
        valid=is_run,
    ),
    ids=in_words,
)
def test_with_forward_mode(given, name, way, modes, by):
    f, a = GIVEN[given](name)
    run = WAYS[way](squared(f), modes, by)
    y = came(run, X, a)
    if by == (1, 0):
        assert is_loud(run, X, a)
    elif given == "tensor":
        assert is_right_or_loud(run, expected(by), X, a)
    elif isinstance(y, str):  # TensorFlow has no forward mode around functions for variables
        assert given == "variable"
        assert way.startswith("around")
        assert y in ("TypeError", "ValueError")
    else:
        np.testing.assert_allclose(y, expected(by), rtol=1e-12)


class TestPassed:
    """What is passed and has no rule."""

    @pytest.mark.long
    @pytest.mark.parametrize("way", ["eager", "in tf.function", "around tf.function", "XLA"])
    @pytest.mark.parametrize("name", PASSED)
    def test_and_is_closed_over_as_well(self, name, way):
        def f(x, a):
            return {
                "with_gradient": sgtrick.with_gradient(
                    lambda x, p: p * hidden(x, a), lambda x, p: p * slope(x, a)
                ),
                "from_value_and_gradient": sgtrick.from_value_and_gradient(
                    lambda x, p: (p * hidden(x, a), p * slope(x, a))
                ),
            }[name](x, a)

        exact = chain([reverse] * 2, (0, 1))(lambda x, a: a * true(x, a))(X, A)
        run = WAYS[way](f, (reverse, reverse), (0, 1))
        np.testing.assert_allclose(run(X, A), exact, rtol=1e-12)
        assert is_loud(WAYS[way](f, (reverse, reverse), (1, 0)), X, A)

    @pytest.mark.parametrize("name", PASSED)
    def test_the_same_tensor_twice(self, name):
        twice = lambda x: PASSED[name](x, x) ** 2  # noqa: E731
        exact = reverse(lambda x: true(x, x) ** 2)
        np.testing.assert_allclose(reverse(twice)(X), exact(X), rtol=1e-12)
        with pytest.raises(LookupError, match="mixed derivative"):
            reverse(reverse(twice))(X)


class TestTensors:
    """That are closed over."""

    @pytest.mark.parametrize("beside", ["nothing", "variable"])
    @pytest.mark.parametrize("name", FORMS)
    def test_in_eager(self, name, beside):
        one = tf.Variable(tf.ones_like(A)) if beside == "variable" else 1

        def f(x, a):
            return FORMS[name](lambda x: one * hidden(x, a), lambda x: one * slope(x, a))(x) ** 2

        for by in ((1,), (0, 0), (0, 1)):
            run = chain([reverse] * len(by), by)(f)
            np.testing.assert_allclose(run(X, A), expected(by), rtol=1e-12)
        assert is_loud(chain([reverse] * 2, (1, 0))(f), X, A)

    @pytest.mark.long
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

    @pytest.mark.parametrize(("name", "modes"), spread(OF_SLOPE, MODES), ids=in_words)
    def test_that_the_host_gets_in_a_graph(self, name, modes):
        """Eager execution does not tell it from NumPy, which is a constant."""
        form = OF_SLOPE[name]
        cube = on_host(lambda a: a**3)
        run = traced(
            chain(modes, (0, 1))(lambda x, a: form(lambda x: x * cube(a), lambda *_: cube(a))(x))
        )
        y = came(run, X, A)
        assert y == "InvalidArgumentError" or np.isnan(y)

    def test_that_the_host_gets_in_a_function_with_all_derivatives(self):
        cube = on_host(lambda a: a**3)
        run = traced(
            reverse(lambda x, a: OF_SLOPE["custom_vjp"](lambda x: x * cube(a), cube)(x), 1)
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="a tensor that it closes over"):
            run(X, A)

    @pytest.mark.parametrize("wrap", EXECUTED.values(), ids=EXECUTED)
    @pytest.mark.parametrize("name", OF_SLOPE)
    def test_that_operations_without_gradients_use(self, name, wrap):
        """In a function that has a gradient of its own."""
        step = tf.custom_gradient(lambda a: (tf.cast(a > 0, a.dtype), lambda u: u))
        run = reverse(lambda x, a: OF_SLOPE[name](lambda x: x * step(a), lambda _: step(a))(x), 1)
        if name == "custom_vjp":
            message = "a tensor that it closes over"
        else:
            np.testing.assert_allclose(wrap(run)(X, A), X)
            run, message = reverse(run), "mixed derivative"
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
            wrap(run)(X, A)

    @pytest.mark.parametrize("name", OF_SLOPE)
    def test_in_a_loop_of_tensorflow_1(self, name):
        def run():
            x, a = (tf.compat.v1.placeholder_with_default(t.numpy(), []) for t in (X, A))
            times = lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * a), (0, x))  # noqa: E731
            y = OF_SLOPE[name](lambda x: times(x)[1], lambda _: a**2)(x)
            with tf.compat.v1.Session() as session:
                return session.run(tf.gradients(y, [x, a]))

        tf.compat.v1.disable_control_flow_v2()
        try:
            with tf.Graph().as_default():
                if name == "custom_vjp":
                    with pytest.raises(tf.errors.InvalidArgumentError, match="it closes over"):
                        run()
                else:
                    a = A.numpy()
                    np.testing.assert_allclose(run(), [a**2, 2 * a * X.numpy()], rtol=1e-12)
        finally:
            tf.compat.v1.enable_control_flow_v2()


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
        elif by == (1, 0):
            assert is_loud(run, X, A)
        else:
            assert is_right_or_loud(run, expected(by), X, A)

    def test_where_a_rule_gives_all_derivatives(self):
        """Nothing tells what the array was made of."""
        with pytest.raises(ValueError, match=r"closes over a tf\.TensorArray.*Read the array"):
            tf.function(functools.partial(self.read, OF_SLOPE["custom_vjp"]))(X, A)


class TestTables:
    """Gathered rows have sparse gradients, which stay so."""

    @staticmethod
    def form(table):
        def f(x, factor):
            return factor * tf.reduce_sum(tf.gather(table, [2, 0]) ** 2) * x**3

        return sgtrick.with_gradient(lambda x: f(x, 1.0), lambda x: 3 * f(x, 1.0) / x)

    @pytest.fixture
    def table(self):
        return tf.Variable(np.arange(8.0).reshape(4, 2))

    @pytest.mark.parametrize("wrap", EXECUTED.values(), ids=EXECUTED)
    def test_first_derivatives(self, table, wrap):
        form = self.form(table)
        with tf.GradientTape():  # by which they may be differentiated again
            by_x, by_table = wrap(lambda x: gradients(form, x, by=[x, table]))(X)
        assert isinstance(by_table, tf.IndexedSlices)
        assert tf.reduce_all(by_table.indices == [2, 0])
        np.testing.assert_allclose(by_x, 42 * 3 * X**2)

    def test_second_derivatives_by_the_point(self, table):
        form = self.form(table)
        for second in (tf.function(reverse(reverse(form))), reverse(reverse(tf.function(form)))):
            np.testing.assert_allclose(second(X), 42 * 6 * X, rtol=1e-12)
