"""Second derivatives of gradients that call the host in part, and of gradients made in loops."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from forms import (
    MODES,
    POINTS,
    derivative,
    exact,
    forward_derivative,
    hidden,
    host_slope,
    jvp_form,
    linear_in_upstream,
    mapped,
    slope,
    true,
    verdict,
    vjp_form,
)
from matrix import spread

TWICE = {
    "eager": lambda f: derivative(derivative(f)),
    "tf.function": lambda f: tf.function(derivative(derivative(f))),
    "around tf.function": lambda f: derivative(derivative(tf.function(f))),
    "mapped": lambda f: tf.function(derivative(derivative(mapped(f)))),
}
EVERY_WAY_TO_ASK = pytest.mark.parametrize("where", TWICE)


def computed_before(slope):
    @sgtrick.custom_vjp
    def form(x):
        gradient = slope(x)
        return hidden(x), lambda upstream: upstream * gradient

    return form


def that_takes_variables(slope):
    scale = tf.Variable(1.0, dtype=tf.float64)

    def grad(x, variables):
        assert len(variables) == 1
        return slope(x), [hidden(x)]

    return sgtrick.with_gradient(lambda x: hidden(x) * scale, grad)


FORMS = {
    "with_gradient": lambda slope: sgtrick.with_gradient(hidden, slope),
    "with_gradient, variables": that_takes_variables,
    "from_value_and_gradient": lambda slope: sgtrick.from_value_and_gradient(
        lambda x: (hidden(x), slope(x))
    ),
    "custom_vjp": lambda slope: vjp_form(hidden, slope),
    "custom_vjp, before": computed_before,
    "custom_jvp": lambda slope: jvp_form(hidden, slope),
}


def in_part(x):
    """Half of it by the host."""
    return (slope(x) + host_slope(x)) / 2


def by_members(f):
    def run(x):
        return tf.reshape(tf.map_fn(f, tf.reshape(x, [-1])), tf.shape(x))

    return run


def in_a_branch(f):
    return lambda x: tf.cond(tf.reduce_sum(x) > -99, lambda: f(x), lambda: slope(x))


def carried(f):
    """By a loop whose result depends on the point through what its steps pass on."""

    def run(x):
        def step(i, before, _):
            return i + 1, x, f(before)

        return tf.while_loop(lambda i, *_: i < 2, step, (0, tf.zeros_like(x), tf.zeros_like(x)))[2]

    return run


def never(f):
    """By a loop that takes no step."""

    def step(i, y):
        return i + 1, tf.zeros_like(y)

    return lambda x: tf.while_loop(lambda i, _: i < 0, step, (0, f(x)))[1]


WAYS = {
    "alone": lambda f: f,
    "function": lambda f: tf.function(f),
    "members": by_members,
    "branch": in_a_branch,
    "carried": carried,
    "never": never,
    "branch in loop": lambda f: by_members(in_a_branch(f)),
}
# TensorFlow itself cannot map the derivatives of branches and of lone loops, and takes long.
PLACES = [(way, where) for way in WAYS for where in TWICE if where != "mapped"]
PLACES += [("alone", "mapped"), ("members", "mapped")]
EVERYWHERE = pytest.mark.parametrize(("way", "where"), PLACES)


@EVERY_WAY_TO_ASK
@pytest.mark.parametrize("form", FORMS)
def test_in_every_form(form, where):
    assert verdict(TWICE[where](FORMS[form](in_part)), exact(2)) in {"raises", "NaN"}


@EVERYWHERE
def test_in_every_way(way, where):
    form = sgtrick.with_gradient(hidden, WAYS[way](in_part))
    assert verdict(TWICE[where](form), exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize("way", WAYS)
def test_as_a_whole(way):
    form = computed_before(WAYS[way](host_slope))
    assert verdict(TWICE["tf.function"](form), exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize("where", TWICE)
def test_by_way_of_integers(where):
    def rounded(x):
        return tf.cast(tf.cast(slope(x) * 2**50, tf.int64), x.dtype) / 2**50

    form = sgtrick.with_gradient(hidden, rounded)
    assert verdict(derivative(form), exact(1)) == "right"
    assert verdict(TWICE[where](form), exact(2)) in {"raises", "NaN"}


@EVERYWHERE
def test_what_is_differentiable_is_right(way, where):
    form = sgtrick.with_gradient(hidden, WAYS[way](slope))
    assert verdict(TWICE[where](form), exact(2)) == "right"


@pytest.mark.parametrize("way", WAYS)
def test_what_was_computed_before_is_right(way):
    form = computed_before(WAYS[way](slope))
    assert verdict(TWICE["tf.function"](form), exact(2)) == "right"


def by_an_engine(x):
    """The slope, as the derivative of an engine."""
    engine = sgtrick.from_numpy(
        lambda x: ((1 + x**2) ** -0.5, -x * (1 + x**2) ** -1.5), event_ndims=0, vectorized=True
    )
    return engine(x)


@tf.custom_gradient
def by_tensorflow(x):
    return host_slope(x), lambda upstream: upstream * -x * (1 + x**2) ** -1.5


@sgtrick.custom_vjp
def by_a_form(x):
    return host_slope(x), lambda upstream: upstream * -x * (1 + x**2) ** -1.5


@pytest.mark.parametrize(
    ("rule", "way", "where"),
    spread([by_an_engine, by_a_form], WAYS, TWICE, valid=lambda rule, *place: place in PLACES),
)
def test_a_host_call_with_a_gradient_is_right(rule, way, where):
    form = sgtrick.with_gradient(hidden, WAYS[way](lambda x: (slope(x) + rule(x)) / 2))
    assert verdict(TWICE[where](form), exact(2)) == "right"


@pytest.mark.parametrize("where", ["eager", "tf.function"])  # elsewhere TensorFlow drops it
@pytest.mark.parametrize("way", ["alone", "function"])
def test_a_host_call_in_tf_custom_gradient_is_right(way, where):
    form = sgtrick.with_gradient(hidden, WAYS[way](lambda x: (slope(x) + by_tensorflow(x)) / 2))
    assert verdict(TWICE[where](form), exact(2)) == "right"


@pytest.mark.parametrize(
    ("form", "inner", "outer", "wrap"),
    spread(
        FORMS,
        [derivative, forward_derivative],
        [derivative, forward_derivative],
        [lambda f: f, tf.function],
        together=3,
    ),
)
def test_in_forward_mode(form, inner, outer, wrap):
    run = wrap(outer(inner(FORMS[form](in_part))))
    assert verdict(run, exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
@pytest.mark.parametrize("outer", [derivative, forward_derivative])
@pytest.mark.parametrize(
    "cut",
    [host_slope, lambda x: tf.stop_gradient(slope(x))],
    ids=["host", "stopped"],
)
def test_beside_the_gradient_of_a_variable(cut, outer, wrap):
    """Which depends on the point, and so does the error for a rule that cannot be transposed."""
    run = wrap(outer(forward_derivative(that_takes_variables(cut))))
    assert verdict(run, exact(2)) in {"raises", "NaN"}


@sgtrick.custom_vjp
def of_two(x, w):
    return hidden(x) * w, lambda upstream: (upstream * host_slope(x) * w, upstream * slope(x))


@EVERY_WAY_TO_ASK
def test_one_of_two_gradients_of_another_form_is_right(where):
    """The other one is lost."""

    def rule(x):
        w = tf.ones_like(x)
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = of_two(x, w)
        return tape.gradient(y, w)

    form = sgtrick.with_gradient(hidden, rule)
    assert verdict(TWICE[where](form), exact(2)) == "right"


def by_argument(i, of_two=of_two):
    """The gradient of `of_two` by one of its arguments, while a tape watches both."""

    def run(x):
        w = tf.ones_like(x)
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = of_two(x, w)
        return tape.gradient(y, [x, w])[i]

    return run


FIRST = {
    "eager": lambda f: derivative(f),
    "tf.function": lambda f: tf.function(derivative(f)),
    "around tf.function": lambda f: derivative(tf.function(f)),
    "mapped": lambda f: tf.function(derivative(mapped(f))),
}


@pytest.mark.parametrize("where", FIRST)
def test_first_by_another_argument_is_right(where):
    assert verdict(FIRST[where](by_argument(1)), exact(2)) == "right"
    assert verdict(FIRST[where](by_argument(0)), exact(2)) in {"raises", "NaN"}


def test_first_by_another_argument_around_a_map_is_right():
    def of_members(x, w):
        return tf.vectorized_map(lambda m: of_two(*m), (x, w))

    run = tf.function(derivative(by_argument(1, of_members)))
    assert verdict(run, exact(2)) == "right"
    run = tf.function(derivative(by_argument(0, of_members)))
    assert verdict(run, exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
def test_of_the_upstream_gradient(wrap):
    """A pullback that is passed to the host in part loses a term of the Hessian of a function."""
    on_host = tf.function(lambda u: tf.ensure_shape(tf.numpy_function(np.copy, [u], u.dtype), [3]))

    @sgtrick.custom_vjp
    def form(x):
        return hidden(x), lambda upstream: (upstream + on_host(upstream)) / 2 * slope(x)

    square = wrap(derivative(derivative(lambda x: form(x) ** 2)))
    expected = derivative(derivative(lambda x: tf.asinh(x) ** 2))(tf.constant(POINTS))
    assert verdict(square, expected) in {"raises", "NaN"}


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
def test_what_is_stopped_in_part_was_meant_to_be(wrap):
    @sgtrick.custom_vjp
    def form(x):
        return hidden(x), lambda upstream: upstream * x * tf.stop_gradient(x)

    x = tf.constant(POINTS)
    np.testing.assert_array_equal(wrap(derivative(derivative(form)))(x), x)


def stopped(x):
    return tf.stop_gradient(slope(x))


@pytest.mark.parametrize(
    ("form", "cut", "outer"), spread(FORMS, [in_part, host_slope, stopped], MODES)
)
def test_after_forward_mode_by_the_upstream_gradient(form, cut, outer):
    run = MODES[outer](linear_in_upstream(FORMS[form](cut)))
    assert verdict(run, exact(2)) in {"raises", "NaN"}
    if form == "custom_jvp":
        assert verdict(tf.function(run), exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("trick", ["clip_gradient", "magic_box"])
def test_of_tricks_after_forward_mode_by_the_upstream_gradient(trick, outer):
    form = sgtrick.with_gradient(hidden, in_part)
    around = {
        "clip_gradient": lambda x: form(sgtrick.clip_gradient(x, -1e9, 1e9)),
        "magic_box": lambda x: form(x) * sgtrick.magic_box(tf.zeros_like(x)),
    }[trick]
    run = MODES[outer](linear_in_upstream(around))
    assert verdict(run, exact(2)) in {"raises", "NaN"}


def test_with_respect_to_one_argument_in_code_that_runs_only_eagerly():
    """Nothing but the tape can tell, and it tells for each argument."""

    @sgtrick.custom_vjp
    def form(x, scale):
        def grad_fn(upstream):
            assert upstream.numpy() > 0
            copied = tf.numpy_function(np.copy, [scale], scale.dtype)
            return upstream * copied * tf.cos(x), upstream * tf.sin(x)

        return scale * tf.sin(x), grad_fn

    x, scale = tf.constant(0.3, tf.float64), tf.constant(2.0, tf.float64)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([x, scale])
        with tf.GradientTape() as inner:
            inner.watch([x, scale])
            y = form(x, scale)
        by_x, by_scale = inner.gradient(y, [x, scale])
    np.testing.assert_allclose(outer.gradient(by_x, x), -2 * np.sin(0.3))
    np.testing.assert_allclose(outer.gradient(by_scale, x), np.cos(0.3))
    with pytest.raises(LookupError, match="no connection"):
        outer.gradient(by_x, scale)


def test_by_numpy_in_eager_execution_beside_another_argument():
    """The rule would be traced without a loss."""

    def eager_slope(x):
        return tf.constant(slope(x.numpy())) if tf.executing_eagerly() else slope(x)

    form = sgtrick.custom_vjp(
        lambda x, w: (hidden(x) * w, lambda u: (u * eager_slope(x) * w, u * true(x)))
    )
    run = derivative(derivative(lambda x: form(x, tf.ones_like(x))))
    with pytest.raises(LookupError, match="no connection"):
        run(tf.constant(POINTS))
