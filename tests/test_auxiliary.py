"""Results beside a value, of which only the gradient of the value is known."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from forms import (
    MODES,
    POINTS,
    compiled,
    derivative,
    exact,
    forward_derivative,
    hidden,
    mapped,
    mapped_with_loops,
    on_host,
    slope,
    verdict,
)
from matrix import spread

host_square = on_host(np.square)


def square_of_numbers(x):
    """As code that only runs eagerly: nobody can trace it."""
    return tf.constant(x.numpy() ** 2)


def form_with(aux):
    return sgtrick.from_value_and_gradient(lambda x: ((hidden(x), aux(x)), slope(x)), has_aux=True)


FORMS = {
    "autodiff": form_with(tf.square),
    "host": form_with(host_square),
    "the value": form_with(hidden),
    "numbers": form_with(square_of_numbers),
    "from_numpy": sgtrick.from_numpy(
        lambda x: ((np.arcsinh(x), x**2), (1 + x**2) ** -0.5),
        event_ndims=0,
        vectorized=True,
        has_aux=True,
    ),
}
WHERE = {
    "eager": lambda f: f,
    "tf.function": tf.function,
    "XLA": compiled,
    "mapped": mapped_with_loops,
    "mapped in tf.function": lambda f: tf.function(mapped_with_loops(f)),
}


def both(form):
    return lambda x: tf.add_n(form(x))


def alone(form):
    return lambda x: form(x)[0]


def is_possible(form, where, mode):
    if form == "numbers":  # TensorFlow traces what it pushes forward
        return (where, mode) == ("eager", "reverse")
    return where != "XLA" or form in ("autodiff", "the value")


@pytest.mark.parametrize(("form", "where", "mode"), spread(FORMS, WHERE, MODES, valid=is_possible))
class TestInEveryWay:
    def test_its_derivative_is_loud(self, form, where, mode):
        for f in (both(FORMS[form]), lambda x: FORMS[form](x)[1]):
            inside = WHERE[where](MODES[mode](f))
            assert verdict(inside, exact(1)) in {"raises", "NaN"}
            around = MODES[mode](WHERE[where](f))
            assert verdict(around, exact(1)) in {"raises", "NaN"}

    def test_the_value_alone_is_right(self, form, where, mode):
        f = alone(FORMS[form])
        assert verdict(WHERE[where](MODES[mode](f)), exact(1)) == "right"
        if (where, mode) != ("mapped in tf.function", "forward by the upstream gradient"):
            # Which TensorFlow cannot do around a function that calls the host in a map.
            assert verdict(MODES[mode](WHERE[where](f)), exact(1)) == "right"


CONSTANTS = {
    "stopped": lambda x: tf.stop_gradient(x**2),
    "constant": lambda x: tf.ones_like(x) * 3.0,
    "without derivative": lambda x: tf.cast(x > 0, x.dtype),
}


@pytest.mark.parametrize(
    ("aux", "where", "mode"), spread(CONSTANTS, ["eager", "tf.function", "XLA", "mapped"], MODES)
)
def test_what_is_constant_does_not_count(aux, where, mode):
    assert verdict(WHERE[where](MODES[mode](both(form_with(CONSTANTS[aux])))), exact(1)) == "right"
    if where != "eager":
        assert (
            verdict(MODES[mode](WHERE[where](both(form_with(CONSTANTS[aux])))), exact(1)) == "right"
        )


@pytest.mark.parametrize("name", ["autodiff", "from_numpy"])
def test_the_error_says_what_to_do(name):
    with pytest.raises(LookupError, match=r"\(aux\) was differentiated.* use tf.stop_gradient"):
        derivative(both(FORMS[name]))(tf.constant(POINTS))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\(aux\) was differentiated"):
        tf.function(derivative(both(FORMS[name])))(tf.constant(POINTS))


@pytest.mark.parametrize("name", ["autodiff", "from_numpy"])
def test_to_stop_it_helps(name):
    def stopped(x):
        y, aux = FORMS[name](x)
        return y + tf.stop_gradient(aux)

    assert verdict(derivative(stopped), exact(1)) == "right"


EACH = [derivative, forward_derivative]


def is_quick(_, outer, where):
    """TensorFlow takes a minute for forward mode over derivatives of `vectorized_map`."""
    return outer is derivative or "mapped" not in where


class TestOtherArguments:
    """Keep their autodiff gradient, in auxiliary results too."""

    @staticmethod
    def form(x, scale):
        @sgtrick.from_value_and_gradient(has_aux=True)
        def form(x, scale):
            aux = {"scaled": x * scale**2, "scale": scale**3, "count": tf.size(x)}
            return (hidden(x) * scale, aux), slope(x) * scale

        return form(x, scale)

    @pytest.mark.parametrize("where", WHERE)
    @pytest.mark.parametrize("mode", EACH)
    def test_first_derivatives(self, where, mode):
        def by_scale(x):
            return mode(lambda scale: self.form(x, scale)[1]["scaled"])(2 * tf.ones_like(x))

        x = tf.constant(POINTS)
        np.testing.assert_allclose(WHERE[where](by_scale)(x), 4 * POINTS)

    @pytest.mark.parametrize("where", WHERE)
    def test_what_is_only_made_of_them(self, where):
        def by_both(x):
            scale = 2 * tf.ones_like(x)
            with tf.GradientTape() as tape:
                tape.watch([x, scale])
                y, aux = self.form(x, scale)
                total = y + aux["scale"]
            return tf.stack(tape.gradient(total, [x, scale]))

        x = tf.constant(POINTS)
        found = WHERE[where](by_both)(x) if "mapped" not in where else by_both(x)
        np.testing.assert_allclose(found, [2 * exact(1), exact(0) * 1 + 12])

    @pytest.mark.parametrize(("inner", "outer", "where"), spread(EACH, EACH, WHERE, valid=is_quick))
    def test_mixed_derivatives_are_loud(self, inner, outer, where):
        def by_scale(x):
            return inner(lambda scale: self.form(x, scale)[1]["scaled"])(2 * tf.ones_like(x))

        expected = 4 * np.ones_like(POINTS)
        assert verdict(WHERE[where](outer(by_scale)), expected) in {"raises", "NaN"}
        assert verdict(outer(WHERE[where](by_scale)), expected) in {"raises", "NaN"}


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
@pytest.mark.parametrize("outer", [derivative, forward_derivative])
def test_mixed_derivatives_with_a_variable_are_loud(outer, wrap):
    scale = tf.Variable(2.0, dtype=tf.float64)
    form = form_with(lambda x: x * scale**2)

    def by_scale(x):
        with tf.GradientTape() as tape:
            _, aux = form(x)
        return tape.gradient(aux, scale) * tf.ones_like(x)

    np.testing.assert_allclose(wrap(by_scale)(tf.constant(POINTS)), 4 * POINTS.sum())
    assert verdict(wrap(outer(by_scale)), 4 + 0 * POINTS) in {"raises", "NaN"}


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


def test_by_one_of_two_arguments():
    """That another one is not differentiated in a result is no error."""

    @sgtrick.from_value_and_gradient(argnums=(0, 1), has_aux=True)
    def form(x, z):
        return (hidden(x) + hidden(z), x * 2), (slope(x), slope(z))

    x, z = tf.constant(POINTS), tf.constant(POINTS + 1)
    for wrap in (lambda f: f, tf.function):
        run = wrap(lambda x, z: derivative(lambda z: tf.add_n(form(x, z)))(z))
        np.testing.assert_allclose(run(x, z), exact(1, POINTS + 1))
        run = wrap(lambda x, z: derivative(lambda x: tf.add_n(form(x, z)))(x))
        assert verdict(lambda x: run(x, z), exact(1)) == "raises"  # noqa: B023


def test_second_derivatives_of_the_value_do_not_see_it():
    form = FORMS["autodiff"]
    run = mapped(derivative(derivative(alone(form))))
    assert verdict(run, exact(2)) == "right"


def test_of_an_engine_without_derivatives():
    """Whose arguments are all integers."""
    h = sgtrick.from_numpy(
        lambda n: ((np.float64(n.sum()), n), None), has_aux=True, dtype="float64"
    )
    y, aux = h(tf.constant([1, 2]))
    np.testing.assert_array_equal(y, 3.0)
    np.testing.assert_array_equal(aux, [1.0, 2.0])
