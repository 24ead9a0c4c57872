"""Derivatives that a rule leaves out: with respect to tensors that the function closes over.

`custom_vjp` has no derivatives but those of the rule. The oracle of the others is autodiff of the
true function.
"""

import contextlib
import itertools
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import hidden, slope, true, verdict
from matrix import spread
from shared import EXECUTED, FIRST_WAYS, HIDING, WAYS, WRAPS, Way, gradients
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


FORMS = [by_vjp, by_vjp_of_two_outputs, by_vjp_with_a_variable, by_vjp_around_another_form]


def in_a_branch(f):
    return lambda x, w: tf.cond(x[0] > 0, lambda: f(x, w), lambda: x)


def in_a_loop(f):
    return lambda x, w: tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, f(x, w)), (0, tf.zeros_like(x))
    )[1]


EVERYWHERE = {way: run for way, run in FIRST_WAYS.items() if way != "forward in tf.function"} | {
    "in XLA": WAYS["in XLA"],
    "around vectorized_map": WAYS["around vectorized_map"],
    "in vectorized_map": WAYS["in vectorized_map"],
    "a branch": Way(inside=in_a_branch, around=tf.function),
    "a loop": Way(inside=in_a_loop, around=tf.function),
}


def values(y):
    return np.asarray(tf.convert_to_tensor(y))


def insist_on_error(run, *args):
    """Or NaN, where nothing can raise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"A gradient is NaN.*{CLOSES_OVER}")
        try:
            came = run(*args)
        except (LookupError, tf.errors.InvalidArgumentError) as error:
            assert "closes over" in str(error)  # noqa: PT017
        else:
            assert np.all(np.isnan(values(came)))


@pytest.mark.parametrize(
    ("form", "way"),
    [
        *itertools.product([by_vjp], EVERYWHERE),
        *spread(
            FORMS[1:],
            EVERYWHERE,
            together=1,
            # XLA calls no host.
            valid=lambda form, way: form is not by_vjp_around_another_form or "XLA" not in way,
        ),
    ],
)
def test_first_derivatives(form, way):
    np.testing.assert_allclose(values(EVERYWHERE[way](form)(X, W)), slope(X) * W, rtol=1e-12)
    insist_on_error(EVERYWHERE[way](form, k=1), X, W)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a branch"])
def test_in_a_function_that_a_rule_was_the_first_to_call(inside):
    """Its trace is kept for other calls, where what it closes over is no constant."""
    form = sgtrick.custom_vjp(lambda x: (hidden(x) * W, lambda u: u * slope(x) * W))

    @tf.function
    def traced(x):
        return tf.cond(x[0] > 0, lambda: form(x), lambda: x) if inside else form(x)

    first = sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: u * traced(x)))
    assert not np.isnan(reverse(first)(X)).any()
    with tf.GradientTape() as tape:
        tape.watch(W)
        y = traced(X)
    assert np.isnan(tape.gradient(y, W)).any()


@pytest.mark.parametrize("form", FORMS)
def test_the_error(form):
    for way in ("eager", "forward"):
        with pytest.raises(LookupError, match=CLOSES_OVER):
            EVERYWHERE[way](form, k=1)(X, W)
    with pytest.raises(tf.errors.InvalidArgumentError, match="closes over"):
        EVERYWHERE["in tf.function"](form, k=1)(X, W)


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
    way: WAYS[way] for way in ("in XLA", "around vectorized_map")
}


class TestWhatWasComputedFromAnArgument:
    """It counts as the argument, as in TensorFlow: the rule accounts for it."""

    @pytest.mark.parametrize(
        ("form", "way"),
        spread([*COMPUTED_BEFORE, of_an_argument_that_was_computed], IN_GRAPHS, together=1),
    )
    def test_in_graphs(self, form, way):
        np.testing.assert_allclose(IN_GRAPHS[way](form)(X), slope(X), rtol=1e-12)

    @pytest.mark.parametrize("form", COMPUTED_BEFORE)
    def test_eagerly_where_nothing_else_is_differentiated(self, form):
        np.testing.assert_allclose(reverse(form)(X), slope(X), rtol=1e-12)
        found = reverse(reverse(form))
        assert verdict(found, reverse(slope)(X), X) in {"right", "raises", "NaN"}

    def test_eagerly_with_respect_to_variables(self):
        """That are the argument; others may be what the tensor was computed from alone."""
        v = tf.Variable(X)
        (by_v,) = gradients(computed_before_with_a_variable, v, by=[v])
        np.testing.assert_allclose(by_v, slope(X), rtol=1e-12)
        insist_on_error(lambda: gradients(computed_before_with_a_variable, v, by=SCALE))

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


# What is made of a number `y` and of `w`.
MADE = {
    "an operation": lambda y, w: y * w,
    "a loop": lambda y, w: tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, y * w), (0, y))[
        1
    ],
    "a branch": lambda y, w: tf.cond(tf.reduce_all(tf.abs(y) < 9), lambda: y * w, lambda: y),
    "a function": lambda y, w: tf.function(lambda y: y * w)(y),
    "a map": lambda y, w: tf.map_fn(lambda t: t * w, y[tf.newaxis])[0],
    "a list": lambda y, w: y * tf.TensorArray(w.dtype, 1).unstack(w[tf.newaxis] + 0).read(0),
}


def beside(kind, y, g):
    """A form of x that is given as `y`, with the derivative `g`."""
    if kind == "custom_vjp":
        return sgtrick.custom_vjp(lambda _: (y, lambda u: u * g))
    return sgtrick.custom_vjp(
        lambda _: (
            y * SCALE / 2,
            lambda u, variables: (u * g * SCALE / 2, [tf.zeros([]) for _ in variables]),
        )
    )


RULES = ["custom_vjp", "of a variable, too"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "made", "of", "way"),
    spread(
        RULES,
        MADE,
        ["tensor", "variable"],
        [way for way in EVERYWHERE if way != "forward"],
        together=1,
        valid=lambda kind, made, of, way: (
            not (
                ("vectorized_map" in way and (of == "variable" or made in ("a branch", "a map")))
                # TensorFlow has no forward mode around functions by variables.
                or (of == "variable" and "forward" in way)
            )
        ),
    ),
)
def test_what_was_computed_from_an_argument_and_from_something_else(kind, made, of, way):
    """The rule accounts for the argument alone."""

    def form(x, w):
        return beside(kind, MADE[made](hidden(x), w), MADE[made](slope(x), w))(x)

    w = V if of == "variable" else W
    np.testing.assert_allclose(values(EVERYWHERE[way](form)(X, w)), slope(X) * w, rtol=1e-12)
    insist_on_error(EVERYWHERE[way](form, k=1), X, w)


# What the value makes of a tensor without depending on it.
NOTHING_ELSE = {
    "stopped": tf.stop_gradient,
    "its integers": lambda w: tf.cast(tf.cast(w, tf.int32), w.dtype),
    "its shape": lambda w: tf.cast(tf.size(w), w.dtype),
    "constants": lambda w: tf.constant(3.0, w.dtype) * tf.ones_like(w),
    "random numbers": lambda w: tf.random.stateless_uniform(tf.shape(w), [1, 2], dtype=w.dtype),
}


@pytest.mark.parametrize(
    ("use", "kind", "wrap"), spread(NOTHING_ELSE, [*RULES, "in the function"], EXECUTED)
)
def test_what_has_no_derivatives_is_nothing_else(use, kind, wrap):
    """None, as with TensorFlow, also where the rule uses it."""

    def form(x, w):
        if kind != "in the function":
            return beside(kind, hidden(x) * NOTHING_ELSE[use](w), slope(x) * w)(x)
        f = lambda x: (hidden(x) * NOTHING_ELSE[use](w), lambda u: u * slope(x) * w)  # noqa: E731
        return sgtrick.custom_vjp(f)(x)

    wrap = EXECUTED[wrap]
    assert wrap(lambda: tf.constant(reverse(form, 1)(X, W) is None))()
    np.testing.assert_allclose(wrap(reverse(form))(X, W), slope(X) * W, rtol=1e-12)


def test_a_constant_that_is_watched_is_something_else():
    def run():
        c = tf.constant(3.0, X.dtype)
        return reverse(lambda x, c: beside("custom_vjp", hidden(x) * c, slope(x) * c)(x), 1)(X, c)

    insist_on_error(tf.function(run))


@WRAPS
@pytest.mark.parametrize("by", [[SCALE], [X, SCALE]], ids=["it", "an argument, too"])
def test_what_was_computed_from_a_variable_that_is_read_as_well(by, wrap):
    """The rule gives the derivative of what the function reads."""

    def form(x):
        c = SCALE**2
        rule = lambda u, variables: (u * slope(x) * SCALE * c, [tf.reduce_sum(u * true(x) * c)])  # noqa: E731
        return sgtrick.custom_vjp(lambda x: (hidden(x) * SCALE * c, rule))(x)

    np.testing.assert_allclose(wrap(reverse(form))(X), slope(X) * SCALE**3, rtol=1e-12)
    insist_on_error(wrap(lambda: gradients(form, X, by=by)[-1]))


@pytest.mark.parametrize("hiding", HIDING)
@WRAPS
def test_what_is_told_to_tapes_alone(hiding, wrap):
    """Eager execution does not say that an operation uses it."""

    def form(x, w):
        f = lambda x: HIDING[hiding](hidden(x), w)  # noqa: E731
        return sgtrick.custom_vjp(lambda x: (f(x), lambda u, variables=(): u * slope(x)))(x) + w

    np.testing.assert_allclose(wrap(reverse(form))(X, W), slope(X), rtol=1e-12)
    insist_on_error(wrap(reverse(form, 1)), X, W)


FIXED = tf.Variable([1.5, 2.0], dtype=tf.float64, trainable=False)
READ = {
    "an operation": lambda y: y * FIXED,
    "itself": lambda y: y * tf.convert_to_tensor(FIXED),
    "rows": lambda y: y * tf.gather(FIXED, [0, 1]),
    "a function": lambda y: tf.function(lambda y: y * FIXED)(y),
    "a loop": lambda y: MADE["a loop"](y, FIXED),
    "a branch": lambda y: MADE["a branch"](y, FIXED),
    "beside a trainable one": lambda y: y * tf.maximum(V, FIXED),
}


class TestVariablesThatAreNotTrainable:
    """Derivatives with respect to these are errors, too, where a tape watches one."""

    @staticmethod
    def form(read):
        f = lambda x: READ[read](hidden(x))  # noqa: E731

        def with_rule(x):
            def grad_fn(u, variables=()):
                g = u * slope(x) * FIXED
                return (g, [tf.zeros_like(v) for v in variables]) if variables else g

            return f(x), grad_fn

        return sgtrick.custom_vjp(with_rule)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("read", "way"),
        spread(
            READ,
            WAYS,
            together=1,
            # TensorFlow maps no operation that gathers from a variable.
            valid=lambda read, way: read != "rows" or "map" not in way,
        ),
    )
    def test_are_missing(self, read, way):
        form, x = self.form(read), tf.stack([X, X]) if "vectorized_map" in way else X

        def by(source):
            def mode(f):
                def run(x):
                    with tf.GradientTape() as tape:
                        tape.watch([x, FIXED])
                        y = f(x) + FIXED
                    return tape.gradient(y, x if source is None else source)

                return run

            return WAYS[way](form, mode)

        np.testing.assert_allclose(values(by(None)(x)), slope(x) * FIXED, rtol=1e-12)
        insist_on_error(by(FIXED), x)

    @WRAPS
    def test_as_arguments_are_not(self, wrap):
        """What the function reads of them counts as the argument."""
        form = sgtrick.custom_vjp(lambda a: (FIXED * a, lambda u: 2 * u * FIXED))
        by_it = wrap(lambda: reverse(form)(FIXED))()
        np.testing.assert_allclose(by_it, 2 * FIXED, rtol=1e-12)
