"""Derivatives that a rule leaves out: with respect to tensors that the function closes over.

`custom_vjp`, and `with_gradient` where the rule also gives the gradients of variables, have no
derivatives but those of the rule. The oracle of the others is autodiff of the true function.
"""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import hidden, slope, true, verdict
from shared import WRAPS, compiled, derivative, mapped
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


def by_gradient_with_a_variable(x, w):
    def grad(x, variables):
        assert len(variables) == 1
        return slope(x) * w * SCALE, [true(x) * w]

    return sgtrick.with_gradient(lambda x: hidden(x) * w * SCALE, grad)(x) / 2


def by_vjp_around_another_form(x, w):
    host = sgtrick.from_numpy(lambda w: (w, np.ones_like(w)), vectorized=True, event_ndims=0)
    return sgtrick.custom_vjp(lambda x: (hidden(x) * host(w), lambda u: u * slope(x) * w))(x)


FORMS = [
    by_vjp,
    by_vjp_of_two_outputs,
    by_vjp_with_a_variable,
    by_gradient_with_a_variable,
    by_vjp_around_another_form,
]


def reverse(f, by):
    def run(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = f(x, w)
        return tape.gradient(y, (x, w)[by])

    return run


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
    # XLA calls no host. The gradients of loops and branches read no variables, natively neither.
    if not (form is by_vjp_around_another_form and way == "tape in XLA")
    and not (form is by_gradient_with_a_variable and way in ("a branch", "a loop"))
]


@pytest.mark.parametrize(("form", "way"), CASES)
class TestFirstDerivatives:
    def test_with_respect_to_the_argument(self, form, way):
        np.testing.assert_allclose(values(WAYS[way](form, 0)(X, W)), slope(X) * W, rtol=1e-12)

    def test_with_respect_to_what_is_closed_over(self, form, way):
        run = WAYS[way](form, 1)
        try:
            came = run(X, W)
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
@pytest.mark.parametrize(
    ("wrap", "warned"),
    [
        (lambda f: f, pytest.warns(RuntimeWarning, match=f"NaN.*{CLOSES_OVER}")),
        (tf.function, contextlib.nullcontext()),
    ],
    ids=["eager", "tf.function"],
)
def test_what_it_was_computed_from(form, wrap, warned):
    """A part of the derivative would be missing beside others that are known."""
    run = wrap(form)
    with tf.GradientTape() as tape:
        tape.watch(X)
        w = tf.exp(V)
        loss = run(X, w) + w
    with warned:
        by_x, by_v = tape.gradient(loss, [X, V])
    np.testing.assert_allclose(by_x, slope(X) * tf.exp(V), rtol=1e-12)
    assert np.all(np.isnan(by_v))


@pytest.mark.parametrize("form", [f for f in FORMS if f is not by_vjp_around_another_form])
@WRAPS
def test_the_gradient_may_depend_on_it(form, wrap):
    """`grad_fn` closes over it too, and TensorFlow differentiates that."""
    np.testing.assert_allclose(wrap(reverse(reverse(form, 0), 1))(X, W), slope(X), rtol=1e-12)
    second = reverse(reverse(lambda x, w: true(x) * w, 0), 0)(X, W)
    np.testing.assert_allclose(wrap(reverse(reverse(form, 0), 0))(X, W), second, rtol=1e-12)


def only_in_the_rule(x, w):
    def f(x):
        j = slope(x) * w
        return hidden(x), lambda u: u * j

    return sgtrick.custom_vjp(f)(x)


def stopped(x, w):
    kept = tf.stop_gradient(w)
    return sgtrick.custom_vjp(lambda x: (hidden(x) * kept, lambda u: u * slope(x) * w))(x)


def stopped_inside(x, w):
    return sgtrick.custom_vjp(
        lambda x: (hidden(x) * tf.stop_gradient(w), lambda u: u * slope(x) * w)
    )(x)


def by_its_integers(x, w):
    def whole(t):
        return tf.cast(tf.cast(t, tf.int32), t.dtype)

    return sgtrick.custom_vjp(lambda x: (hidden(x) * whole(w), lambda u: u * slope(x) * w))(x)


@pytest.mark.parametrize("form", [only_in_the_rule, stopped, stopped_inside, by_its_integers])
@WRAPS
class TestWhatIsNotMissing:
    """Where the value does not depend on it, the gradient is None as with TensorFlow."""

    def test_none(self, form, wrap):
        def run():
            return tf.constant(reverse(form, 1)(X, W) is None)

        assert wrap(run)()

    def test_the_others(self, form, wrap):
        np.testing.assert_allclose(wrap(reverse(form, 0))(X, W), slope(X) * W, rtol=1e-12)


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
IN_GRAPHS = {
    "in tf.function": lambda f: tf.function(derivative(f)),
    "around tf.function": lambda f: derivative(tf.function(f)),
    "XLA": lambda f: compiled(derivative(f)),
    "forward in tf.function": lambda f: tf.function(forward(f)),
    "forward around tf.function": lambda f: forward(tf.function(f)),
    "mapped": lambda f: derivative(lambda x: tf.vectorized_map(f, x)),
}


class TestWhatWasComputedFromAnArgument:
    """It counts as the argument, as in TensorFlow: the rule accounts for it."""

    @pytest.mark.parametrize("way", IN_GRAPHS)
    @pytest.mark.parametrize("form", [*COMPUTED_BEFORE, of_an_argument_that_was_computed])
    def test_in_graphs(self, form, way):
        np.testing.assert_allclose(IN_GRAPHS[way](form)(X), slope(X), rtol=1e-12)

    @pytest.mark.parametrize("form", COMPUTED_BEFORE)
    def test_eagerly_where_nothing_else_is_differentiated(self, form):
        np.testing.assert_allclose(derivative(form)(X), slope(X), rtol=1e-12)
        found = derivative(derivative(form))
        assert verdict(found, derivative(slope)(X), X) in {"right", "raises", "NaN"}

    def test_eagerly_with_respect_to_variables(self):
        """That are the argument, or that the function reads."""
        v = tf.Variable(X)
        with tf.GradientTape() as tape:
            y = computed_before_with_a_variable(v)
        by_v, by_scale = tape.gradient(y, [v, SCALE])
        np.testing.assert_allclose(by_v, slope(X), rtol=1e-12)
        np.testing.assert_allclose(by_scale, tf.reduce_sum(true(X)) / 2, rtol=1e-12)

    @pytest.mark.parametrize(
        "form", [computed_before, computed_before_in_a_loop, of_an_argument_that_was_computed]
    )
    def test_eagerly_elsewhere(self, form):
        """Beside another tensor, which it may have been computed from, for all that is known."""
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            y = form(X) * W
        with pytest.warns(RuntimeWarning, match="with respect to a tensor that it closes over"):
            by_x, by_w = tape.gradient(y, [X, W])
        assert np.all(np.isnan(by_x))
        np.testing.assert_allclose(by_w, true(X), rtol=1e-12)
        if form is not of_an_argument_that_was_computed:
            with pytest.raises(LookupError, match="closes over"):
                forward(form)(X)


def test_an_argument_that_keeps_its_gradient_and_is_closed_over():
    """A rule that takes variables gives all derivatives but those by other arguments."""

    def f(x, w):
        grad = lambda x, w_, variables: (slope(x) * w * w_ * SCALE, [true(x) * w * w_])  # noqa: E731
        return sgtrick.with_gradient(lambda x, w_: hidden(x) * w * w_ * SCALE, grad)(x, w)

    with pytest.raises(LookupError, match="closes over"):
        reverse(f, 1)(X, W)


@WRAPS
def test_a_function_of_integers_alone(wrap):
    """There is no rule in the way of the value's own derivatives."""

    def run(w):
        return sgtrick.custom_vjp(lambda n: (w ** tf.cast(n, w.dtype), lambda u: None))(
            tf.constant(3)
        )

    with tf.GradientTape() as tape:
        tape.watch(W)
        y = wrap(run)(W)
    np.testing.assert_allclose(tape.gradient(y, W), 3 * W**2, rtol=1e-12)
