"""What `f` and `grad` of `sgtrick.keras.custom_vjp` may be, and what they may not."""

import functools
import types

import keras
import numpy as np
import pytest
from keras import ops
from protocols import RULES, arguments
from transformations import (
    BACKEND,
    array,
    check_reverse,
    dtype_of,
    gradient,
    misled,
    tensor,
    variable_gradient,
)

from sgtrick.keras import custom_vjp

POINTS = np.random.default_rng(3).normal(size=(4,))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_like_the_true_function(rule):
    form, truth = RULES[rule]
    check_reverse(form, truth, *arguments(truth))


@pytest.mark.parametrize(
    ("f", "x", "u", "expected"),
    [
        (lambda x: (x + 0, lambda u: ops.clip(u, -1.0, 1.0)), [1.0, 2.0], [0.5, 3.0], [0.5, 1.0]),
        (
            lambda x: (1 / x, lambda u: -u / x**2),
            [0.0, np.inf, 2.0],
            [1.0] * 3,
            [-np.inf, 0.0, -0.25],
        ),
    ],
    ids=["not linear", "not finite"],
)
def test_grad_is_called_as_it_is(f, x, u, expected):
    (g,) = gradient(custom_vjp(f), [tensor(x)], tensor(u))
    np.testing.assert_allclose(array(g), expected)
    np.testing.assert_array_equal(array(custom_vjp(f)(tensor(x))), array(f(tensor(x))[0]))


def test_grad_in_r_with_the_names_of_the_arguments():
    """reticulate does not tell the names; R says that an argument is missing when it reads it."""

    def grad(x, y=None, upstream=None):
        if y is None:
            raise RuntimeError('argument "y" is missing, with no default')
        return y * upstream, x * upstream

    namespace = {"__name__": "rpytools.call", "f": grad}
    exec("def python_function(*args, **kwargs): return f(*args, **kwargs)", namespace)
    form = custom_vjp(lambda x, y: (misled(x * y), namespace["python_function"]))
    check_reverse(form, lambda x, y: x * y, POINTS, POINTS + 1)


@pytest.mark.parametrize(
    ("dtype", "returned"),
    [
        ("bfloat16", lambda u: 3 * u),
        ("float16", lambda u: ops.cast(3 * u, "float32")),
        ("float32", lambda u: ops.cast(3 * u, "int32")),
        ("float32", lambda u: 3),
        ("float32", lambda u: np.array(3)),
        ("float32", lambda u: u > 0),
    ],
)
def test_a_gradient_has_the_dtype_of_its_argument(dtype, returned):
    f = custom_vjp(lambda x: (misled(3 * x), returned))
    x = ops.cast(2.0, dtype)
    (g,) = gradient(lambda x: f(x) + x, [x], ops.ones_like(x))
    assert dtype_of(g) == dtype
    is_mask = dtype_of(ops.convert_to_tensor(returned(x))) == "bool"
    assert float(array(ops.cast(g, "float32"))) == (2 if is_mask else 4)


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda x: (misled(2 * x), lambda u: 2 * u), "sgtrick(<lambda>)"),
        (functools.partial(lambda a, x: (misled(a * x), lambda u: a * u), 2.0), "partial"),
    ],
)
def test_it_is_a_plain_function_with_a_name(f, name):
    """Keras stores these by name, instances not at all, and of a `<lambda>` the bytecode."""
    h = custom_vjp(f)
    assert isinstance(h, types.FunctionType)
    assert h.__name__ == custom_vjp()(f).__name__ == name
    check_reverse(h, lambda x: 2 * x, POINTS)


def test_grad_is_called_only_for_a_gradient():
    calls = []
    custom_vjp(lambda x: (x + 0, lambda u: calls.append(u) or u))(tensor(POINTS))
    # jax traces it at once, but computes nothing.
    assert calls == [] or BACKEND == "jax"


@keras.saving.register_keras_serializable("tests")
@custom_vjp
def cube(x):
    return misled(x**3), lambda u: u * 3 * x**2


@keras.saving.register_keras_serializable("tests")
@custom_vjp
def with_names_of_keras(x, fn=1.0, *, self=1.0, args=1.0, name=""):
    """Operations of Keras have such parameters."""
    factor = fn * self * args
    return misled(factor * x), lambda u: (u * factor, None, None, None, None)


IN_MODELS = {
    "sparse": (lambda x: cube(2 * x), lambda x: (2 * x) ** 3),  # Keras takes it for sparse
    "names": (
        lambda x: with_names_of_keras(x, fn=2.0, self=3.0, args=5.0, name="a"),
        lambda x: 30 * x,
    ),
}


@pytest.mark.parametrize("case", IN_MODELS)
def test_a_functional_model(case, tmp_path):
    form, truth = IN_MODELS[case]
    x = keras.Input((), dtype="float64")
    model = keras.Model(x, form(x))
    model.save(tmp_path / "model.keras")
    for m in (model, keras.models.load_model(tmp_path / "model.keras")):
        check_reverse(m, truth, POINTS)


def test_a_variable_beside_symbolic_arguments():
    v = keras.Variable(np.array(3.0), dtype="float64")
    x = keras.Input((), dtype="float64")
    model = keras.Model(x, scaled(x, factor=v))
    check_reverse(model, lambda x: 3 * x, POINTS)
    g = variable_gradient(lambda: ops.sum(model(tensor(POINTS))), v)
    np.testing.assert_allclose(array(g), POINTS.sum())


@pytest.mark.skipif(BACKEND == "jax", reason="jax raises its own error")
def test_a_closed_over_symbol():
    x, y = (keras.Input((3,), dtype="float64") for _ in range(2))
    with pytest.raises(TypeError, match=r"closes over a symbolic.*as an arg|is a KerasTensor"):
        custom_vjp(lambda x: (x * y, lambda u: u * y))(x)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda x: x, TypeError, r"must return \(y, grad\)"),
        (
            lambda x: (x + 0, lambda u: ops.cast(u, "complex64")),
            TypeError,
            "of x that grad of <lambda> returned has dtype complex64, expected float64",
        ),
        (lambda x: (x + 0, lambda u: u[:2]), ValueError, r"shape \[2\] for x, expected"),
        # A parameter with a default is no upstream gradient.
        (
            lambda x: ([x + 0, x + 1], lambda u, s=3.0: s * u),
            TypeError,
            r"takes \(u\) besides parameters with defaults, but there are 2 upstream",
        ),
        (lambda x: ([x + 0], lambda u=None: u), TypeError, r"takes \(\) besides"),
        (
            lambda x: ([x + 0, x + 1], lambda u, s=1, *more: s * u),
            TypeError,
            r"takes \(u\) besides",
        ),
        (
            lambda x: (x + 0, lambda y, upstream: upstream),
            TypeError,
            r"as `\*args` or under their own names, and then `upstream`: \(x, upstream\)",
        ),
    ],
)
def test_a_function_that_breaks_the_protocol(f, error, message):
    with pytest.raises(error, match=message):
        gradient(
            lambda x: sum(keras.tree.flatten(custom_vjp(f)(x))), [tensor(POINTS)], tensor(POINTS)
        )


def test_a_function_that_is_registered_without_its_rule():
    @keras.saving.register_keras_serializable("protocol")
    def early(x):
        return x, lambda u: u

    with pytest.raises(ValueError, match=r"early is registered .* on the line above custom_vjp"):
        custom_vjp(early)


def test_a_closed_over_tensor_that_is_differentiated():
    def form(w):
        return custom_vjp(lambda x: (x * w, lambda u: u * w))(tensor(POINTS))

    with pytest.raises(LookupError, match=r"(reads a|with respect to a) tensor that"):
        gradient(form, [tensor(POINTS)], tensor(POINTS))


@custom_vjp
def scaled(x, factor):
    return misled(x * factor), lambda u: (u * factor, ops.sum(u * x))


class TestVariables:
    def test_that_are_no_arguments(self):
        v = keras.Variable(2.0, dtype="float64", name="weight")
        state = keras.Variable(2.0, dtype="float64", trainable=False)

        @custom_vjp
        def reads(x):
            return x * v, lambda u: u * v

        @custom_vjp
        def assigns(x):
            state.assign(3.0)
            return x, lambda u: u

        with pytest.raises(TypeError, match=r"reads reads the variables \['weight.*as arguments"):
            reads(tensor(POINTS))
        with pytest.raises(TypeError, match="assigns assigns the variables"):
            assigns(tensor(POINTS))
        assert array(state) == 2.0

        frozen = custom_vjp(lambda x: (misled(x * state), lambda u: u * state))
        check_reverse(frozen, lambda x: 2 * x, POINTS)

    def test_a_loss_inside_is_an_error(self):
        """No rule gives its gradient."""
        regularizer = keras.layers.ActivityRegularization(l2=0.1, dtype="float64")
        regularized = custom_vjp(lambda x: (regularizer(x), lambda u: u))
        with pytest.raises(TypeError, match=r"adds a loss.*Add it outside"):
            regularized(tensor(POINTS))

    def test_as_an_argument(self):
        v = keras.Variable(np.array(3.0), dtype="float64")
        g = variable_gradient(lambda: ops.sum(scaled(tensor(POINTS), v)), v)
        np.testing.assert_allclose(array(g), POINTS.sum())

    @pytest.mark.skipif(BACKEND != "tensorflow", reason="values of jax do not change")
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("library", ["keras", "tensorflow"])
    def test_the_rule_has_the_values_of_the_call(self, library, compiled):
        import tensorflow as tf

        v = (keras if library == "keras" else tf).Variable(3.0, dtype="float64")

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = scaled(x, v)
            v.assign(5.0)
            return tape.gradient(y, [x, getattr(v, "_value", v)])

        by_x, by_v = (tf.function(run) if compiled else run)(tensor(POINTS))
        np.testing.assert_array_equal(by_x, np.full_like(POINTS, 3.0))
        np.testing.assert_allclose(by_v, POINTS.sum())

    @pytest.mark.skipif(BACKEND != "torch", reason="values of jax do not change")
    def test_one_that_is_assigned_too_early_is_an_error_of_torch(self):
        v = keras.Variable(3.0, dtype="float64")
        y = ops.sum(scaled(tensor(POINTS), v))
        v.assign(5.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
