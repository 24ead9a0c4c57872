"""`custom_vjp`: the protocol of `tf.custom_gradient`, held where TensorFlow drops overrides."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from matrix import Case, judge, pairs, promised
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS, POINTS
from sgtrick import custom_vjp
from shared import (
    EXECUTED,
    WRAPS,
    WRAPS_AND_XLA,
    compiled,
    derivative,
    forward_derivative,
    gradient,
    mapped_with_loops,
)

X = tf.constant([0.3, 0.7, 1.1], tf.float64)


@custom_vjp
def scalar(x):
    def grad_fn(u):
        return tf.expand_dims(u, -1) * fn.scalar_gradient(x)

    return fn.misled(fn.scalar)(x), grad_fn


@custom_vjp
def elementwise(x):
    return fn.misled(fn.elementwise)(x), lambda u: u * fn.elementwise_gradient(x)


@custom_vjp
def vector(x):
    def grad_fn(u):
        return tf.reduce_sum(tf.expand_dims(u, -1) * fn.vector_jacobian(x), -2)

    return fn.misled(fn.vector)(x), grad_fn


@custom_vjp
def two(x, y):
    def grad_fn(u):
        gx, gy = fn.two_gradients(x, y)
        return u[..., tf.newaxis, tf.newaxis] * gx, u * gy

    return fn.misled(fn.two)(x, y), grad_fn


CASES = [
    Case("chains", fn.scalar, scalar, (POINTS,), order=2),
    Case("elementwise", fn.elementwise, elementwise, (NUMBERS,), order=2),
    Case("vector", fn.vector, vector, (POINTS,), order=2),
    Case("two arguments", fn.two, two, (MATRICES, NUMBERS), order=2),
]


PAIRS = pairs(CASES, everywhere={"two arguments"})


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_matrix(case, cell):
    """Second derivatives included, in every cell."""
    assert judge(cell, case) in promised(cell, case)


def nth_derivative(h, order):
    for _ in range(order):
        h = derivative(h)
    return h


def of_map(f, x):
    return gradient(lambda x: tf.vectorized_map(f, x), x)


@custom_vjp
def log1pexp(x):
    e = tf.exp(x)
    return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))


def sine(x):
    return tf.stop_gradient(tf.sin(x)), lambda u: u * cosine(x)


def cosine(x):
    return tf.stop_gradient(tf.cos(x)), lambda u: -u * sine(x)


sine, cosine = custom_vjp(sine), custom_vjp(cosine)


@WRAPS_AND_XLA
@pytest.mark.parametrize("order", [1, 2, 3])
def test_rules_that_call_each_other(order, wrap):
    expected = [np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)][order](X)
    np.testing.assert_allclose(wrap(nth_derivative(sine, order))(X), expected)
    np.testing.assert_allclose(nth_derivative(wrap(sine), order)(X), expected)


@WRAPS_AND_XLA
def test_errors_of_grad_fn_wait_for_a_gradient(wrap):
    @custom_vjp
    def h(x):
        def grad_fn(u):
            raise NotImplementedError("not yet")

        return x + 1, grad_fn

    np.testing.assert_allclose(wrap(h)(X), X + 1)
    with pytest.raises(Exception, match="not yet"):
        wrap(lambda x: gradient(h, x))(X)
    with pytest.raises(Exception, match="NotImplementedError: not yet"):
        wrap(lambda x: of_map(h, x))(X)


def test_a_host_call_with_a_transpose():
    """Which forward mode needs."""

    def times(x, c):
        y = tf.numpy_function(np.multiply, [x, c], x.dtype)
        y.set_shape(x.shape)
        return y

    @custom_vjp
    def h(x):
        @custom_vjp
        def pulled(u):
            return times(u, tf.cos(x)), lambda v: v * tf.cos(x)

        return tf.sin(x), pulled

    for way in (derivative, lambda f: derivative(mapped_with_loops(f)), forward_derivative):
        np.testing.assert_allclose(way(h)(X), np.cos(X))
        np.testing.assert_allclose(tf.function(way(h))(X), np.cos(X))


def test_rules_that_ignore_the_upstream():
    zero = custom_vjp(lambda x: (tf.sin(x), lambda u: tf.zeros_like(x)))
    np.testing.assert_array_equal(of_map(zero, X), 0 * X)
    none = custom_vjp(lambda x: (tf.sin(x), lambda u: None))
    assert tf.function(lambda x: [gradient(none, x)])(X) == [None]
    assert gradient(none, X) is None


def test_non_finite_coefficients_and_points():
    x = tf.constant([1000.0, np.inf, -np.inf, 2.0])
    np.testing.assert_array_equal(tf.vectorized_map(log1pexp, x), log1pexp(x))
    np.testing.assert_allclose(of_map(log1pexp, x), [1.0, 1.0, 0.0, 0.880797], 1e-5)
    bad = custom_vjp(lambda x: (x, lambda u: u * np.inf))
    np.testing.assert_array_equal(tf.function(bad)(X), X)
    np.testing.assert_array_equal(tf.function(gradient)(bad, X), np.full(3, np.inf))


@pytest.mark.parametrize("decorator", [tf.custom_gradient, custom_vjp], ids=["tf", "sgtrick"])
@WRAPS_AND_XLA
def test_structures_of_outputs_and_inputs(decorator, wrap):
    @decorator
    def h(x, rest):
        def grad_fn(ua, ub, uc):
            return ua + uc, 2 * ub, 3 * uc

        return {"a": x, "b": (x * 2, [rest["p"] + rest["q"]])}, grad_fn

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            p, q = 5 * x, 7 * x
            y = h(x, {"q": q, "p": p})
            s = y["a"] + y["b"][1][0]
        return tape.gradient(s, [x, p, q])

    for a, b in zip(wrap(run)(X), ([23.0] * 3, [0.0] * 3, [3.0] * 3), strict=True):
        np.testing.assert_allclose(a, b)


def test_several_outputs_where_the_override_is_dropped():
    @custom_vjp
    def h(x, n, y):
        def grad_fn(ua, un, ub):
            return ua * 2 + ub * y, None, ub * x

        return (2 * x, n + 1, x * y), grad_fn

    def mapped(x):
        a, n, b = tf.vectorized_map(lambda x: h(x, tf.constant(3), x), x)
        assert n.dtype == tf.int32
        return a + b

    np.testing.assert_allclose(gradient(mapped, X), 2 + 2 * X)


@WRAPS_AND_XLA
def test_the_same_tensor_twice(wrap):
    h = custom_vjp(lambda x, y: (tf.stop_gradient(x * y), lambda u: (u * y, u * x)))
    np.testing.assert_allclose(wrap(lambda x: gradient(lambda x: h(x, x), x))(X), 2 * X)


@WRAPS
def test_ragged(wrap):
    @custom_vjp
    def h(r):
        return r * 2.0, lambda u: u * 3.0

    def run(values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            r = tf.RaggedTensor.from_row_lengths(values, [1, 2])
            y = h(r)
            assert isinstance(y, tf.RaggedTensor)
            s = tf.reduce_sum(y * y)
        return tape.gradient(s, values)

    values = tf.constant([1.0, 2.0, 3.0])
    np.testing.assert_allclose(wrap(run)(values), 12 * values)


VARIABLES = {"tf": tf.Variable, "keras": keras.Variable}


@WRAPS_AND_XLA
@pytest.mark.parametrize("make", VARIABLES.values(), ids=VARIABLES)
def test_the_rule_has_the_values_that_variables_had_at_the_call(make, wrap):
    """As native code; tf.custom_gradient does so in graphs, and in eager reads what came after."""
    h = custom_vjp(lambda x, v: (tf.stop_gradient(x * v), lambda u: (u * v, u * x)))
    v = make([2.0, 3.0])

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x, v)
        v.assign([20.0, 30.0])
        return tape.gradient(y, [x, getattr(v, "_value", v)])

    by_x, by_v = wrap(run)(tf.constant([5.0, 7.0]))
    np.testing.assert_array_equal(by_x, [2.0, 3.0])
    np.testing.assert_array_equal(by_v, [5.0, 7.0])


def test_a_variable_that_is_an_argument_is_not_one_that_f_read():
    """Even where `f` reads it itself too, as with `tf.custom_gradient`."""
    v = tf.Variable(2.0)
    h = custom_vjp(lambda x: (x * v, lambda u: u * 3))
    with tf.GradientTape() as tape:
        y = h(v)
    assert tape.gradient(y, v) == 3.0


@WRAPS_AND_XLA
def test_variables_that_are_not_trainable(wrap):
    c = tf.Variable(2.0, trainable=False)
    h = custom_vjp(lambda x: (x * tf.cast(c, x.dtype), lambda u: u * 3))
    np.testing.assert_allclose(wrap(lambda x: gradient(h, x))(X), [3.0] * 3)


@pytest.mark.parametrize(
    ("mapped", "wrap"),
    # The fallback of vectorized_map for a gather of a variable has no XLA kernel.
    [*itertools.product([False, True], EXECUTED.values()), (False, compiled)],
)
def test_a_sparse_variable_gradient(mapped, wrap):
    table = tf.Variable(tf.ones([4, 2]))

    @custom_vjp
    def lookup(i, x):
        def grad_fn(u, variables):
            flat = tf.reshape(u * x, [-1, 2])
            g = tf.IndexedSlices(flat, tf.reshape(i, [-1]), tf.constant([4, 2]))
            return (None, u * tf.gather(table, i)), [g]

        return tf.gather(table, i) * x, grad_fn

    i, x = tf.constant([2, 0, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def run(x):
        with tf.GradientTape() as tape:
            y = tf.vectorized_map(lambda ix: lookup(*ix), (i, x)) if mapped else lookup(i, x)
        return tf.convert_to_tensor(tape.gradient(y, table))

    np.testing.assert_allclose(wrap(run)(x), [[3, 4], [0, 0], [6, 8], [0, 0]])


@WRAPS_AND_XLA
def test_mixed_second_derivatives_of_variables(wrap):
    v = tf.Variable(2.0)
    h = custom_vjp(lambda x: (x**2 * v, lambda u, variables: (2 * u * x * v, [u * x**2])))

    def mixed(x, h=h):
        with tf.GradientTape() as outer:
            by_x = gradient(h, x)
        return outer.gradient(by_x, v)

    x = tf.constant(3.0)
    np.testing.assert_allclose(wrap(mixed)(x), 6.0)
    np.testing.assert_allclose(mixed(x, wrap(h)), 6.0)


@WRAPS_AND_XLA
def test_the_order_of_keywords(wrap):
    declared = custom_vjp(lambda x, *, b, a: (x + a + b, lambda u: (u, 2 * u, 3 * u)))
    passed = custom_vjp(lambda x, **c: (x + sum(c.values()), lambda u: (u, 3 * u, 2 * u)))

    def run(x, h):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = [x + 0, x + 0, x + 0]
            s = h(parts[0], a=parts[2], b=parts[1])
        return tape.gradient(s, parts)

    for h in (declared, passed):
        got = wrap(functools.partial(run, h=h))(X)
        np.testing.assert_allclose(got, np.outer([1, 2, 3], np.ones(3)))


@WRAPS_AND_XLA
def test_errors(wrap):
    """tests/forms/test_returned_gradients.py has those of other numbers of gradients."""
    with pytest.raises(TypeError, match=r"must return \(y, grad_fn\)"):
        wrap(lambda x: gradient(custom_vjp(lambda x: x), x))(X)
    cut = custom_vjp(lambda x: (x, lambda u: u[:2]))
    with pytest.raises(ValueError, match=r"gradient of shape \[2\] for x, expected \[3\]"):
        wrap(lambda x: gradient(cut, x))(X)


@WRAPS_AND_XLA
def test_errors_name_the_variables(wrap):
    v = tf.Variable(1.0, name="stiffness")
    rules = {
        r"reads the variables \['stiffness:0'\].*must take a keyword argument": lambda u: u,
        "returned 0 variable gradients, expected 1, one for each of": lambda u, variables: (u, []),
        r"must return \(gradients, variable_gradients\)": lambda u, variables: u,
        r"shape \[3\] for variable stiffness:0, expected \[\]": lambda u, variables: (u, [u]),
    }
    for match, rule in rules.items():
        h = custom_vjp(lambda x, rule=rule: (x * tf.cast(v, x.dtype), rule))
        with pytest.raises((TypeError, ValueError), match=match):
            wrap(lambda x, h=h: gradient(h, x))(X)


@WRAPS
def test_a_sparse_argument_counts_as_closed_over(wrap):
    """It gets no gradient from the rule, and what it was made of gets an error."""

    @custom_vjp
    def product(a, x):
        y = tf.sparse.sparse_dense_matmul(a, x[:, tf.newaxis])[:, 0]
        return y, lambda u: (None, tf.sparse.sparse_dense_matmul(a, u[:, tf.newaxis], True)[:, 0])

    def of(values, x):
        return product(tf.SparseTensor([[0, 1], [1, 1]], values, [2, 2]), x)

    values, x = tf.constant([2.0, 5.0]), tf.constant([1.0, 3.0])
    by_x = wrap(lambda x: gradient(lambda x: of(values, x), x))(x)
    np.testing.assert_array_equal(by_x, [0, 7])
    by_values = wrap(lambda values: gradient(lambda values: of(values, x), values))
    with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="closes over"):
        by_values(values)
