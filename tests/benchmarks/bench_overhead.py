"""What sgtrick costs where its own share is large: eager calls, maps, second derivatives, roots.

    python -m pytest -s tests/benchmarks/bench_overhead.py

Each row is one call, forward and backward, on vectors so short that only the overhead is left,
beside the same in TensorFlow alone, which is `tf.custom_gradient` where the row does not say
otherwise. In processor time; it prints the medians of the ratios, turn by turn.
"""

import time

import pytest
import tensorflow as tf
from bench_custom_gradient import forward_and_backward

import sgtrick
from shared import derivative, with_jvp


@pytest.fixture
def row(take_turns):
    """Measures a row of the table."""

    def measure(what, native, ours, x, repeats=20):
        rivals = {"TensorFlow": native, "sgtrick": ours}
        clock = time.process_time
        take_turns(what, rivals, (x,), 50_000 // repeats, clock=clock)

    return measure


def vector(n=100):
    return tf.random.stateless_normal([n], [0, 1])


def log1pexp(x):
    return tf.math.log(1 + tf.exp(x))


def value_and_rule(x):
    return log1pexp(x), lambda u: u * tf.sigmoid(x)


def jvp(primals, tangents):
    return log1pexp(*primals), tf.sigmoid(primals[0]) * tangents[0]


NATIVE = tf.custom_gradient(value_and_rule)
FORMS = {
    "custom_vjp": sgtrick.custom_vjp(value_and_rule),
    "with_gradient": sgtrick.with_gradient(log1pexp, tf.sigmoid),
    "custom_jvp": with_jvp(jvp, log1pexp),
}


@pytest.mark.parametrize("name", FORMS)
def test_eager_gradient(row, name):
    native, ours = map(forward_and_backward, (NATIVE, FORMS[name]))
    row(f"{name}, eager", native, ours, vector())


def test_straight_through(row):
    def by_hand(x):
        return tf.stop_gradient(tf.round(x)) + (x - tf.stop_gradient(x))

    def ours(x):
        return sgtrick.straight_through(tf.round(x), x)

    what = "straight_through, eager; by hand"
    row(what, forward_and_backward(by_hand), forward_and_backward(ours), vector())


def layer(x):
    """A hundred operations."""
    for _ in range(50):
        x = tf.tanh(x) * 1.01
    return x


@pytest.mark.parametrize("name", ["custom_vjp", "with_gradient"])
def test_a_layer(row, name):
    """The rule has two operations, so that the layer itself is what takes the time."""

    def value_and_rule(x):
        return layer(x), lambda u: u * tf.cos(x)

    native = forward_and_backward(tf.custom_gradient(value_and_rule))
    ours = {
        "custom_vjp": sgtrick.custom_vjp(value_and_rule),
        "with_gradient": sgtrick.with_gradient(layer, tf.cos),
    }
    what = f"{name} of 100 operations, eager"
    row(what, native, forward_and_backward(ours[name]), vector(), repeats=4)


def test_mapped(row):
    def run(form):
        return tf.function(forward_and_backward(lambda x: tf.vectorized_map(form, x)))

    what = "custom_jvp, 5,000 members; autodiff"
    row(what, run(log1pexp), run(FORMS["custom_jvp"]), vector(5_000))


def residual(x, a):
    return x**3 + x - a


def newton_step(x, a):
    return x - residual(x, a) / (3 * x**2 + 1)


def test_root(row):
    def unrolled(a):
        x = tf.zeros_like(a)
        for _ in range(10):
            x = newton_step(x, a)
        return x

    a = vector()
    root = unrolled(a)

    def ours(a):
        return sgtrick.implicit_root(residual, root, a, batch_ndims=1)

    what = "implicit_root, eager; Newton's method"
    row(what, forward_and_backward(unrolled), forward_and_backward(ours), a, repeats=4)


def calling_itself(decorator, k):
    """The exponential function, whose rule calls it as often as this says."""

    @decorator
    def exp(x):
        return tf.exp(x), lambda u: u * tf.add_n([exp(x) for _ in range(k)]) / k

    return exp


SECOND = {
    "custom_vjp": FORMS["custom_vjp"],
    "with_gradient": FORMS["with_gradient"],
    "a rule in itself": 1,
    "3 times in itself": 3,
    "5 times in itself": 5,
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivative(row, name):
    native, ours = NATIVE, SECOND[name]
    if isinstance(ours, int):
        native, ours = (calling_itself(d, ours) for d in (tf.custom_gradient, sgtrick.custom_vjp))
    native, ours = (derivative(derivative(f)) for f in (native, ours))
    what = f"second derivative, {name}"
    row(what, native, ours, vector(), repeats=4)
