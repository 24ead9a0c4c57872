"""Derivatives with respect to what a function closes over and to its arguments, in either order.

The function and its rule are those of `a**3 x**3 + sin(a)`, and what is differentiated is the
square of it, so that each second derivative has a part that does not depend on how the function's
own derivative moves. The oracle is autodiff of the true function. What a rule does not cover, and
then the point, is refused.
"""

import concurrent.futures
import contextlib
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, tangent_form, verdict
from matrix import LOUD, spread, traced
from shared import WAYS, WRAPS, Way, gradients, on_host
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
    "with_gradient": sgtrick.with_gradient,
    "from_value_and_gradient": lambda f, slope: sgtrick.from_value_and_gradient(
        lambda x, a: (f(x, a), slope(x, a))
    ),
}


def of_variable(name):
    v = tf.Variable(A)
    form = closing_over(v, name)
    return lambda x, _: form(x), v


def beside_a_variable(name):
    one, make = tf.Variable(tf.ones_like(A)), FORMS[name]
    return lambda x, a: make(lambda x: one * hidden(x, a), lambda x: one * slope(x, a))(x), A


def passed_as_well(name):
    make = PASSED[name]

    def form(x, a):
        half = lambda f: lambda x, p: f(x, (a + p) / 2)  # noqa: E731
        return make(half(hidden), half(slope))(x, a)

    return form, A


def of_list(name):
    def form(x, a):
        array = tf.TensorArray(a.dtype, 1, element_shape=[], clear_after_read=False).write(0, a)
        return FORMS[name](lambda x: hidden(x, array.read(0)), lambda x: slope(x, array.read(0)))(x)

    return form, A


# A form of `x` and `a`, and what to differentiate by.
GIVEN = {
    "variable": of_variable,
    "passed": lambda name: (PASSED[name](hidden, slope), A),
    "passed, and closed over as well": passed_as_well,
    "tensor": lambda name: (lambda x, a: closing_over(a, name)(x), A),
    "tensor beside a variable": beside_a_variable,
    "list": of_list,
}


def chain(modes, by):
    """The derivatives with respect to arguments of these numbers."""
    return [functools.partial(mode, k=k) for mode, k in zip(modes, by, strict=True)]


SOME_WAYS = {
    "eager": WAYS["eager"],
    "in tf.function": WAYS["in tf.function"],
    "around tf.function": WAYS["around tf.function"],
    "around the inner": Way(between=tf.function),
    "in XLA": WAYS["in XLA"],
}


def squared(f):
    return lambda x, a: f(x, a) ** 2


@functools.cache
def expected(by):
    return Way()(squared(true), *chain([reverse] * len(by), by))(X, A).numpy()


def judged(run, a, exact):
    return verdict(lambda x: run(x, a), np.asarray(exact), X)


def in_words(part):
    """The id of a parameter: modes by their names."""
    if isinstance(part, str) or isinstance(part[0], int):
        return str(part)
    return " then ".join(mode.__name__ for mode in part)


MODES = list(itertools.product([reverse, forward], repeat=2))


def is_run(given, name, way, modes, by):
    if given.startswith("passed") and name not in PASSED:
        return False
    if given == "list":  # graphs alone tell what is read from it
        return way.endswith("tf.function") and forward not in modes
    if forward in modes[: len(by)]:
        # Around functions, TensorFlow has no forward mode for variables, and twice takes long.
        inner = given == "variable" and modes == (reverse, forward) and by == (1, 0)
        return way in ("eager", "in tf.function") or (way == "around the inner" and inner)
    return True


@pytest.mark.parametrize(
    ("given", "name", "way", "modes", "by"),
    [
        pytest.param(
            *case, marks=pytest.mark.long if case[2] != "eager" or forward in case[3] else ()
        )
        for case in spread(
            GIVEN, FORMS, SOME_WAYS, MODES, [(1,), (0, 0), (0, 1), (1, 0)], valid=is_run
        )
    ],
    ids=in_words,
)
def test_derivatives(given, name, way, modes, by):
    """What an operation used and did not make is known, in graphs and in eager execution."""
    f, a = GIVEN[given](name)
    modes = modes[: len(by)]
    run = SOME_WAYS[way](squared(f), *chain(modes, by))
    found = judged(run, a, expected(by))
    if by == (1, 0):
        assert found in LOUD
    elif (by == (0, 1) and given.startswith("tensor") and forward in modes) or (
        given == "list" and len(by) == 2
    ):
        assert found in {"right", *LOUD}
    else:
        assert found == "right"


@pytest.mark.parametrize("name", FORMS)
def test_the_point_alone_by_forward_over_reverse(name):
    """The tape takes the gradient by the variable, too, and nobody asks for that one."""
    f, _ = of_variable(name)
    run = forward(reverse(squared(f)))
    assert judged(run, A, expected((0, 0))) == "right"


@pytest.mark.parametrize("name", PASSED)
def test_the_same_tensor_twice(name):
    twice = lambda x: PASSED[name](hidden, slope)(x, x) ** 2  # noqa: E731
    exact = reverse(lambda x: true(x, x) ** 2)
    np.testing.assert_allclose(reverse(twice)(X), exact(X), rtol=1e-12)
    with pytest.raises(LookupError, match="mixed derivative"):
        reverse(reverse(twice))(X)


class TestTensors:
    """That are closed over."""

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("name", "way", "modes"),
        spread(FORMS, ["eager", "in tf.function"], MODES),
        ids=in_words,
    )
    def test_all_that_a_rule_uses(self, name, way, modes):
        modes = chain(modes, (0, 1))
        run = WAYS[way](lambda x, a: FORMS[name](lambda x: a * x, lambda *_: a)(x), *modes)
        native = WAYS[way](lambda x, a: a * x, *modes)
        assert judged(run, A, 1.0) == judged(native, A, 1.0)

    @pytest.mark.parametrize(("name", "modes"), spread(OF_SLOPE, MODES, together=1), ids=in_words)
    def test_that_the_host_gets_in_a_graph(self, name, modes):
        """Eager execution does not tell it from NumPy, which is a constant."""
        form = OF_SLOPE[name]
        cube = on_host(lambda a: a**3)
        h = lambda x, a: form(lambda x: x * cube(a), lambda *_: cube(a))(x)  # noqa: E731
        run = WAYS["in tf.function"](h, *chain(modes, (0, 1)))
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            assert np.isnan(run(X, A))

    def test_that_the_host_gets_in_a_function_with_all_derivatives(self):
        cube = on_host(lambda a: a**3)
        run = traced(
            reverse(lambda x, a: OF_SLOPE["custom_vjp"](lambda x: x * cube(a), cube)(x), 1)
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match="a tensor that it closes over"):
            run(X, A)

    @WRAPS
    @pytest.mark.parametrize("name", FORMS)
    def test_that_operations_without_gradients_use(self, name, wrap):
        """In a function that has a gradient of its own."""
        step = tf.custom_gradient(lambda a: (tf.cast(a > 0, a.dtype), lambda u: u))
        run = reverse(lambda x, a: FORMS[name](lambda x: x * step(a), lambda _: step(a))(x), 1)
        np.testing.assert_allclose(wrap(run)(X, A), X)
        with pytest.raises((LookupError, tf.errors.OpError), match="mixed derivative"):
            wrap(reverse(run))(X, A)

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


def in_a_thread(f):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(f).result()


def test_a_function_that_an_operation_calls():
    """Eager execution has no gradient of such a call, but a rule gives one."""
    function = tf.function(lambda x, a: x * a).get_concrete_function(X, A)

    def run(x, a):
        def f(x):
            y = tf.raw_ops.PartitionedCall(args=[x, a], Tout=[x.dtype], f=function)[0]
            return y, lambda u: u * a

        return sgtrick.custom_vjp(f)(x)

    np.testing.assert_allclose(reverse(run)(X, A), A)
    with pytest.raises(LookupError, match="that it closes over"):
        reverse(run, 1)(X, A)


ELSEWHERE = {
    "a thread": in_a_thread,
    "py_function in a function": lambda f: tf.function(lambda: tf.py_function(f, [], tf.float64))(),
    "a map of a data set": lambda f: next(
        iter(tf.data.Dataset.range(1).map(lambda _: tf.py_function(f, [], tf.float64)))
    ),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE.values(), ids=ELSEWHERE)
@pytest.mark.parametrize("name", [*FORMS, "custom_vjp"])
def test_while_a_form_is_called_elsewhere(name, elsewhere):
    """Which ends as the function of the first one still runs."""
    times = tf.function(lambda x, a: x * a)

    def f(x, a):
        elsewhere(lambda: reverse(closing_over(X, "with_gradient"))(X))
        return times(x, a)

    run = lambda x, a: (FORMS | OF_SLOPE)[name](lambda x: f(x, a), lambda _: a)(x)  # noqa: E731
    np.testing.assert_allclose(reverse(run)(X, A), A)
    if name in FORMS:
        np.testing.assert_allclose(reverse(run, 1)(X, A), X)
    else:
        with pytest.raises(LookupError, match="that it closes over"):
            reverse(run, 1)(X, A)


def test_a_list_where_a_rule_gives_all_derivatives():
    """Nothing tells what the array was made of."""

    def run(x, a):
        array = tf.TensorArray(a.dtype, 1).write(0, a)
        return OF_SLOPE["custom_vjp"](lambda x: x * array.read(0), lambda x: x)(x)

    with pytest.raises(ValueError, match=r"closes over a tf\.TensorArray.*Read the array"):
        tf.function(run)(X, A)


@WRAPS
def test_gathered_rows_have_sparse_gradients(wrap):
    table = tf.Variable(np.arange(8.0).reshape(4, 2))

    def f(x, factor):
        return factor * tf.reduce_sum(tf.gather(table, [2, 0]) ** 2) * x**3

    form = sgtrick.with_gradient(lambda x: f(x, 1.0), lambda x: 3 * f(x, 1.0) / x)
    with tf.GradientTape():  # by which they may be differentiated again
        by_x, by_table = wrap(lambda x: gradients(form, x, by=[x, table]))(X)
    assert isinstance(by_table, tf.IndexedSlices)
    assert tf.reduce_all(by_table.indices == [2, 0])
    np.testing.assert_allclose(by_x, 42 * 3 * X**2)


STOP = tf.stop_gradient
# Functions of `x` and `w`, of which the latter is stopped in a graph of their own.
STOPPED = {
    "function": lambda x, w: tf.function(lambda: x * STOP(w))(),
    "function in a function": lambda x, w: tf.function(tf.function(lambda: x * STOP(w)))(),
    "vectorized_map": lambda x, w: tf.vectorized_map(lambda a: a * STOP(w), x),
    "map_fn": lambda x, w: tf.map_fn(lambda a: a * STOP(w), x),
    "cond": lambda x, w: tf.cond(x[0] < 9, lambda: x * STOP(w), lambda: x),
    "while_loop": lambda x, w: tf.while_loop(
        lambda i, _: i < 1, lambda i, y: (i + 1, y * STOP(w)), (0, x)
    )[1],
    "scan": lambda x, w: tf.scan(lambda y, a: y + a * STOP(w), x),
    "switch_case": lambda x, w: tf.switch_case(tf.constant(0), [lambda: x * STOP(w)]),
}
BESIDE = {
    "stopped": lambda f, x, w: f(x, w),
    "and used": lambda f, x, w: f(x, w) * w,
    "and used within": lambda f, x, w: f(x * w, w),
}


class TestStopped:
    """What a `custom_vjp` function stops is a constant, wherever it does so."""

    @WRAPS
    @pytest.mark.parametrize(("stopped", "beside"), spread(STOPPED, BESIDE))
    def test_in_a_graph_within(self, stopped, beside, wrap):
        f = STOPPED[stopped]

        def by_both(x, w):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = sgtrick.custom_vjp(lambda x: (BESIDE[beside](f, x, w), lambda u: 3 * u))(x)
            return tape.gradient(y, [x, w])

        x = tf.constant([0.5, 1.0], tf.float64)
        if beside == "stopped":
            by_x, by_w = wrap(by_both)(x, A)
            assert by_w is None
            np.testing.assert_allclose(by_x, [3, 3])
        else:
            with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="closes over"):
                wrap(by_both)(x, A)


def log1pexp_of(e, t):
    """A function and its rule, with what was computed from the point before, as documented."""
    return sgtrick.custom_vjp(
        lambda x: (tf.math.log(1 + e) + 0 * x, lambda u: u * (1 - 2 / (2 + t)))
    )


class TestMadeOfTheArgument:
    """What a function closes over, and was computed from its argument, counts as the argument."""

    POINT = tf.constant([0.5, 1.0], tf.float64)

    @staticmethod
    def documented(x):
        e = tf.exp(x)
        return log1pexp_of(e, 2 * e)(x)

    @staticmethod
    def of_jacobian(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = TestMadeOfTheArgument.documented(x)
        return tf.linalg.diag_part(tape.jacobian(y, x))

    @staticmethod
    def of_a_function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = TestMadeOfTheArgument.documented(x)
        return tf.function(lambda: tape.gradient(y, x))()

    @staticmethod
    def of_a_ragged_tensor(x):
        ragged = tf.RaggedTensor.from_row_lengths(x, [0, 2])
        with tf.GradientTape() as tape:
            tape.watch(ragged)
            y = TestMadeOfTheArgument.documented(ragged.flat_values)
        return tape.gradient(y, ragged).flat_values

    @pytest.mark.parametrize("way", ["of_jacobian", "of_a_function", "of_a_ragged_tensor"])
    def test_eagerly_in_a_gradient_that_is_traced(self, way):
        found = getattr(self, way)(self.POINT)
        np.testing.assert_allclose(found, tf.sigmoid(self.POINT), rtol=1e-12)

    INNER = {
        "function": lambda f, _: tf.function(f)(),
        "branch": lambda f, x: tf.cond(x[0] < 9, f, lambda: x),
        "switch": lambda f, _: tf.switch_case(tf.constant(0), [f, f]),
        "loop": lambda f, x: tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, f()), (0, x))[
            1
        ],
        "function in a branch": lambda f, x: tf.cond(x[0] < 9, tf.function(f), lambda: x),
    }

    @pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
    def test_in_an_inner_graph(self, inner):
        """Which captures what is closed over before it captures the argument."""

        def run(x):
            e = tf.exp(x)

            def f():
                t = 2 * e
                return log1pexp_of(e, t)(x)

            return inner(f, x)

        found = tf.function(reverse(run))(self.POINT)
        np.testing.assert_allclose(found, tf.sigmoid(self.POINT), rtol=1e-12)

    def test_an_argument_of_an_inner_function(self):
        """Nothing tells that it is what the closed-over tensor was computed from."""

        def run(x):
            e = tf.exp(x)
            inner = tf.function(lambda x: log1pexp_of(e, 2 * e)(x))
            return inner(x), inner(2 * x)

        found = tf.function(reverse(run))(self.POINT)
        assert np.all(np.isnan(found))
