"""`custom_vjp` with a JVP rule beside its VJP rule."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import WAYS, WRAPS, derivative, forward_derivative, on_host, pushed

X = tf.constant(np.random.default_rng(3).normal(size=(4,)))
MAGNITUDE = 3.0  # of the JVP rule, so that it can be told from the transpose of the other


def both_rules(f, jvp):
    form = sgtrick.custom_vjp(f)
    form.defjvp(jvp)
    return form


def sine(x):
    return tf.sin(x), lambda u: u * tf.cos(x)


def made(push=MAGNITUDE):
    """`sin`, whose VJP rule has its slope, and whose JVP rule `push` times its slope."""
    form = both_rules(sine, lambda p, t: (form(*p), push * tf.cos(p[0]) * t[0]))
    return form


@pytest.mark.parametrize("mode", [derivative, forward_derivative])
@pytest.mark.parametrize("way", WAYS)
def test_each_mode_uses_its_rule(way, mode):
    """Beside a gradient that is None: the JVP rule has tangents of all arguments, and all count."""
    form = both_rules(
        lambda x, w: (w * tf.sin(x), lambda u: (u * w * tf.cos(x), None)),
        lambda p, t: (None, p[1] * tf.cos(p[0]) * t[0] + tf.sin(p[0]) * t[1]),
    )
    expected = 2 * X * np.cos(X) + (2 * np.sin(X) if mode is forward_derivative else 0)
    h = lambda x: form(x, 2 * x)  # noqa: E731
    np.testing.assert_allclose(WAYS[way](h, mode)(X), expected, rtol=1e-12)
    if mode is derivative and way in ("eager", "in tf.function"):
        slope = 2 * np.cos(X) - 2 * X * np.sin(X)
        twice = WAYS[way](derivative(h), forward_derivative)
        np.testing.assert_allclose(twice(X), slope, rtol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_rule_that_calls_the_function_in_a_function(way):
    """It does not recurse."""
    h = both_rules(sine, lambda p, t: (tf.function(h)(*p), MAGNITUDE * tf.cos(p[0]) * t[0]))
    came = WAYS[way](h, forward_derivative)(X)
    np.testing.assert_allclose(came, MAGNITUDE * np.cos(X))


# What the second derivative is in terms of the true one.
SECOND = {
    # By the VJP rule, differentiated as TensorFlow does it.
    "reverse over reverse": (derivative, derivative, 1),
    "forward over reverse": (forward_derivative, derivative, 1),
    # By the JVP rule.
    "reverse over forward": (derivative, forward_derivative, MAGNITUDE),
    "forward over forward": (forward_derivative, forward_derivative, MAGNITUDE),
}


@WRAPS
@pytest.mark.parametrize(("outer", "inner", "magnitude"), SECOND.values(), ids=SECOND)
def test_second_derivatives_are_those_of_the_rule_that_was_used(outer, inner, magnitude, wrap):
    came = wrap(outer(inner(made())))(X)
    np.testing.assert_allclose(came, -magnitude * np.sin(X))


def test_a_rule_that_has_no_transpose():
    """A VJP rule that calls the host: forward mode needs the other one."""
    cos = on_host(np.cos)

    def f(x):
        return tf.sin(x), lambda u: on_host(np.multiply)(u, cos(x))

    h = both_rules(f, lambda p, t: (None, tf.cos(p[0]) * t[0]))
    for way in ("eager", "in tf.function", "around tf.function"):
        np.testing.assert_allclose(WAYS[way](h, forward_derivative)(X), np.cos(X))
    np.testing.assert_allclose(derivative(h)(X), np.cos(X))
    with pytest.raises((LookupError, tf.errors.OpError), match="defjvp"):
        forward_derivative(sgtrick.custom_vjp(f))(X)


def test_structures_arguments_and_methods():
    class Model:
        scale = 7.0

        @sgtrick.custom_vjp
        def f(self, p, n, b=2.0):
            a = p["a"]
            rule = lambda y, z: ({"a": y * b + self.scale * z}, None, tf.reduce_sum(y * a))  # noqa: E731
            return {"y": a * b, "z": [self.scale * a]}, rule

        @f.defjvp
        def _(self, primals, tangents):
            (p, _, b), (t, of_n, of_b) = primals, tangents
            assert of_n is None
            moved = b * t["a"] + (0.0 if of_b is None else p["a"] * of_b)
            return None, {"y": moved, "z": [self.scale * t["a"]]}

    def run(a, b):
        return Model().f({"a": a}, tf.constant(3), b=b)

    b, along = tf.constant(1.5, tf.float64), tf.range(4, dtype=tf.float64)
    with tf.autodiff.ForwardAccumulator([X, b], [along, 2 * tf.ones_like(b)]) as accumulator:
        y = run(X, b)
    moved = accumulator.jvp(y)
    np.testing.assert_allclose(moved["y"], 1.5 * along + 2 * X)
    np.testing.assert_allclose(moved["z"][0], 7 * along)
    np.testing.assert_allclose(pushed(lambda a: run(a, b), X, along)["y"], 1.5 * along)


@pytest.mark.parametrize(
    ("jvp", "message"),
    [
        (3, "jvp must be a function, got int"),
        # As with `custom_jvp`, whose tests have the others.
        (lambda p, t: t[0], r"jvp of sine must return \(primal_out, tangent_out\), got"),
    ],
)
def test_misuse(jvp, message):
    with pytest.raises(TypeError, match=message):
        forward_derivative(both_rules(sine, jvp))(X)


@WRAPS
class TestWhatTheJvpRuleDoesNotSay:
    def test_the_derivative_by_a_variable(self, wrap):
        v = tf.Variable(2.0, dtype=tf.float64)
        f = both_rules(
            lambda x: (v * x, lambda u, variables: (u * v, [tf.reduce_sum(u * x)])),
            lambda p, t: (None, v * t[0]),
        )
        np.testing.assert_allclose(wrap(forward_derivative(f))(X), np.full(4, 2.0))
        by_v = forward_derivative(lambda _: f(X))
        with pytest.raises((LookupError, tf.errors.OpError), match="variable that it reads, but"):
            wrap(lambda: by_v(v))()

    def test_a_second_derivative_that_it_loses(self, wrap):
        """It calls the host, though the VJP rule does not."""
        cos = on_host(np.cos)
        h = both_rules(sine, lambda p, t: (None, cos(p[0]) * t[0]))
        np.testing.assert_allclose(wrap(forward_derivative(h))(X), np.cos(X))
        assert np.isnan(wrap(derivative(forward_derivative(h)))(X)).all()


@pytest.mark.parametrize("mode", ["full", "random"])
def test_check_gradient(mode):
    report = sgtrick.check_gradient(made(1.0), X, mode=mode)
    assert report.passed
    forward = [e for e in report.entries if e.name.endswith(", forward mode")]
    assert 2 * len(forward) == len(report.entries)
    assert all(e.embedded == pytest.approx(e.numerical, rel=1e-6) for e in forward)
    with pytest.raises(sgtrick.GradientCheckError, match=r"wrong\b.*forward mode"):
        sgtrick.check_gradient(made(1.01), X, mode=mode)


def test_a_sparse_gradient_runs_its_rule_once():
    calls = []

    def first(x):
        def grad_fn(u):
            calls.append(u)
            return tf.IndexedSlices(u, tf.constant([0]), tf.constant([4]))

        return x[:1], grad_fn

    h = both_rules(first, lambda p, t: (None, t[0][:1]))
    with tf.GradientTape() as outer:  # so that derivatives of the gradient are recorded
        outer.watch(X)
        gradient = derivative(h)(X)
    np.testing.assert_array_equal(gradient, [1, 0, 0, 0])
    assert len(calls) == 1
