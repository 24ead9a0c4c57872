"""What forms cost in numbers that no noise touches: operations of graphs, and calls of rules.

A number that rises is a loss of speed. One that falls is written down here.
"""

import pytest
import tensorflow as tf

import sgtrick
from shared import derivative, forward_derivative, mapped, with_jvp


def log1pexp(x):
    return tf.math.log(1 + tf.exp(x))


def value_and_rule(x):
    e = tf.exp(x)
    return tf.math.log(1 + e), lambda u: u * (1 - 1 / (1 + e))


def jvp(primals, tangents):
    return log1pexp(*primals), tf.sigmoid(primals[0]) * tangents[0]


def with_both_rules():
    form = sgtrick.custom_vjp(value_and_rule)
    form.defjvp(jvp)
    return form


def root(a):
    star = tf.stop_gradient(a) ** (1 / 3)
    return sgtrick.implicit_root(lambda x, a: x**3 - a, star, a, batch_ndims=a.shape.rank)


FORMS = {
    "custom_gradient": lambda x: sgtrick.custom_gradient(x**2, 2 * x, x),
    "with_gradient": sgtrick.with_gradient(log1pexp, tf.sigmoid),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda x: (log1pexp(x), tf.sigmoid(x))
    ),
    "custom_jvp": with_jvp(jvp, log1pexp),
    "custom_vjp": sgtrick.custom_vjp(value_and_rule),
    "both rules": with_both_rules(),
    "straight_through": lambda x: sgtrick.straight_through(tf.round(x), x),
    "clip_gradient": lambda x: sgtrick.clip_gradient(x, -1.0, 1.0),
    "implicit_root": root,
    "from_numpy": sgtrick.from_numpy(lambda x: (x**2, 2 * x), event_ndims=0, vectorized=True),
}


def in_branch(f):
    return lambda x: tf.cond(x[0] > 0, lambda: f(x), lambda: x)


WAYS = {
    "value": lambda f: f,
    "gradient": derivative,
    "gradient around a map": lambda f: derivative(mapped(f)),
    "gradient in a map": lambda f: mapped(derivative(f)),
    "gradient of a branch": lambda f: derivative(in_branch(f)),
    "second derivative": lambda f: derivative(derivative(f)),
    "forward mode": forward_derivative,
}

# The operations of a graph of each of these ways, with those of its functions.
OPERATIONS = {
    "custom_gradient": (26, 32, 70, 42, 124, 95, 102),
    "with_gradient": (10, 15, 60, 28, 51, 19, 25),
    "from_value_and_gradient": (11, 17, 70, 33, 59, 82, 29),
    "custom_jvp": (10, 23, 68, 36, 59, 27, 27),
    "custom_vjp": (9, 19, 70, 35, 58, 38, 77),
    "both rules": (9, 22, 76, 40, 60, 47, 61),
    "straight_through": (11, 16, 35, 33, 49, 15, 47),
    "clip_gradient": (36, 41, 138, 67, 96, 39, None),  # not linear: no forward mode
    "implicit_root": (18, 139, 211, 142, 185, 391, 627),
    "from_numpy": (16, 20, 59, 73, 79, 82, 30),
}
QUICK = ("with_gradient", "custom_jvp", "custom_vjp", "straight_through")


def operations(f):
    spec = tf.TensorSpec([3])
    graph = tf.function(f, autograph=False).get_concrete_function(spec).graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=[pytest.mark.long] * (f not in QUICK)) for f in OPERATIONS],
)
def test_operations(form):
    allowed = dict(zip(WAYS, OPERATIONS[form], strict=True))
    found = {way: operations(WAYS[way](FORMS[form])) for way, n in allowed.items() if n is not None}
    # Versions of TensorFlow differ in some.
    more = {way: n for way, n in found.items() if n > allowed[way] + 2 + allowed[way] // 10}
    assert not more, f"more operations than {allowed}: {more}"


# How often a JVP rule is called: without its function in it, and if it calls its function itself,
# and if it does so in both branches of a tf.cond, which cannot be mapped.
RULE_CALLS = {
    "value": (0, 0, 0),
    "value in a function": (0, 0, 0),
    "gradient": (2, 2, 2),
    "gradient in a function": (1, 1, 7),
    "gradient around a function": (1, 3, 7),
    "gradient around a map": (1, 3, None),
    "gradient in a map": (1, 1, None),
    "gradient of a branch": (1, 2, 3),
    "gradient of a loop": (1, 2, 3),
    "second derivative": (3, 3, 3),
    "second derivative in a function": (2, 2, 8),
    "forward mode": (1, 1, 7),
    "forward mode in a function": (1, 1, 7),
}
CALLED = {
    "value": lambda f: f,
    "value in a function": tf.function,
    "gradient": derivative,
    "gradient in a function": lambda f: tf.function(derivative(f)),
    "gradient around a function": lambda f: derivative(tf.function(f)),
    "gradient around a map": lambda f: derivative(mapped(f)),
    "gradient in a map": lambda f: mapped(derivative(f)),
    "gradient of a branch": lambda f: tf.function(derivative(in_branch(f))),
    "gradient of a loop": lambda f: tf.function(
        derivative(
            lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, f(y)), (0, x))[1]
        )
    ),
    "second derivative": lambda f: derivative(derivative(f)),
    "second derivative in a function": lambda f: tf.function(derivative(derivative(f))),
    "forward mode": forward_derivative,
    "forward mode in a function": lambda f: tf.function(forward_derivative(f)),
}
ITSELF = {
    "not": lambda h, x: log1pexp(x),
    "once": lambda h, x: h(x),
    "in both branches": lambda h, x: tf.cond(x[0] > 0, lambda: h(x), lambda: h(x) + 0.0),
}


@pytest.mark.parametrize("way", RULE_CALLS)
def test_calls_of_a_jvp_rule(way):
    def count(value):
        calls = []
        form = sgtrick.custom_jvp(log1pexp)

        @form.defjvp
        def _(primals, tangents):
            calls.append(primals)
            (x,), (t,) = primals, tangents
            return value(form, x), tf.sigmoid(x) * t

        CALLED[way](form)(tf.constant([1.0, 2.0, 3.0]))
        return len(calls)

    allowed = {v: n for v, n in zip(ITSELF, RULE_CALLS[way], strict=True) if n is not None}
    found = {value: count(ITSELF[value]) for value in allowed}
    assert all(found[value] <= n for value, n in allowed.items()), f"{found}, not {allowed}"
