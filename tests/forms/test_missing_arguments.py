"""Derivatives that a rule leaves out: with respect to tensors that the function closes over.

`custom_vjp` has no derivatives but those of the rule. The oracle of the others is autodiff of the
true function.
"""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import hidden, slope, true, verdict
from shared import FIRST_WAYS, WRAPS, compiled, gradients, mapped
from shared import derivative as reverse
from shared import forward_derivative as forward

X = tf.constant([0.3, -0.7], tf.float64)
W = tf.constant([1.5, 2.0], tf.float64)
V = tf.Variable([0.4, 0.9], dtype=tf.float64)
SCALE = tf.Variable(2.0, dtype=tf.float64)

CLOSES_OVER = r"differentiated with respect to a tensor that it closes over.*Pass the tensor to"


def by_vjp(x, w):
    return sgtrick.custom_vjp(lambda x: (hidden(x) * w, lambda u: u * slope(x) * w))(x)


def by_vjp_of_two_outputs(x, w):
    form = sgtrick.custom_vjp(
        lambda x: ((hidden(x), hidden(x) * w), lambda u, v: slope(x) * (u + v * w))
    )
    return form(x)[1]


def by_vjp_with_a_variable(x, w):
    def f(x):
        scale = SCALE.read_value()

        def grad_fn(u, variables):
            assert len(variables) == 1
            return u * slope(x) * w * scale, [tf.reduce_sum(u * true(x) * w)]

        return hidden(x) * w * scale, grad_fn

    return sgtrick.custom_vjp(f)(x) / 2


def by_vjp_around_another_form(x, w):
    host = sgtrick.from_numpy(lambda w: (w, np.ones_like(w)), vectorized=True, event_ndims=0)
    return sgtrick.custom_vjp(lambda x: (hidden(x) * host(w), lambda u: u * slope(x) * w))(x)


FORMS = [
    by_vjp,
    by_vjp_of_two_outputs,
    by_vjp_with_a_variable,
    by_vjp_around_another_form,
]


def in_a_branch(f):
    return lambda x, w: tf.cond(x[0] > 0, lambda: f(x, w), lambda: x)


def in_a_loop(f):
    return lambda x, w: tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, f(x, w)), (0, tf.zeros_like(x))
    )[1]


WAYS = {
    "tape": lambda f, by: reverse(f, by),
    "forward mode": lambda f, by: forward(f, by),
    "tape in tf.function": lambda f, by: tf.function(reverse(f, by)),
    "tape around tf.function": lambda f, by: reverse(tf.function(f), by),
    "forward mode around tf.function": lambda f, by: forward(tf.function(f), by),
    "tape in XLA": lambda f, by: compiled(reverse(f, by)),
    "tape around vectorized_map": lambda f, by: reverse(mapped(f), by),
    "tape in vectorized_map": lambda f, by: mapped(reverse(f, by)),
    "a branch": lambda f, by: tf.function(reverse(in_a_branch(f), by)),
    "a loop": lambda f, by: tf.function(reverse(in_a_loop(f), by)),
}


def values(y):
    return np.asarray(tf.convert_to_tensor(y))


CASES = [
    (form, way)
    for form, way in itertools.product(FORMS, WAYS)
    # XLA calls no host.
    if not (form is by_vjp_around_another_form and way == "tape in XLA")
]


@pytest.mark.parametrize(("form", "way"), CASES)
class TestFirstDerivatives:
    def test_with_respect_to_the_argument(self, form, way):
        np.testing.assert_allclose(values(WAYS[way](form, 0)(X, W)), slope(X) * W, rtol=1e-12)

    def test_with_respect_to_what_is_closed_over(self, form, way):
        try:
            came = WAYS[way](form, 1)(X, W)
        except (LookupError, tf.errors.InvalidArgumentError) as error:
            assert "closes over" in str(error)  # noqa: PT017
        else:
            assert np.all(np.isnan(values(came)))


@pytest.mark.parametrize("form", FORMS)
def test_the_error(form):
    for way in ("tape", "forward mode"):
        with pytest.raises(LookupError, match=CLOSES_OVER):
            WAYS[way](form, 1)(X, W)
    with pytest.raises(tf.errors.InvalidArgumentError, match="closes over"):
        WAYS["tape in tf.function"](form, 1)(X, W)


@pytest.mark.parametrize("form", FORMS)
@WRAPS
def test_what_it_was_computed_from(form, wrap):
    """A part of the derivative would be missing beside others that are known."""
    run = wrap(form)

    def loss(x):
        w = tf.exp(V)
        return run(x, w) + w

    warns = pytest.warns(RuntimeWarning, match=f"NaN.*{CLOSES_OVER}")
    with warns if run is form else contextlib.nullcontext():
        by_x, by_v = gradients(loss, X, by=[X, V])
    np.testing.assert_allclose(by_x, slope(X) * tf.exp(V), rtol=1e-12)
    assert np.all(np.isnan(by_v))


@pytest.mark.parametrize("form", [f for f in FORMS if f is not by_vjp_around_another_form])
@WRAPS
def test_the_gradient_may_depend_on_it(form, wrap):
    """`grad_fn` closes over it too, and TensorFlow differentiates that."""
    np.testing.assert_allclose(wrap(reverse(reverse(form, 0), 1))(X, W), slope(X), rtol=1e-12)
    second = reverse(reverse(lambda x, w: true(x) * w, 0), 0)(X, W)
    np.testing.assert_allclose(wrap(reverse(reverse(form, 0), 0))(X, W), second, rtol=1e-12)


def whole(t):
    return tf.cast(tf.cast(t, tf.int32), t.dtype)


# What the value makes of it.
NOT_USED = {"only in the rule": tf.ones_like, "stopped": tf.stop_gradient, "its integers": whole}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("use", NOT_USED)
@WRAPS
def test_none_where_the_value_does_not_depend_on_it(use, inside, wrap):
    """The gradient is as with TensorFlow."""
    use = NOT_USED[use]

    def form(x, w):
        kept = use(w)
        f = lambda x: (hidden(x) * (use(w) if inside else kept), lambda u: u * slope(x) * w)  # noqa: E731
        return sgtrick.custom_vjp(f)(x)

    assert wrap(lambda: tf.constant(reverse(form, 1)(X, W) is None))()
    np.testing.assert_allclose(wrap(reverse(form))(X, W), slope(X) * W, rtol=1e-12)


def computed_before(x):
    """A rule that accounts for what was computed from its argument before."""
    y, g = hidden(x), slope(x)
    return sgtrick.custom_vjp(lambda _: (y, lambda u: u * g))(x)


def computed_before_with_a_variable(x):
    """And from a variable, which the rule gives the gradient of too."""
    y, g = hidden(x) * SCALE, slope(x) * SCALE

    def grad_fn(u, variables):
        assert len(variables) == 1
        return u * g, [tf.reduce_sum(u * true(x))]

    return sgtrick.custom_vjp(lambda _: (y + 0 * SCALE, grad_fn))(x) / 2


def computed_before_in_a_loop(x):
    y = tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, hidden(y)), (0, x))[1]
    g = tf.cond(tf.constant(True), lambda: slope(x), lambda: x)
    return sgtrick.custom_vjp(lambda _: (y, lambda u: u * g))(x)


def computed_before_from_another_argument(x):
    w = tf.ones_like(x)
    y, g = hidden(x) * w, slope(x)
    return sgtrick.custom_vjp(lambda x, w: (y, lambda u: (u * g, u * y)))(x, w)


def of_an_argument_that_was_computed(x):
    x = tf.sinh(tf.asinh(x))
    return computed_before(x)


COMPUTED_BEFORE = [
    computed_before,
    computed_before_with_a_variable,
    computed_before_in_a_loop,
    computed_before_from_another_argument,
]
IN_GRAPHS = {way: run for way, run in FIRST_WAYS.items() if "tf.function" in way} | {
    "XLA": lambda f: compiled(reverse(f)),
    "mapped": lambda f: reverse(lambda x: tf.vectorized_map(f, x)),
}


class TestWhatWasComputedFromAnArgument:
    """It counts as the argument, as in TensorFlow: the rule accounts for it."""

    @pytest.mark.parametrize("way", IN_GRAPHS)
    @pytest.mark.parametrize("form", [*COMPUTED_BEFORE, of_an_argument_that_was_computed])
    def test_in_graphs(self, form, way):
        np.testing.assert_allclose(IN_GRAPHS[way](form)(X), slope(X), rtol=1e-12)

    @pytest.mark.parametrize("form", COMPUTED_BEFORE)
    def test_eagerly_where_nothing_else_is_differentiated(self, form):
        np.testing.assert_allclose(reverse(form)(X), slope(X), rtol=1e-12)
        found = reverse(reverse(form))
        assert verdict(found, reverse(slope)(X), X) in {"right", "raises", "NaN"}

    def test_eagerly_with_respect_to_variables(self):
        """That are the argument, or that the function reads."""
        v = tf.Variable(X)
        by_v, by_scale = gradients(computed_before_with_a_variable, v, by=[v, SCALE])
        np.testing.assert_allclose(by_v, slope(X), rtol=1e-12)
        np.testing.assert_allclose(by_scale, tf.reduce_sum(true(X)) / 2, rtol=1e-12)

    @pytest.mark.parametrize(
        "form", [computed_before, computed_before_in_a_loop, of_an_argument_that_was_computed]
    )
    def test_eagerly_elsewhere(self, form):
        """Beside another tensor, which it may have been computed from, for all that is known."""
        with pytest.warns(RuntimeWarning, match="with respect to a tensor that it closes over"):
            by_x, by_w = gradients(lambda x, w: form(x) * w, X, W)
        assert np.all(np.isnan(by_x))
        np.testing.assert_allclose(by_w, true(X), rtol=1e-12)
        if form is not of_an_argument_that_was_computed:
            with pytest.raises(LookupError, match="closes over"):
                forward(form)(X)
