"""What a caller's function finds around it, wherever its derivatives are computed."""

import contextvars
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, POINTS, exact
from matrix import spread
from shared import EXECUTED, derivative, forward_derivative, mapped, mapped_with_loops, with_jvp

FACTOR = contextvars.ContextVar("FACTOR", default=np.nan)
LOCAL = threading.local()
# Later ones keep it where no other thread can be given it.
SHARES_THREAD_DATA = sys.version_info < (3, 13)


def both_rules(f, slope):
    form = OF_SLOPE["custom_vjp"](f, slope)
    form.defjvp(lambda xs, ts: (form(*xs), slope(xs[0]) * ts[0]))
    return form


def itself(f, slope):
    """A rule that calls its own function."""
    form = sgtrick.custom_jvp(f)
    form.defjvp(lambda xs, ts: (form(*xs), slope(xs[0]) * ts[0]))
    return form


FORMS = OF_SLOPE | {"both rules": both_rules, "custom_jvp of itself": itself}

# Each with the order of the derivative.
WAYS = {
    "forward": (forward_derivative, 1),
    "forward in a function": (lambda f: tf.function(forward_derivative(f)), 1),
    "forward around a function": (lambda f: forward_derivative(tf.function(f)), 1),
    "forward around a map": (lambda f: forward_derivative(mapped(f)), 1),
    "forward twice": (lambda f: forward_derivative(forward_derivative(f)), 2),
    "forward over reverse": (lambda f: forward_derivative(derivative(f)), 2),
    "reverse over forward": (lambda f: derivative(forward_derivative(f)), 2),
    "forward over a map of reverse": (lambda f: forward_derivative(mapped(derivative(f))), 2),
}


class TestContext:
    @pytest.fixture(autouse=True)
    def values(self):
        token = FACTOR.set(2.0)
        LOCAL.factor = 1.5
        yield
        FACTOR.reset(token)
        del LOCAL.factor

    @pytest.mark.parametrize(("form", "way"), spread(FORMS, WAYS, together=1))
    def test_is_that_of_the_caller(self, form, way):
        def times(f):
            def factor():
                return getattr(LOCAL, "factor", np.nan) if SHARES_THREAD_DATA else 1.5

            return lambda x: FACTOR.get() * factor() * f(x)

        h = FORMS[form](times(tf.asinh), times(lambda x: (1 + x**2) ** -0.5))
        differentiated, order = WAYS[way]
        found = differentiated(h)(tf.constant(POINTS))
        np.testing.assert_allclose(found, 3 * exact(order), rtol=1e-9)

    @pytest.mark.skipif(not SHARES_THREAD_DATA, reason="no thread has the data of another one")
    @pytest.mark.parametrize("form", ["custom_vjp", "custom_jvp"])
    def test_of_a_rule_lasts(self, form):
        """What it keeps in thread-local data for the first time is there afterwards."""
        kept = threading.local()

        def slope(x):
            kept.calls = getattr(kept, "calls", 0) + 1
            return (1 + x**2) ** -0.5

        forward_derivative(FORMS[form](tf.asinh, slope))(tf.constant(POINTS))
        assert kept.calls


W = tf.Variable([2.0, 3.0, 0.5], dtype=tf.float64)
READ = {
    "operations": lambda x: W * x,
    "a branch": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: W * x, lambda: x),
    "a function in a branch": lambda x: tf.cond(
        tf.reduce_sum(x) > 0, lambda: tf.function(lambda: W * x)(), lambda: x
    ),
}
BY_VARIABLE = {
    "with_gradient": lambda f: sgtrick.with_gradient(f, lambda x: W + 0 * x),
    "from_value_and_gradient": lambda f: sgtrick.from_value_and_gradient(
        lambda x: (f(x), W + 0 * x)
    ),
    "custom_jvp": lambda f: with_jvp(lambda xs, ts: (None, W * ts[0]), f),
}
ROOTS = {
    "implicit_root": lambda f: lambda x: sgtrick.implicit_root(lambda y: y - f(x), f(x)),
    "implicit_reparameterize": lambda f: (
        lambda x: sgtrick.implicit_reparameterize(lambda y: y - f(x), f(x))
    ),
    "solve": lambda f: (
        lambda x: sgtrick.implicit_root(lambda y: y - f(x), f(x), solve=lambda matvec, b: matvec(b))
    ),
}


@pytest.mark.parametrize(
    ("form", "read"),
    [*spread(BY_VARIABLE, READ, together=1), *((form, "operations") for form in ROOTS)],
)
@pytest.mark.parametrize("wrap", EXECUTED.values(), ids=EXECUTED)
def test_a_tangent_of_a_variable(form, read, wrap):
    """In a function the accumulator knows what the function captured for the variable."""
    x = tf.constant(POINTS)

    def along_variable(x):
        with tf.autodiff.ForwardAccumulator(W, tf.ones_like(W)) as accumulator:
            y = (BY_VARIABLE | ROOTS)[form](READ[read])(x)
        return accumulator.jvp(y)

    np.testing.assert_allclose(wrap(along_variable)(x), x)


def called(f):
    return lambda x: tf.function(f)(x)


def looped(f):
    return lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, f(y)), (0, x))[1]


# In a function, TensorFlow's own tangents of the first are None, and of the second half of it.
LOST = {
    "a function": called(READ["operations"]),
    "a function, and without": lambda x: (called(READ["operations"])(x) + W * x) / 2,
    "a branch in a function": called(READ["a branch"]),
    "a loop in a function": called(looped(READ["operations"])),
}
STOPPED = {
    "stopped": lambda x: tf.stop_gradient(W) * x,
    "stopped in a function": called(lambda x: tf.stop_gradient(W) * x),
    "the result stopped": lambda x: tf.stop_gradient(called(READ["operations"])(x)),
    "in steps": called(lambda x: (tf.floor(W) + tf.round(W) + W // 0.3) * x),
    "in integers": lambda x: tf.function(lambda n: tf.cast(n, x.dtype) * x)(tf.cast(W, tf.int32)),
}


def tangent_by_variable(f, x):
    with tf.autodiff.ForwardAccumulator(W, tf.ones_like(W)) as accumulator:
        y = f(x)
    return accumulator.jvp(y, unconnected_gradients="zero")


class TestATangentThatTensorFlowLoses:
    @pytest.mark.parametrize(("form", "read"), spread(BY_VARIABLE, LOST, together=1))
    def test_is_an_error(self, form, read):
        h = BY_VARIABLE[form](LOST[read])
        with pytest.raises(tf.errors.InvalidArgumentError, match="loses the tangent of the variab"):
            tf.function(tangent_by_variable, autograph=False)(h, tf.constant(POINTS))

    @pytest.mark.parametrize(("form", "read"), spread(BY_VARIABLE, LOST | STOPPED, together=1))
    def test_is_not_asked_for(self, form, read):
        """Neither of what is stopped, nor in reverse mode, nor along the arguments."""
        h, x = BY_VARIABLE[form]((LOST | STOPPED)[read]), tf.constant(POINTS)
        if read in STOPPED:
            found = tf.function(tangent_by_variable, autograph=False)(h, x)
            np.testing.assert_array_equal(found, tf.zeros_like(x))
        else:
            along = tf.function(forward_derivative(h), autograph=False)
            np.testing.assert_allclose(along(x), W)


# With the root in numbers: TensorFlow cannot differentiate `f` itself.
@pytest.mark.parametrize(
    ("read", "form", "wrap"),
    [
        ("a branch", "implicit_root", "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("a branch", "solve", "eager"),
                ("a loop", "implicit_root", "eager"),
                ("a loop", "solve", "tf.function"),
                ("a loop", "implicit_root", "tf.function"),
                ("a function in a branch", "implicit_root", "eager"),
            ]
        ),
    ],
)
def test_a_tangent_of_a_root(read, form, wrap):
    """The residual reads the variable where TensorFlow cannot push its tangent on."""
    f = (READ | {"a loop": looped(READ["operations"])})[read]
    solve = {"implicit_root": None, "solve": lambda matvec, b: matvec(b)}[form]

    def root(x):
        return sgtrick.implicit_root(lambda y: y - f(x), [2.0, 3.0, 0.5] * x, solve=solve)

    x = tf.constant(POINTS)
    np.testing.assert_allclose(EXECUTED[wrap](lambda x: tangent_by_variable(root, x))(x), x)


FIXED = tf.Variable([2.0, 3.0, 0.5], dtype=tf.float64, trainable=False)


@pytest.mark.parametrize("read", [lambda x: FIXED * x, called(lambda x: FIXED * x)])
def test_a_tangent_of_a_variable_that_a_vjp_rule_does_not_cover(read):
    h = sgtrick.custom_vjp(lambda x: (read(x), lambda u: u * FIXED))

    @tf.function(autograph=False)
    def along_variable(x):
        with tf.autodiff.ForwardAccumulator(FIXED, tf.ones_like(FIXED)) as accumulator:
            y = h(x)
        return accumulator.jvp(y)

    with pytest.raises(tf.errors.InvalidArgumentError, match="respect to a tensor that it closes"):
        along_variable(tf.constant(POINTS))


def _in_loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.asinh(x) + 0 * y), (0, x))[1]


# The inverse hyperbolic sine, by what forward mode cannot differentiate.
HIDDEN = {
    "a branch": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.asinh(x), lambda: x),
    "switch_case": lambda x: tf.switch_case(
        tf.cast(tf.reduce_sum(x) > 0, tf.int32), [lambda: x, lambda: tf.asinh(x)]
    ),
    "a loop": _in_loop,
    "no gradient": lambda x: tf.asinh(x) + 0 * tf.raw_ops.IgammaGradA(a=x**2, x=x**2),
    "an engine without jvp": sgtrick.from_numpy(
        np.arcsinh, vjp=lambda x, u: u * x, event_ndims=0, vectorized=True
    ),
    "a clipped gradient": lambda x: sgtrick.clip_gradient(tf.asinh(x), -1.0, 1.0),
}


@pytest.mark.parametrize(
    ("f", "make", "wrap"),
    spread(HIDDEN, {"custom_vjp": 0, "both rules": 0}, EXECUTED, together=1),
)
def test_forward_mode_does_not_look_into_a_function_with_a_vjp_rule(f, make, wrap):
    h = FORMS[make](HIDDEN[f], lambda x: (1 + x**2) ** -0.5)
    found = EXECUTED[wrap](forward_derivative(h))(tf.constant(POINTS))
    np.testing.assert_allclose(found, exact(1), rtol=1e-9)


@pytest.mark.parametrize("wrap", EXECUTED.values(), ids=EXECUTED)
@pytest.mark.parametrize("outer", ["reverse", "forward"])
def test_a_rule_that_closes_over_what_its_function_computes(outer, wrap):
    """By a variable and by the point, in either order: both depend on the intermediate result."""

    @sgtrick.custom_vjp
    def h(x):
        slope = W * tf.cos(x)
        return W * tf.sin(x), lambda u, variables: (u * slope, [u * tf.sin(x)])

    def mixed(x):
        along = tf.ones_like(x)
        if outer == "reverse":
            with tf.GradientTape() as tape:
                tangent = forward_derivative(h)(x)
            return tape.gradient(tangent, W)
        with tf.autodiff.ForwardAccumulator(x, along) as accumulator:
            with tf.GradientTape() as tape:
                y = h(x)
            gradient = tape.gradient(y, W)
        return accumulator.jvp(gradient)

    np.testing.assert_allclose(wrap(mixed)(tf.constant(POINTS)), np.cos(POINTS))


# Linear functions of three numbers, whose tangents are `tf.IndexedSlices` in eager execution.
SUMMED = {
    "segments": lambda t: tf.math.unsorted_segment_sum(t, [2, 0, 2], 3),
    "sorted segments": lambda t: tf.math.segment_sum(t, [0, 2, 2]),
    "scattered": lambda t: tf.scatter_nd([[2], [0], [2]], t, [3]),
    "stitched": lambda t: tf.dynamic_stitch([[2, 0], [1]], [t[:2], t[2:]]),
    "ragged rows": lambda t: tf.reduce_sum(tf.RaggedTensor.from_row_lengths(t, [1, 0, 2]), 1),
}


class TestTangentsThatAreSlices:
    """As of sums over segments, and of upstream gradients behind `tf.gather`."""

    ALONG = tf.ones(3, tf.float64)

    @pytest.mark.parametrize(
        ("form", "sums", "wrap"),
        [*spread(FORMS, SUMMED, ["eager"], together=1), ("custom_vjp", "segments", "tf.function")],
    )
    def test_of_arguments(self, form, sums, wrap):
        h, summed = FORMS[form](tf.asinh, lambda x: (1 + x**2) ** -0.5), SUMMED[sums]
        found = EXECUTED[wrap](forward_derivative(lambda x: h(summed(x))))(tf.constant(POINTS))
        expected = exact(1, summed(tf.constant(POINTS)).numpy()) * summed(self.ALONG)
        np.testing.assert_allclose(found, expected, rtol=1e-9)

    @pytest.mark.parametrize(
        ("form", "sums", "where", "wrap"),
        [
            *spread(BY_VARIABLE, SUMMED, ["before", "within"], ["eager"], together=1),
            ("with_gradient", "segments", "before", "tf.function"),
        ],
    )
    def test_of_what_is_closed_over(self, form, sums, where, wrap):
        summed, x = SUMMED[sums], tf.constant(POINTS)

        def run(t):
            given = summed(t) if where == "before" else t
            within = (lambda t: t) if where == "before" else summed
            return BY_VARIABLE[form](lambda x: within(given) * x)(x)

        found = EXECUTED[wrap](forward_derivative(run))(tf.constant(POINTS))
        np.testing.assert_allclose(found, summed(self.ALONG) * x)

    @pytest.mark.parametrize("form", OF_SLOPE)
    def test_of_upstream_gradients(self, form):
        h = FORMS[form](tf.asinh, lambda x: (1 + x**2) ** -0.5)
        twice = forward_derivative(derivative(lambda x: tf.gather(h(x), [1, 1, 2]) ** 2))
        expected = [0, 2, 1] * (2 * exact(1) ** 2 + 2 * exact(0) * exact(2))
        np.testing.assert_allclose(twice(tf.constant(POINTS)), expected, rtol=1e-9)


def test_forward_mode_around_a_mapped_loop_says_what_to_do():
    h = FORMS["custom_vjp"](tf.sin, tf.cos)
    loop = lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, h(y)), (0, x))[1]  # noqa: E731
    f, x = mapped_with_loops(loop), tf.constant(POINTS)
    with pytest.raises(Exception, match=r"forward mode.*Call the map in a tf\.function"):
        forward_derivative(f)(x)
    np.testing.assert_allclose(forward_derivative(tf.function(f))(x), np.cos(POINTS))
