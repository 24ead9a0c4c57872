"""`custom_vjp`: the protocol of `tf.custom_gradient`, held where TensorFlow drops overrides."""

import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from matrix import Case, judge, pairs, promised
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS
from sgtrick import custom_vjp
from shared import (
    WRAPS,
    WRAPS_AND_XLA,
    compiled,
    derivative,
    forward_derivative,
    gradient,
    gradients,
    mapped_with_loops,
)

X = tf.constant([0.3, 0.7, 1.1], tf.float64)


@custom_vjp
def two(x, y):
    def pull(u):
        by_x, by_y = fn.two_gradients(x, y)
        return u[..., tf.newaxis, tf.newaxis] * by_x, u * by_y

    return fn.misled(fn.two)(x, y), pull


CASE = Case("two arguments", fn.two, two, (MATRICES, NUMBERS))


@pytest.mark.parametrize(
    ("case", "cell"), pairs([CASE], everywhere={CASE.name}), ids=lambda of: of.name
)
def test_matrix(case, cell):
    """Second derivatives included, in every cell."""
    assert judge(cell, case) in promised(cell, case)


def of_map(f, x):
    return gradient(mapped_with_loops(f), x)


def sine(x):
    return tf.stop_gradient(tf.sin(x)), lambda u: u * cosine(x)


def cosine(x):
    return tf.stop_gradient(tf.cos(x)), lambda u: -u * sine(x)


sine, cosine = custom_vjp(sine), custom_vjp(cosine)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrap", "order"),
    [(lambda f: f, 3), (tf.function, 3), (compiled, 2)],
    ids=["eager", "tf.function", "XLA"],
)
def test_rules_that_call_each_other(wrap, order):
    inside, around, exact = sine, wrap(sine), tf.sin
    for _ in range(order):
        inside, around, exact = derivative(inside), derivative(around), derivative(exact)
    np.testing.assert_allclose(wrap(inside)(X), exact(X))
    np.testing.assert_allclose(around(X), exact(X))


@WRAPS
def test_errors_of_grad_fn_are_raised(wrap):
    def grad_fn(u):
        raise NotImplementedError("not yet")

    h = custom_vjp(lambda x: (x + 1, grad_fn))
    for f in (derivative(h), lambda x: of_map(h, x)):
        with pytest.raises(Exception, match="not yet"):
            wrap(f)(X)


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
    @custom_vjp
    def log1pexp(x):
        e = tf.exp(x)
        return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))

    x = tf.constant([1000.0, np.inf, -np.inf, 2.0])
    np.testing.assert_array_equal(tf.vectorized_map(log1pexp, x), log1pexp(x))
    np.testing.assert_allclose(of_map(log1pexp, x), [1.0, 1.0, 0.0, 0.880797], 1e-5)
    bad = custom_vjp(lambda x: (x, lambda u: u * np.inf))
    np.testing.assert_array_equal(tf.function(bad)(X), X)
    np.testing.assert_array_equal(tf.function(gradient)(bad, X), np.full(3, np.inf))


@WRAPS_AND_XLA
def test_structures_of_outputs_and_inputs(wrap):
    """As `tf.custom_gradient` takes and returns them."""

    @custom_vjp
    def h(x, rest):
        def grad_fn(ua, ub, uc):
            return ua + uc, 2 * ub, 3 * uc

        return {"a": x, "b": (x * 2, [rest["p"] + rest["q"]])}, grad_fn

    def run(x, p, q):
        y = h(x, {"q": q, "p": p})
        return y["a"] + y["b"][1][0]

    found = wrap(lambda *xs: gradients(run, *xs))(X, 2 * X, 3 * X)
    np.testing.assert_allclose(found, np.outer([2, 0, 3], np.ones(3)))


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
def test_a_rule_gets_no_variables_where_none_is_read(wrap):
    """As the documentation of `tf.custom_gradient` writes it."""

    def grad_fn(*grad_ys, variables=None):
        assert variables is None
        return 2 * grad_ys[0]

    double = custom_vjp(lambda x: (2 * x, grad_fn))
    assert wrap(derivative(double))(tf.constant(0.5)) == 2.0


@WRAPS_AND_XLA
def test_the_same_tensor_twice(wrap):
    times = custom_vjp(lambda x, y: (x * y, lambda u: (u * y, u * x)))
    np.testing.assert_array_equal(wrap(derivative(lambda x: times(x, x)))(X), 2 * X)


@WRAPS_AND_XLA
def test_the_same_tensor_twice_where_a_rule_watches_its_argument(wrap):
    """The rule's tape sees the argument that it watches, and not the other one."""

    @custom_vjp
    def h(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = x**2 * y
        return z, lambda u: (u * tape.gradient(z, x), u * x**2)

    np.testing.assert_allclose(wrap(derivative(lambda x: h(x, x)))(X), 3 * X**2, rtol=1e-14)


@WRAPS
def test_ragged(wrap):
    @custom_vjp
    def h(r):
        return r * 2.0, lambda u: u * 3.0

    def run(values):
        y = h(tf.RaggedTensor.from_row_lengths(values, [1, 2]))
        assert isinstance(y, tf.RaggedTensor)
        return tf.reduce_sum(y * y)

    values = tf.constant([1.0, 2.0, 3.0])
    np.testing.assert_allclose(wrap(derivative(run))(values), 12 * values)


@WRAPS_AND_XLA
@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["tf", "keras"])
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


@WRAPS_AND_XLA
def test_variables_that_the_rule_need_not_serve(wrap):
    """An argument is not one that `f` read, even where it reads it itself too; nor is a constant."""
    v, c = tf.Variable(2.0), tf.Variable(2.0, trainable=False)
    of_argument = custom_vjp(lambda x: (x * v, lambda u: u * 3))
    assert gradients(of_argument, v, by=v) == 3
    of_constant = custom_vjp(lambda x: (x * tf.cast(c, x.dtype), lambda u: u * 3))
    np.testing.assert_allclose(wrap(derivative(of_constant))(X), [3.0] * 3)


@WRAPS
def test_a_sparse_variable_gradient_of_each_member(wrap):
    table = tf.Variable(tf.ones([4, 2]))

    @custom_vjp
    def lookup(i, x):
        def grad_fn(u, variables):
            g = tf.IndexedSlices((u * x)[tf.newaxis], i[tf.newaxis], tf.constant([4, 2]))
            return (None, u * tf.gather(table, i)), [g]

        return tf.gather(table, i) * x, grad_fn

    i, x = tf.constant([2, 0, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    run = lambda x: tf.vectorized_map(lambda ix: lookup(*ix), (i, x))  # noqa: E731
    by_table = wrap(lambda x: tf.convert_to_tensor(gradients(run, x, by=table)))
    np.testing.assert_allclose(by_table(x), [[3, 4], [0, 0], [6, 8], [0, 0]])


# Functions of which TensorFlow has no derivative, though its tapes record them.
UNDIFFERENTIATED = {
    "ones": tf.ones_like,
    "beside others": lambda x: {"y": x * x, "zeros": tf.zeros_like(x)},
    "shuffled": tf.random.shuffle,
    "rounded and used": lambda x: x * tf.round(x) + tf.sign(x),
    "a recursion that ends in ones": lambda x, n=2: (
        x * UNDIFFERENTIATED["a recursion that ends in ones"](x, n - 1) if n else tf.ones_like(x)
    ),
    "of a variable": lambda x: x + tf.ones_like(TABLE) + TABLE,
}
TABLE = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64)


@WRAPS
@pytest.mark.parametrize("name", UNDIFFERENTIATED)
def test_values_that_tensorflow_does_not_differentiate(name, wrap):
    f, n = UNDIFFERENTIATED[name], 2 if "beside" in name else 1

    def grad_fn(*us, variables=()):
        assert list(variables) == [TABLE] * ("variable" in name)
        return (tf.add_n(us) * 3, [tf.add_n(us)]) if variables else tf.add_n(us) * 3

    by_x, by_table = wrap(
        lambda x: gradients(custom_vjp(lambda x: (f(x), grad_fn)), x, by=[x, TABLE])
    )(X)
    np.testing.assert_array_equal(by_x, [3.0 * n] * 3)
    assert (by_table is None) is ("variable" not in name)


@WRAPS_AND_XLA
def test_mixed_second_derivatives_of_variables(wrap):
    v = tf.Variable(2.0)
    h = custom_vjp(lambda x: (x**2 * v, lambda u, variables: (2 * u * x * v, [u * x**2])))

    def mixed(x, h=h):
        return gradients(derivative(h), x, by=v)

    x = tf.constant(3.0)
    np.testing.assert_allclose(wrap(mixed)(x), 6.0)
    np.testing.assert_allclose(mixed(x, wrap(h)), 6.0)


@WRAPS_AND_XLA
def test_the_order_of_keywords(wrap):
    declared = custom_vjp(lambda x, *, b, a: (x + a + b, lambda u: (u, 2 * u, 3 * u)))
    passed = custom_vjp(lambda x, **c: (x + sum(c.values()), lambda u: (u, 3 * u, 2 * u)))

    for h in (declared, passed):
        run = functools.partial(gradients, lambda x, a, b, h=h: h(x, a=a, b=b))
        np.testing.assert_allclose(wrap(run)(X, 2 * X, 3 * X), np.outer([1, 3, 2], np.ones(3)))


STIFFNESS = tf.Variable(1.0, name="stiffness")


def reading(rule):
    return lambda x: (x * tf.cast(STIFFNESS, x.dtype), rule)


# tests/forms/test_returned_gradients.py has those of other numbers of gradients.
ERRORS = [
    (lambda x: x, r"must return \(y, grad_fn\)"),
    (lambda x: (x, lambda u: u[:2]), r"gradient of shape \[2\] for x, expected \[3\]"),
    (reading(lambda u: u), r"reads the variables \['stiffness:0'\].*must take a keyword argument"),
    (
        reading(lambda u, variables: (u, [])),
        "returned 0 variable gradients, expected 1, one for each of",
    ),
    (reading(lambda u, variables: u), r"must return \(gradients, variable_gradients\)"),
    (
        reading(lambda u, variables: (u, [u])),
        r"shape \[3\] for variable stiffness:0, expected \[\]",
    ),
]


@WRAPS
@pytest.mark.parametrize(("f", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors(wrap, f, message):
    with pytest.raises((TypeError, ValueError), match=message):
        wrap(derivative(custom_vjp(f)))(X)


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
    np.testing.assert_array_equal(wrap(derivative(of, 1))(values, x), [0, 7])
    with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="closes over"):
        wrap(derivative(of))(values, x)


WITHOUT_TENSORS = {
    "no argument": lambda x: custom_vjp(lambda: (x**2, lambda u: ()))(),
    "a number": lambda x: custom_vjp(lambda k: (x**k, lambda u: None))(2),
    "an integer": lambda x: custom_vjp(lambda n: (x**2, lambda u: None))(tf.constant(3)),
    "an object": lambda x: custom_vjp(lambda p: (p.x**2, lambda u: None))(SimpleNamespace(x=x)),
}


@WRAPS
@pytest.mark.parametrize("of", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS)
def test_without_tensors_among_the_arguments_it_closes_over_them(wrap, of):
    with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="closes over"):
        wrap(derivative(of))(X)
    assert np.isnan(derivative(tf.function(of))(X)).all()


@WRAPS
def test_modules_that_stand_for_tensors(wrap):
    h = custom_vjp(lambda x: (x * x, lambda u: 100 * u))
    of = lambda x: h(tfp.util.DeferredTensor(x, tf.exp))  # noqa: E731
    np.testing.assert_allclose(wrap(derivative(of))(X), 100 * tf.exp(X), rtol=1e-6)
    v = tfp.util.TransformedVariable(2.0, tfp.bijectors.Exp())

    @wrap
    def run():
        with tf.GradientTape() as tape:
            y = h(v)
        return tape.gradient(y, v.trainable_variables)

    np.testing.assert_allclose(run(), [200], rtol=1e-6)
