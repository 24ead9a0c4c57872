"""Rules in branches and loops that close over what is outside: tensors, variables and tables.

TensorFlow traces the gradient of a branch or of the body of a loop when that is complete, and can
then capture nothing more. `tf.custom_gradient` fails there.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, verdict
from matrix import spread, traced
from shared import LOUD, RUN_IN, compiled, derivative, forward_derivative

X = tf.constant([0.3, 0.7], tf.float64)
FACTOR = np.array([1.5, 2.0])
TENSOR, VARIABLE = tf.constant(FACTOR), tf.Variable(FACTOR)
TABLE = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([0], tf.constant([1.0], tf.float64)), 0.0
)

CLOSED_OVER = {
    "tensor": lambda: TENSOR,
    "variable": lambda: tf.convert_to_tensor(VARIABLE),
    "table": lambda: FACTOR * TABLE.lookup(tf.constant(0)),
}


def by_vjp(f, slope):
    def form(x):
        def grad_fn(u, variables=None):
            return u * slope(x) if variables is None else (u * slope(x), [u * tf.sin(x)])

        return f(x), grad_fn

    return sgtrick.custom_vjp(form)


FORMS = OF_SLOPE | {
    "custom_vjp": by_vjp,
    "custom_gradient": lambda f, slope: lambda x: sgtrick.custom_gradient(f(x), slope(x), x),
    "implicit_root": lambda f, _: (
        lambda x: sgtrick.implicit_root(
            lambda y, x, value=f: y - tf.sin(x) * value.factor(), f(x), x
        )
    ),
}
PLACES = {
    "cond": lambda f: lambda x: tf.cond(x[0] > 0, lambda: f(x), lambda: x),
    "switch_case": lambda f: lambda x: tf.switch_case(tf.constant(1), [lambda: x, lambda: f(x)]),
    "while_loop": lambda f: (
        lambda x: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, f(y)), (0, x))[1]
    ),
    "map_fn": lambda f: lambda x: tf.map_fn(f, x[tf.newaxis])[0],
    "loop in a branch": lambda f: PLACES["cond"](PLACES["while_loop"](f)),
}
WAYS = ["in tf.function", "around tf.function"]


def form_of(name, closed_over, place):
    factor = CLOSED_OVER[closed_over]

    def f(x):  # with the value of sin(x) * factor, and no derivative by x
        return tf.stop_gradient(tf.sin(x)) * factor()

    f.factor = factor
    return PLACES[place](FORMS[name](f, lambda x: tf.cos(x) * factor()))


@pytest.mark.parametrize(
    ("name", "closed_over", "place", "way"), spread(FORMS, CLOSED_OVER, PLACES, WAYS)
)
def test_first_derivatives(name, closed_over, place, way):
    run = RUN_IN[way](derivative, form_of(name, closed_over, place))
    np.testing.assert_allclose(run(X), np.cos(X) * FACTOR, rtol=1e-12)


def came(run):
    try:
        return verdict(run, -np.sin(X) * FACTOR, X)
    except AssertionError:  # TensorFlow's
        return "raises"


FUNCTIONS = [name for name in FORMS if name not in ("custom_gradient", "implicit_root")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "place", "way"),
    spread(
        [*FUNCTIONS, "implicit_root"],
        ["cond", "while_loop", "map_fn"],
        WAYS,
        # Half a minute.
        valid=lambda name, place, _: (name, place) != ("implicit_root", "map_fn"),
    ),
)
def test_second_derivatives(name, place, way):
    run = RUN_IN[way](lambda f: derivative(derivative(f)), form_of(name, "tensor", place))
    if name == "custom_vjp" and place == "cond":
        # The test of the transpose uses what the rule closes over.
        with pytest.raises(NotImplementedError, match="Pass it to the function with the rule"):
            run(X)
    else:
        assert came(run) == "right"


ON_RESOURCES = itertools.product(["variable", "table"], ["cond", "while_loop"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "closed_over", "place"),
    [(name, *where) for name, where in zip(FUNCTIONS, ON_RESOURCES, strict=True)],
)
def test_second_derivatives_where_tensorflow_may_fail(name, closed_over, place):
    """Whose gradients it does not differentiate in all places."""
    run = traced(derivative(derivative(form_of(name, closed_over, place))))
    assert came(run) in {"right", *LOUD}


# TensorFlow takes minutes for a root in a branch.
@pytest.mark.long
@pytest.mark.parametrize(("name", "place"), spread(FORMS, ["cond", "while_loop"], together=1))
def test_in_forward_mode(name, place):
    run = tf.function(forward_derivative(form_of(name, "tensor", place)))
    np.testing.assert_allclose(run(X), np.cos(X) * FACTOR, rtol=1e-12)


@pytest.mark.parametrize("name", [*FUNCTIONS, "custom_gradient"])
def test_under_xla(name):
    run = compiled(derivative(form_of(name, "variable", "cond")))
    np.testing.assert_allclose(run(X), np.cos(X) * FACTOR, rtol=1e-12)


@pytest.mark.long
def test_a_recurrent_cell_of_keras_is_fitted():
    @keras.saving.register_keras_serializable()
    class Cell(keras.layers.Layer):
        state_size = output_size = 1

        def build(self, _):
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs, states):
            factor = self.scale * tf.cast(TENSOR[0], inputs.dtype)

            @sgtrick.with_gradient(grad=lambda z: (1 - tf.tanh(z) ** 2) * factor, batch_ndims=2)
            def squashed(z):
                return tf.tanh(z) * factor

            y = squashed(inputs + states[0])
            return y, [y]

    model = keras.Sequential([keras.layers.RNN(Cell()), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=[8, 5, 1]).astype("float32")
    losses = model.fit(x, x.sum(1), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
