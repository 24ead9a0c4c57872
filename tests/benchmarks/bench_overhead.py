"""What sgtrick costs where its own share is large: eager calls, maps, second derivatives, roots.

    python -m pytest -s tests/benchmarks/bench_overhead.py

Each row is one call on vectors so small that only the overhead is left, beside the same in
TensorFlow alone, in processor time. It prints the medians of the ratios, turn by turn.
"""

import time

import pytest
import tensorflow as tf
from bench_custom_gradient import forward_and_backward
from bench_graphs import MAPPED, by_jvp

import sgtrick
from bench_custom_vjp import FORMS
from shared import derivative


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


EAGER = {name: FORMS[name] for name in ("custom_vjp", "with_gradient")} | {"custom_jvp": by_jvp}


@pytest.mark.parametrize("name", EAGER)
def test_eager_gradient(row, name):
    native = forward_and_backward(FORMS["tf.custom_gradient"])
    ours = forward_and_backward(EAGER[name])
    row(f"`{name}`, eager gradient, beside `tf.custom_gradient`", native, ours, vector())


def test_straight_through(row):
    def by_hand(x):
        return tf.stop_gradient(tf.round(x)) + (x - tf.stop_gradient(x))

    def ours(x):
        return sgtrick.straight_through(tf.round(x), x)

    what = "`straight_through`, eager gradient, beside the formula by hand"
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
    what = f"`{name}` of a hundred operations, eager gradient, beside `tf.custom_gradient`"
    row(what, native, forward_and_backward(ours[name]), vector(), repeats=4)


def test_mapped(row):
    def run(form):
        return tf.function(forward_and_backward(lambda x: tf.vectorized_map(form, x)))

    what = "`custom_jvp`, `vectorized_map` in a graph, 5,000 members, beside autodiff"
    row(what, run(MAPPED["autodiff"]), run(by_jvp), vector(5_000))


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

    what = "`implicit_root`, eager gradient, beside ten Newton steps"
    row(what, forward_and_backward(unrolled), forward_and_backward(ours), a, repeats=4)


def calling_itself(decorator, k):
    """The exponential function, whose rule calls it as often as this says."""

    @decorator
    def exp(x):
        return tf.exp(x), lambda u: u * tf.add_n([exp(x) for _ in range(k)]) / k

    return exp


SECOND = {
    "`custom_vjp`": FORMS["custom_vjp"],
    "`with_gradient`": FORMS["with_gradient"],
    "`custom_vjp`, a rule that calls its function once": 1,
    "`custom_vjp`, a rule that calls its function 3 times": 3,
    "`custom_vjp`, a rule that calls its function 5 times": 5,
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivative(row, name):
    native, ours = FORMS["tf.custom_gradient"], SECOND[name]
    if isinstance(ours, int):
        native, ours = (calling_itself(d, ours) for d in (tf.custom_gradient, sgtrick.custom_vjp))
    native, ours = (derivative(derivative(f)) for f in (native, ours))
    what = f"second derivative in eager, {name}, beside `tf.custom_gradient`"
    row(what, native, ours, vector(), repeats=4)
