"""Results beside a value, of which only the gradient of the value is known."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import POINTS, exact, hidden, slope, verdict
from matrix import spread, traced
from shared import HIDING, MODES, WAYS, WRAPS, compiled, derivative, mapped_with_loops, on_host


def square_of_numbers(x):
    """As code that only runs eagerly: nobody can trace it."""
    return tf.constant(x.numpy() ** 2)


def form_with(aux):
    return sgtrick.from_value_and_gradient(lambda x: ((hidden(x), aux(x)), slope(x)), has_aux=True)


FORMS = {
    "autodiff": form_with(tf.square),
    "host": form_with(on_host(np.square)),
    "the value": form_with(hidden),
    "numbers": form_with(square_of_numbers),
}
WHERE = {
    "eager": lambda f: f,
    "tf.function": traced,
    "XLA": compiled,
    "mapped": mapped_with_loops,
}


def linear_in_upstream(f):
    """The derivative entry by entry, as the tangent of a pullback: it is linear in what it pulls.

    The upstream gradient is none of those for which TensorFlow knows that they are zero.
    """

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        u = 2 * tf.ones_like(y)
        with tf.autodiff.ForwardAccumulator(u, tf.ones_like(u)) as accumulator:
            gradient = tape.gradient(y, x, u)
        return accumulator.jvp(gradient)

    return run


MODES = MODES | {"forward by the upstream gradient": linear_in_upstream}


def both(form):
    return lambda x: tf.add_n(form(x))


def is_possible(form, where, mode):
    if form == "numbers":  # TensorFlow traces what it pushes forward
        return (where, mode) == ("eager", "reverse")
    return where != "XLA" or form in ("autodiff", "the value")


@pytest.mark.long
@pytest.mark.parametrize(("form", "where", "mode"), spread(FORMS, WHERE, MODES, valid=is_possible))
def test_in_every_way(form, where, mode):
    """The value has its derivative, and what stands beside it has none."""
    for k, promised in enumerate([{"right"}, {"raises", "NaN"}]):
        f = lambda x, k=k: FORMS[form](x)[k]  # noqa: E731
        assert verdict(WHERE[where](MODES[mode](f)), exact(1)) in promised
        if k == 1 or (where, mode) != ("mapped", "forward by the upstream gradient"):
            # There, TensorFlow transposes the gradient of all results.
            assert verdict(MODES[mode](WHERE[where](f)), exact(1)) in promised


def test_the_error_says_what_to_do():
    form = FORMS["autodiff"]
    message = r"\(aux\) was differentiated.* use tf.stop_gradient"
    for run in (derivative(both(form)), tf.function(derivative(both(form)))):
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
            run(tf.constant(POINTS))

    def stopped(x):  # as it says
        y, aux = form(x)
        return y + tf.stop_gradient(aux)

    assert verdict(derivative(stopped), exact(1)) == "right"


def test_any_structure():
    """Only what has a derivative is changed."""

    @sgtrick.from_value_and_gradient(has_aux=True)
    def form(x):
        aux = {
            "text": "a name",
            "number": 3,
            "array": np.arange(3),
            "tensors": (tf.size(x), x * 2),
            "ragged": tf.RaggedTensor.from_row_lengths(x * 3, [1, 2]),
        }
        return (tf.reduce_sum(x**2), aux), 2 * x

    x = tf.constant(POINTS)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        _, aux = form(x)
    assert (aux["text"], aux["number"], int(aux["tensors"][0])) == ("a name", 3, 3)
    np.testing.assert_array_equal(aux["array"], np.arange(3))
    np.testing.assert_array_equal(aux["ragged"].flat_values, 3 * POINTS)
    for result in (aux["tensors"][1], aux["ragged"].flat_values):
        with pytest.raises(LookupError, match="was differentiated"):
            tape.gradient(result, x)


@WRAPS
@pytest.mark.parametrize("dtype", [tf.float64, tf.int32])
def test_a_tensor_array(dtype, wrap):
    """Nothing tells what reads it, so it cannot be returned, unless it holds integers."""

    @sgtrick.from_value_and_gradient(has_aux=True)
    def form(x):
        array = tf.TensorArray(dtype, 1).write(0, tf.cast(x**2, dtype))
        return (x**2, array), 2 * x

    def with_array(x):
        y, array = form(x)
        return y + tf.cast(tf.reduce_sum(array.stack()), y.dtype)

    run, x = wrap(derivative(with_array)), tf.constant(3.0, tf.float64)
    if dtype == tf.int32:
        assert run(x) == 6
        return
    with pytest.raises(TypeError, match=r"form .*tf\.TensorArray .*array\.stack\(\)"):
        run(x)


W, TRAINABLE = tf.constant(1.5, tf.float64), tf.Variable(1.5, dtype=tf.float64)
FIXED = tf.Variable(1.5, dtype=tf.float64, trainable=False)
TABLE = tf.Variable([1.5, 2.0], dtype=tf.float64)


def of_a_list(x):
    array = tf.TensorArray(W.dtype, 1, element_shape=[], clear_after_read=False).write(0, W + 0)
    return form_with(lambda x: x * array.read(0))(x)


# A form whose auxiliary result also depends on something else, and what that is.
CLOSING_OVER = {
    name: (form_with(lambda x, make=make: make(x, W)), W) for name, make in HIDING.items()
} | {
    "a tensor": (form_with(lambda x: x * W), W),
    "a variable": (form_with(lambda x: x * TRAINABLE), TRAINABLE),
    "one that is not trainable": (form_with(lambda x: x * FIXED), FIXED),
    "a table": (form_with(lambda x: x * tf.gather(TABLE, 0)), TABLE),
    "a list": (of_a_list, W),
    "what the host gets": (form_with(lambda x: x * on_host(np.square)(W)), W),
}


@pytest.mark.parametrize(
    ("name", "way"),
    spread(
        CLOSING_OVER,
        ["eager", "in tf.function", "around tf.function"],
        # Eager execution does not tell it from NumPy.
        valid=lambda *case: case != ("what the host gets", "eager"),
    ),
)
def test_what_it_closes_over(name, way):
    form, source = CLOSING_OVER[name]

    def mode(f):
        def run(x):
            found = derivative(lambda _: f(x))(source)
            return None if found is None else tf.convert_to_tensor(found)

        return run

    run = WAYS[way](lambda x: form(x)[1], mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"A gradient is NaN.*\(aux\) was differentiated")
        assert verdict(run, np.ones_like(source)) in {"raises", "NaN"}
