"""Loops in the function of a rule: where nobody differentiates them, they store no iterate.

And XLA compiles them, which it does not if they store iterates and their length is not fixed.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE
from matrix import spread, traced
from shared import derivative

W = tf.Variable(tf.ones([3], tf.float64))
X = tf.constant([0.1, 0.2, 0.3], tf.float64)
STEPS = 5


def reads(y):
    return tf.sin(y * W)


def draws(y):
    return tf.sin(y * tf.random.uniform([3], dtype=tf.float64))


def asserts(y):
    tf.debugging.assert_less(tf.reduce_sum(y), tf.constant(100.0, y.dtype))
    return tf.sin(y)


def calls_the_host(y):
    seen = tf.numpy_function(lambda a: a, [y], y.dtype)
    seen.set_shape(y.shape)
    return tf.sin(y) + 0 * tf.stop_gradient(seen)


BODIES = {  # none can be pruned
    "reads a variable": reads,
    "draws": draws,
    "asserts": asserts,
    "calls the host": calls_the_host,
}


def while_loop(body):
    return lambda x: tf.while_loop(lambda i, _: i < STEPS, lambda i, y: (i + 1, body(y)), (0, x))[1]


def scan(body):
    return lambda x: tf.scan(lambda y, _: body(y), tf.range(STEPS), x)[-1]


def converted_by_autograph(body):
    def f(x):
        for _ in tf.range(STEPS):
            x = body(x)
        return x

    return tf.autograph.to_graph(f)


LOOPS = {"while_loop": while_loop, "scan": scan, "AutoGraph": converted_by_autograph}


def twice(x):
    return 2 * tf.ones_like(x)


def with_vjp(f, reads_variable):
    def value_and_rule(x):
        return f(x), lambda upstream: 2 * upstream

    def value_and_rule_of_variable(x):
        return f(x), lambda upstream, variables: (2 * upstream, [upstream for _ in variables])

    return sgtrick.custom_vjp(value_and_rule_of_variable if reads_variable else value_and_rule)


def root_form(f, reads_variable):
    return lambda x: sgtrick.implicit_root(lambda y, a: y - 2 * a, f(x), x, batch_ndims=1)


FORMS = {
    name: lambda f, reads_variable, make=make: make(f, twice) for name, make in OF_SLOPE.items()
} | {"custom_vjp": with_vjp, "implicit_root": root_form}


def gradient(f):
    """By `x` alone: variables that are read are not asked for."""

    def run(x):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    return run


CALLS = {
    "forward": lambda f: f,
    "gradient": gradient,
    "gradient, variables watched": derivative,
    "gradient around a function": lambda f: derivative(tf.function(f)),
}


def stored(f):
    """How many tensors the loops of a graph store in each step, for the way back."""
    definition = f.get_concrete_function(tf.TensorSpec([3], X.dtype)).graph.as_graph_def()
    functions = [definition.node, *(f.node_def for f in definition.library.function)]
    return sum(node.op == "TensorListPushBack" for nodes in functions for node in nodes)


def is_differentiated(name, loop, body, call):
    """By TensorFlow, by the variable, as in native code."""
    watched = call not in ("forward", "gradient")
    return body == "reads a variable" and watched and name not in ("custom_vjp", "implicit_root")


@pytest.mark.parametrize(
    ("name", "loop", "body", "call"),
    spread(FORMS, LOOPS, BODIES, CALLS, valid=lambda *case: not is_differentiated(*case)),
)
def test_what_is_not_differentiated_is_not_stored(name, loop, body, call):
    form = FORMS[name](LOOPS[loop](BODIES[body]), body == "reads a variable")
    f = traced(CALLS[call](form))
    assert stored(f) == 0
    if body == "calls the host":  # which XLA cannot
        return
    result = traced(CALLS[call](form), jit_compile=True)(X).numpy()
    assert np.isfinite(result).all()
    if call != "forward":
        np.testing.assert_array_equal(result, 2 * np.ones(3))


def test_the_test_sees_what_is_stored():
    assert stored(tf.function(gradient(while_loop(draws)))) > 0


@pytest.mark.parametrize("name", FORMS)
def test_a_for_statement(name):
    def f(x):
        for _ in tf.range(STEPS):
            x = draws(x)
        return x

    form = FORMS[name](f, False)
    assert stored(tf.function(derivative(form))) == 0
    found = tf.function(derivative(form), jit_compile=True)(X)
    np.testing.assert_array_equal(found, 2 * np.ones(3))
