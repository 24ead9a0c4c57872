"""`custom_vjp` with a JVP rule beside its VJP rule."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import traced
from shared import RUN_IN, WRAPS, derivative, forward_derivative, mapped, on_host

X = np.random.default_rng(3).normal(size=(4,))
MAGNITUDE = 3.0  # of the JVP rule, so that it can be told from the transpose of the other


def made(push=MAGNITUDE):
    """`sin`, whose VJP rule has its slope, and whose JVP rule `push` times its slope."""

    @sgtrick.custom_vjp
    def f(x):
        return tf.sin(x), lambda u: u * tf.cos(x)

    @f.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), push * tf.cos(x) * t

    return f


REVERSE = {name: functools.partial(run, derivative) for name, run in RUN_IN.items()}
# Forward mode around vectorized_map is an error.
FORWARD = {
    name: functools.partial(run, forward_derivative)
    for name, run in RUN_IN.items()
    if name != "around vectorized_map"
}


@pytest.mark.parametrize("way", REVERSE)
def test_reverse_mode_uses_the_vjp_rule(way):
    np.testing.assert_allclose(REVERSE[way](made())(tf.constant(X)), np.cos(X))


@pytest.mark.parametrize("way", FORWARD)
def test_forward_mode_uses_the_jvp_rule(way):
    np.testing.assert_allclose(FORWARD[way](made())(tf.constant(X)), MAGNITUDE * np.cos(X))


def test_around_vectorized_map_forward_mode_is_nan():
    """TensorFlow cannot map the one rule as the derivative of the other."""
    assert np.isnan(forward_derivative(mapped(made()))(tf.constant(X))).all()


def over(outer, inner):
    return lambda f: outer(inner(f))


SECOND = {
    # By the VJP rule, differentiated as TensorFlow does it.
    "reverse over reverse": (over(derivative, derivative), 1),
    "forward over reverse": (over(forward_derivative, derivative), 1),
    # By the JVP rule.
    "reverse over forward": (over(derivative, forward_derivative), MAGNITUDE),
    "forward over forward": (over(forward_derivative, forward_derivative), MAGNITUDE),
}


@pytest.mark.parametrize("wrap", [lambda f: f, traced], ids=["eager", "tf.function"])
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_those_of_the_rule_that_was_used(name, wrap):
    law, magnitude = SECOND[name]
    came = wrap(law(made()))(tf.constant(X))
    np.testing.assert_allclose(came, -magnitude * np.sin(X))


def test_a_rule_that_has_no_transpose():
    """A VJP rule that calls the host: forward mode needs the other one."""
    cos = on_host(np.cos)

    def f(x):
        return tf.sin(x), lambda u: on_host(np.multiply)(u, cos(x))

    without, h = sgtrick.custom_vjp(f), sgtrick.custom_vjp(f)
    h.defjvp(lambda primals, tangents: (None, tf.cos(primals[0]) * tangents[0]))
    x = tf.constant(X)
    for name, way in FORWARD.items():
        if name not in ("compiled", "in vectorized_map"):  # host calls
            np.testing.assert_allclose(way(h)(x), np.cos(X))
    np.testing.assert_allclose(derivative(h)(x), np.cos(X))
    with pytest.raises((LookupError, tf.errors.OpError), match="defjvp"):
        forward_derivative(without)(x)


def test_structures_arguments_and_methods():
    class Model:
        def __init__(self, scale):
            self.scale = scale

        @sgtrick.custom_vjp
        def f(self, p, n, b=2.0):
            y = {"y": p["a"] ** tf.cast(n, b.dtype) * b, "z": [self.scale * p["a"]]}

            def grad_fn(z, y):
                by_a = self.scale * z + 3 * p["a"] ** 2 * b * y
                return {"a": by_a}, None, tf.reduce_sum(y * p["a"] ** 3)

            return y, lambda y, z: grad_fn(z, y)

        @f.defjvp
        def _(self, primals, tangents):
            (p, _, b), (t, of_n, of_b) = primals, tangents
            assert of_n is None
            y = {"y": p["a"] ** 3 * b, "z": [self.scale * p["a"]]}
            moved = 3 * p["a"] ** 2 * b * t["a"] + (0.0 if of_b is None else p["a"] ** 3 * of_b)
            return y, {"y": moved, "z": [self.scale * t["a"]]}

    a, b = tf.constant(X), tf.constant(1.5, tf.float64)
    t = tf.constant(np.arange(4.0))
    run = lambda b: Model(7.0).f({"a": a}, tf.constant(3), b=b)  # noqa: E731
    with tf.autodiff.ForwardAccumulator([a, b], [t, tf.constant(2.0, tf.float64)]) as accumulator:
        y = run(b)
    moved = accumulator.jvp(y)
    np.testing.assert_allclose(moved["y"], 3 * X**2 * 1.5 * t + 2 * X**3)
    np.testing.assert_allclose(moved["z"][0], 7 * t)
    with tf.autodiff.ForwardAccumulator(a, t) as accumulator:
        y = run(b)
    np.testing.assert_allclose(accumulator.jvp(y)["y"], 3 * X**2 * 1.5 * t)


class TestErrors:
    def test_of_what_the_rule_returns(self):
        """As with `custom_jvp`, whose tests have the others."""

        @sgtrick.custom_vjp
        def sine(x):
            return tf.sin(x), lambda u: u * tf.cos(x)

        sine.defjvp(lambda primals, tangents: tangents[0])
        message = r"jvp of sine must return \(primal_out, tangent_out\), got"
        with pytest.raises(TypeError, match=message):
            forward_derivative(sine)(tf.constant(X))

    def test_no_function(self):
        with pytest.raises(TypeError, match="jvp must be a function, got int"):
            made().defjvp(3)

    @WRAPS
    def test_by_a_variable(self, wrap):
        v = tf.Variable(2.0, dtype=tf.float64)

        @sgtrick.custom_vjp
        def f(x):
            return v * x, lambda u, variables: (u * v, [tf.reduce_sum(u * x)])

        f.defjvp(lambda primals, tangents: (None, v * tangents[0]))
        x = tf.constant(X)
        np.testing.assert_allclose(wrap(forward_derivative(f))(x), np.full(4, 2.0))

        def by_the_variable():
            with tf.autodiff.ForwardAccumulator(v, tf.ones_like(v)) as accumulator:
                y = f(x)
            return accumulator.jvp(y)

        with pytest.raises((LookupError, tf.errors.OpError), match="variable that it reads, but"):
            wrap(by_the_variable)()

    @WRAPS
    def test_a_second_derivative_that_the_jvp_rule_loses(self, wrap):
        """It calls the host, though the VJP rule does not."""
        h = sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: u * tf.cos(x)))
        cos = on_host(np.cos)
        h.defjvp(lambda primals, tangents: (None, cos(primals[0]) * tangents[0]))
        x = tf.constant(X)
        np.testing.assert_allclose(wrap(forward_derivative(h))(x), np.cos(X))
        assert np.isnan(wrap(derivative(forward_derivative(h)))(x)).all()


def test_a_rule_that_calls_the_function_in_a_function():
    """It does not recurse."""
    h = sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: u * tf.cos(x)))

    @h.defjvp
    def _(primals, tangents):
        y = tf.function(h)(*primals)
        return y, tf.cos(primals[0]) * tangents[0]

    for way in FORWARD.values():
        np.testing.assert_allclose(way(h)(tf.constant(X)), np.cos(X))


@pytest.mark.parametrize("mode", ["full", "random"])
class TestCheckGradient:
    def test_of_equal_rules(self, mode):
        report = sgtrick.check_gradient(made(1.0), X, mode=mode)
        assert report.passed
        (entry,) = [e for e in report.entries if e.name == "forward mode"]
        assert entry.embedded == pytest.approx(entry.numerical, rel=1e-6)

    def test_of_different_rules(self, mode):
        with pytest.raises(sgtrick.GradientCheckError, match=r"wrong\b.*forward mode"):
            sgtrick.check_gradient(made(1.01), X, mode=mode)


def test_a_sparse_gradient_runs_its_rule_once():
    calls = []

    @sgtrick.custom_vjp
    def first(x):
        def grad_fn(u):
            calls.append(u)
            return tf.IndexedSlices(u, tf.constant([0]), tf.constant([4]))

        return x[:1], grad_fn

    first.defjvp(lambda primals, tangents: (None, tangents[0][:1]))
    x = tf.constant(X)
    with tf.GradientTape() as outer:  # so that derivatives of the gradient are recorded
        outer.watch(x)
        gradient = derivative(first)(x)
    np.testing.assert_array_equal(gradient, [1, 0, 0, 0])
    assert len(calls) == 1
