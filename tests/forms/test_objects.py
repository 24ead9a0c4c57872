"""Arguments that are made of tensors: ragged and sparse tensors, distributions, layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
import sgtrick.keras
from matrix import spread
from shared import EXECUTED, WRAPS, constant, derivative, with_jvp

RAGGED = {
    "ragged": lambda v: tf.RaggedTensor.from_row_lengths(v, [1, 2]),
    "sparse": lambda v: tf.SparseTensor([[0, 0], [1, 0], [1, 1]], v, [2, 2]),
}


@pytest.mark.parametrize(
    ("kind", "form", "wrap"),
    spread(RAGGED, ["with_gradient", "from_value_and_gradient", "custom_jvp"], EXECUTED),
)
def test_ragged_and_sparse_arguments(kind, form, wrap):
    """Their components keep autodiff, and mixed derivatives are refused in one order."""

    def f(x, a):
        return tf.stop_gradient(x) ** 2 * tf.reduce_sum(a.values**2)

    def rule(x, a):
        return 2 * x * tf.reduce_sum(a.values**2)

    h = {
        "with_gradient": sgtrick.with_gradient(f, rule),
        "from_value_and_gradient": sgtrick.from_value_and_gradient(lambda *a: (f(*a), rule(*a))),
        "custom_jvp": with_jvp(lambda a, p, t: (None, rule(*p, a) * t[0]), f, nondiff_argnums=1),
    }[form]
    run, wrap = lambda x, v: h(x, RAGGED[kind](v)), EXECUTED[wrap]
    x, values = constant(3.0), constant([1.0, 2.0, 3.0])
    by_x, by_values = derivative(run), derivative(run, 1)
    np.testing.assert_allclose(wrap(by_x)(x, values), 2 * 3 * 14)
    np.testing.assert_allclose(wrap(by_values)(x, values), 9 * 2 * values)
    np.testing.assert_allclose(wrap(derivative(by_x, 1))(x, values), 2 * 3 * 2 * values)
    with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="mixed derivative"):
        wrap(derivative(by_values))(x, values)


def held(kind):
    tensor = tf.constant([1.0, 2.0, 3.0])
    if kind == "layer":
        return keras.layers.Dense(2)
    return tfp.distributions.Normal(tensor, 1.0) if kind == "Normal" else RAGGED[kind](tensor)


TAKE_NO_OBJECTS = {
    "with_gradient": lambda t: sgtrick.with_gradient(lambda t: 1.0, lambda t: t)(t),
    "from_value_and_gradient": lambda t: sgtrick.from_value_and_gradient(lambda t: (1.0, t))(t),
    "custom_jvp": lambda t: with_jvp(lambda p, ts: (p, ts), lambda t: 1.0)(t),
    "custom_gradient": lambda t: sgtrick.custom_gradient(1.0, 1.0, t),
    "keras.custom_gradient": lambda t: sgtrick.keras.custom_gradient(1.0, 1.0, t),
    "from_numpy": lambda t: sgtrick.from_numpy(lambda t: (1.0, t))(t),
    "implicit_root": lambda t: sgtrick.implicit_root(lambda x: x, t),
    "scale_gradient": lambda t: sgtrick.scale_gradient(t, 2.0),
}


@pytest.mark.parametrize("kind", ["ragged", "sparse", "Normal", "layer"])
@pytest.mark.parametrize("name", TAKE_NO_OBJECTS)
def test_where_only_tensors_have_gradients(name, kind):
    """The error says what of the object to pass."""
    if kind == "ragged" and name in ("with_gradient", "from_value_and_gradient", "custom_jvp"):
        pytest.skip("which take it")
    part = {"ragged": "its flat_values", "sparse": "its values"}.get(kind, "those that it holds")
    message = f"must be .* got {type(held(kind)).__name__}, an object that .*: pass {part}, and"
    with pytest.raises(TypeError, match=message):
        TAKE_NO_OBJECTS[name](held(kind))


@WRAPS
def test_a_rule_for_all_arguments_knows_no_tensors_in_objects(wrap):
    h = sgtrick.custom_vjp(lambda x, d: (x * d.loc, lambda u: (u * d.loc, None)))
    run = lambda x, loc: h(x, tfp.distributions.Normal(loc, 1.0))  # noqa: E731
    x, loc = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    np.testing.assert_allclose(wrap(derivative(run))(x, loc), loc)
    message = "closes over, or that an object among its arguments holds.*argument of its own"
    with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
        wrap(derivative(run, 1))(x, loc)


def by_variable(x, d):
    return -0.5 * (x - d.loc) ** 2


def slope(x, d):
    return d.loc - x


READING_VARIABLES = {
    "with_gradient": sgtrick.with_gradient(by_variable, slope),
    "custom_jvp": with_jvp(
        lambda d, p, t: (None, slope(*p, d) * t[0]), by_variable, nondiff_argnums=1
    ),
    "closure": lambda x, d: sgtrick.with_gradient(
        lambda x: by_variable(x, d), lambda x: slope(x, d)
    )(x),
    "custom_vjp": lambda x, d: sgtrick.custom_vjp(
        lambda x: (by_variable(x, d), lambda u, variables: (u * slope(x, d), [-u * slope(x, d)]))
    )(x),
}


@pytest.mark.parametrize(("inside", "order"), [(False, 2), (True, 1)])
@pytest.mark.parametrize("name", READING_VARIABLES)
def test_a_rule_reads_variables_of_an_argument_of_a_function(name, inside, order):
    """The tape is around the function, whose argument is an object with a variable."""
    loc, x = tf.Variable(1.0), tf.constant(5.0)
    d = tfp.distributions.Normal(loc, 2.0)

    def derivatives(h):
        h = tf.function(h, autograph=False)
        if inside:
            inner = h
            h = tf.function(lambda x, d: 2 * inner(x, d), autograph=False)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = h(x, d)
            by_x, by_loc = tape.gradient(y, [x, loc])
        return (by_x, by_loc) if order == 1 else outer.gradient(by_x, [x, loc])

    np.testing.assert_allclose(derivatives(READING_VARIABLES[name]), derivatives(by_variable))
