"""Second derivatives through rules that are linear in the upstream gradient.

Such a rule has no derivative by the point. That is right if none of its numbers were computed from
the point, and an error if NumPy may have computed some: eager execution does not tell.
"""

import types

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, POINTS, exact, hidden, verdict
from matrix import LOUD, spread
from shared import (
    TWICE,
    WRAPS,
    Way,
    by_jacobian,
    constant,
    derivative,
    forward_derivative,
    gradient,
    on_host,
    with_jvp,
)

MATRIX = constant([[1.0, 2.0, 0.5], [3.0, 4.0, -1.0], [0.0, 1.0, 2.0]])
X = constant(POINTS)


def slope(x):
    return 0.3 if x.shape[0] == 3 else 0.7


# Functions that return their value and a rule.
LINEAR = {
    "an integer": lambda x: (2 * x, lambda u: 2 * u),
    "a number in code": lambda x: (0.3 * x, lambda u: tf.constant(0.3, u.dtype) * u),
    "numbers in code": lambda x: (x * [1.5, -2.0, 3.5], lambda u: u * [1.5, -2.0, 3.5]),
    "a number of a function": lambda x: (0.3 * x, lambda u: slope(x) * u),
    "a number of a closure": lambda x: (lambda f: (0.3 * x, lambda u: f() * u))(lambda: 0.3),
    "a quotient": lambda x: (x / 2.5, lambda u: u / 2.5),
    "relu": lambda x: (tf.nn.relu(x), lambda u: tf.where(x > 0, u, 0.0)),
    "relu by a mask": lambda x: (tf.nn.relu(x), lambda u: u * tf.cast(x > 0, u.dtype)),
    "a leaky slope": lambda x: (
        tf.maximum(x, 0.1 * x),
        lambda u: tf.where(x > 0, tf.ones_like(x), 0.1) * u,
    ),
    "sort": lambda x: (tf.sort(x), lambda u: tf.gather(u, tf.argsort(tf.argsort(x)))),
    "the largest": lambda x: (
        tf.ones_like(x) * tf.reduce_max(x),
        lambda u: tf.one_hot(tf.argmax(x), 3, dtype=x.dtype) * tf.reduce_sum(u),
    ),
    "ones": lambda x: (1.0 * x, lambda u: u * tf.ones_like(x)),
    "a static size": lambda x: (
        tf.ones_like(x) * tf.reduce_mean(x),
        lambda u: tf.ones_like(x) * tf.reduce_sum(u) / x.shape[0],
    ),
    "a size": lambda x: (
        tf.ones_like(x) * tf.reduce_mean(x),
        lambda u: tf.fill(tf.shape(x), tf.reduce_sum(u) / tf.cast(tf.size(x), u.dtype)),
    ),
    "fake quantisation": lambda x: (
        tf.floor(tf.clip_by_value(x, -1.5, 1.5) * 4 + 0.5) / 4,
        lambda u: tf.where((x >= -1.5) & (x <= 1.5), u, tf.zeros_like(u)),
    ),
    "steps": lambda x: (tf.round(x) * x, lambda u: u * tf.round(x)),
    "an older matrix": lambda x: (
        tf.linalg.matvec(MATRIX, x),
        lambda u: tf.linalg.matvec(MATRIX, u, transpose_a=True),
    ),
}


def twice(f):
    return derivative(derivative(f))


WAYS = {
    "eager": Way(modes=TWICE),
    "in tf.function": Way(around=tf.function, modes=TWICE),
    "around tf.function": Way(inside=tf.function, modes=TWICE),
    "forward over reverse": Way(modes=(derivative, forward_derivative)),
    "of a variable": Way(around=lambda f: lambda x: f(tf.Variable(x)), modes=TWICE),
    "of a product": Way(between=lambda f: lambda x: f(1.0 * x), modes=TWICE),
    "in vectorized_map": Way(
        around=lambda f: lambda x: tf.vectorized_map(f, x[tf.newaxis])[0], modes=TWICE
    ),
}


def square(f):
    return lambda x: f(x) ** 2


@pytest.mark.parametrize(
    ("rule", "way"),
    [(rule, way) for rule in LINEAR for way in ("eager", "in tf.function")]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in spread(LINEAR, sorted(WAYS.keys() - {"eager", "in tf.function"}), together=1)
    ],
)
def test_as_tensorflow_differentiates_the_rule(rule, way):
    expected = twice(square(tf.custom_gradient(LINEAR[rule])))(X).numpy()
    assert np.any(expected)
    assert verdict(WAYS[way](square(sgtrick.custom_vjp(LINEAR[rule]))), expected) == "right"


TANGENTS = {
    "a number of a function": (lambda x: 0.3 * x, lambda x, t: slope(x) * t),
    "an integer": (lambda x: 2 * x, lambda _, t: 2 * t),
    "relu": (tf.nn.relu, lambda x, t: tf.where(x > 0, t, 0.0)),
    "sort": (tf.sort, lambda x, t: tf.gather(t, tf.argsort(x))),
    "an older matrix": (lambda x: tf.linalg.matvec(MATRIX, x), lambda _, t: MATRIX @ t[:, None]),
}


@WRAPS
@pytest.mark.parametrize("rule", TANGENTS)
def test_of_a_jvp_rule(rule, wrap):
    f, tangent = TANGENTS[rule]

    def jvp(primals, tangents):
        return None, tf.reshape(tangent(primals[0], tangents[0]), [3])

    form = with_jvp(jvp, lambda x: f(tf.stop_gradient(x)))
    assert verdict(wrap(twice(square(form))), twice(square(f))(X).numpy()) == "right"


def test_a_penalty_on_the_gradient_of_a_layer():
    """As in the training of critics and of energies, with weights before and behind the rule."""
    relu = sgtrick.custom_vjp(LINEAR["relu"])
    v, w = tf.Variable(tf.eye(3, dtype=tf.float64) + 0.1), tf.Variable(constant([0.5, -1.0, 2.0]))

    def penalty(activation):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(X)
                y = tf.reduce_sum(w * activation(tf.linalg.matvec(v, X)) ** 2)
            loss = tf.reduce_sum(inner.gradient(y, X) ** 2)
        return outer.gradient(loss, [v, w])

    for found, exact_ in zip(penalty(relu), penalty(tf.nn.relu), strict=True):
        np.testing.assert_allclose(found, exact_, rtol=1e-12)


def _in_a_loop(s):
    return lambda u: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, y * s), (0, u))[1]


def _by_a_tensor(s):
    tensor = tf.constant(s)
    return lambda u: u * tensor


def _by_an_object(s):
    record = types.SimpleNamespace(slope=s)
    return lambda u: u * record.slope


# Rules that multiply with what NumPy has computed at the point, given that.
COMPUTED = {
    "array": lambda s: lambda u: u * s,
    "number": lambda s: lambda u, first=float(s[0]): u * first,
    "NumPy's number": lambda s: lambda u: u * s[0],
    "list": lambda s: lambda u: u * tf.constant(s.tolist(), u.dtype),
    "list with numbers in code": lambda s: lambda u: u * [float(s[0]), 0.4, 0.4],
    "tensor": _by_a_tensor,
    "matrix": lambda s: lambda u: tf.linalg.matvec(np.diag(s), u),
    "divisor": lambda s: lambda u: u / (1 / s),
    "object": _by_an_object,
    "beside a number in code": lambda s: lambda u: 0.5 * u + u * (s - 0.5),
    "function": lambda s: tf.function(lambda u: u * s),
    "loop": _in_a_loop,
    "stopped": lambda s: lambda u: u * tf.stop_gradient(tf.sqrt(tf.constant(s) ** 2)),
    "host": lambda s: lambda u: u * tf.reshape(tf.numpy_function(lambda: s, [], u.dtype), [3]),
}
OF_NUMBERS = {
    "custom_vjp": lambda rule: sgtrick.custom_vjp(lambda x: (hidden(x), rule)),
    "custom_jvp": lambda rule: with_jvp(lambda _, ts: (None, rule(ts[0])), hidden),
    "with_gradient": lambda rule: sgtrick.with_gradient(hidden, lambda x: rule(tf.ones_like(x))),
    "from_value_and_gradient": lambda rule: sgtrick.from_value_and_gradient(
        lambda x: (hidden(x), rule(tf.ones_like(x)))
    ),
}


# Of forms for which NumPy has computed at this point.
LOUD_WAYS = {
    "eager": WAYS["eager"],
    "forward over reverse": WAYS["forward over reverse"],
    "by tape.jacobian": Way(modes=(derivative, by_jacobian)),
    "of a product": WAYS["of a product"],
    "in tf.function": Way(around=lambda f: lambda x: tf.function(lambda: f(x))(), modes=TWICE),
    "in vectorized_map": WAYS["in vectorized_map"],
}


def is_told(computed, way):
    """In a graph, what a rule closes over is an input of the rule."""
    return computed != "tensor" or way not in ("in tf.function", "in vectorized_map")


@pytest.mark.filterwarnings("ignore:A gradient is NaN")
@pytest.mark.parametrize(
    ("computed", "name", "way"),
    [
        pytest.param(*case, marks=() if case[2] == "eager" else pytest.mark.long)
        for case in spread(COMPUTED, OF_NUMBERS, LOUD_WAYS, valid=lambda c, _, w: is_told(c, w))
    ],
)
def test_what_numpy_may_have_computed_at_the_point_is_an_error(computed, name, way):
    """The same number as one that is written in code is one that was computed."""

    def run(x):
        rule = COMPUTED[computed](exact(1, x.numpy()))
        return LOUD_WAYS[way](square(OF_NUMBERS[name](rule)))(x)

    assert verdict(run, twice(lambda x: tf.asinh(x) ** 2)(X)) in LOUD


@pytest.mark.parametrize("slope", [lambda x: tf.stop_gradient(tf.cos(x)), on_host(np.cos)])
@pytest.mark.parametrize(("name", "wrap"), spread(OF_SLOPE, [lambda f: f, tf.function]))
def test_what_is_computed_from_the_point_and_unconnected_is_an_error(slope, name, wrap):
    form = square(OF_SLOPE[name](lambda x: tf.stop_gradient(tf.sin(x)), slope))
    assert verdict(wrap(twice(form)), 2 * np.cos(2 * POINTS)) in LOUD


def test_an_array_is_a_constant_where_numpy_cannot_get_the_point():
    """A function is traced for all points."""
    slope = np.array([0.5, 2.0, 3.5])
    form = sgtrick.custom_vjp(lambda x: (slope * x, lambda u: u * slope))
    run = tf.function(twice(square(form)))
    assert verdict(run, 2 * slope**2) == "right"


def test_a_tensor_that_the_rule_uses_elsewhere_does_not_hide_what_numpy_computed():
    a, s = constant(0.7), exact(1)

    def both(x):
        computed = tf.constant(s)
        r = tf.cos(a) * computed
        return hidden(x), lambda u: u * computed if x.dtype == r.dtype else r

    with tf.GradientTape() as tape:
        tape.watch(a)
        assert verdict(twice(square(sgtrick.custom_vjp(both))), exact(2)) in LOUD


@pytest.mark.parametrize("used", ["a tensor", "made of one"])
def test_by_what_a_function_computed_for_its_rule_alone(used):
    """Of a tensor that the function closes over, also after all tapes have gone."""

    def by_a(make, a):
        with tf.GradientTape() as outer:
            outer.watch(a)
            s = a if used == "a tensor" else 2 * a

            def f(x):
                r = tf.cos(s)
                return tf.stop_gradient(x), lambda u: r * u

            g = gradient(make(f), X)
        return outer.gradient(g, a)

    a = constant(0.7)
    np.testing.assert_allclose(by_a(sgtrick.custom_vjp, a), by_a(tf.custom_gradient, a))
