"""Derivatives with respect to what a rule is linear in: upstream gradients and tangents.

Where these are zero, the dot-product test of a transpose would say nothing. And third derivatives.
"""

import itertools

import pytest
import tensorflow as tf

import sgtrick
from forms import (
    FIRST_ORDER,
    MODES,
    derivative,
    exact,
    hidden,
    jvp_form,
    mapped,
    on_host,
    slope,
    verdict,
    vjp_form,
)
from matrix import spread


def by_jvp(cut):
    form = sgtrick.custom_jvp(hidden)
    form.defjvp(lambda primals, ts: (form(*primals), cut(ts[0]) * slope(primals[0])))
    return form


def by_jvp_of_two(cut):
    form = sgtrick.custom_jvp(lambda x, w: hidden(x) / 3 + hidden(w) * 2 / 3)

    @form.defjvp
    def rule(primals, tangents):
        (x, w), (t, s) = primals, tangents
        return form(x, w), cut(t) * slope(x) / 3 + s * slope(w) * 2 / 3

    return form


def of_two(make, second):
    def with_cut(cut):
        form = make(cut)
        return lambda x: form(x, second(x))

    return with_cut


def by_vjp(cut):
    return sgtrick.custom_vjp(lambda x: (hidden(x), lambda u: cut(u) * slope(x)))


def by_vjp_of_two_outputs(cut):
    form = sgtrick.custom_vjp(
        lambda x: ((hidden(x), 2 * hidden(x)), lambda u, v: (cut(u) + 2 * v) * slope(x))
    )
    return lambda x: sum(form(x)) / 3


def by_vjp_of_two(cut):
    return sgtrick.custom_vjp(
        lambda x, w: (
            hidden(x) / 3 + hidden(w) * 2 / 3,
            lambda u: (cut(u) * slope(x) / 3, u * slope(w) * 2 / 3),
        )
    )


RULES = {
    "JVP": by_jvp,
    "JVP of two arguments": of_two(by_jvp_of_two, lambda x: x * 1.0),
    "JVP of one argument twice": of_two(by_jvp_of_two, lambda x: x),
    "VJP": by_vjp,
    "VJP of two outputs": by_vjp_of_two_outputs,
    "VJP of two arguments": of_two(by_vjp_of_two, lambda x: x * 1.0),
}


def eager(f):
    return f


def pushed(f, x, t):
    with tf.autodiff.ForwardAccumulator(x, t) as accumulator:
        y = f(x)
    return accumulator.jvp(y)


def pulled(f, x, u):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x, u)


def in_reverse(moved, f, x, t):
    with tf.GradientTape() as tape:
        tape.watch(t)
        y = moved(f, x, t)
    return tape.gradient(y, t)


def forward(moved, f, x, t):
    with tf.autodiff.ForwardAccumulator(t, tf.ones_like(t)) as accumulator:
        y = moved(f, x, t)
    return accumulator.jvp(y)


@pytest.mark.parametrize(
    ("rule", "cut", "place", "mode", "moved", "at"),
    spread(
        RULES,
        [tf.identity, tf.stop_gradient, on_host(lambda t: t + 0)],
        ["eager", "in a function", "around a function"],
        [in_reverse, forward],
        [pushed, pulled],
        [0.0, 1.5],
        together=3,
        # Tapes do not see what becomes of tangents in a function.
        valid=lambda rule, cut, place, mode, moved, at: (
            place != "around a function" or (moved is pulled and at == 0)
        ),
    ),
)
def test_what_is_linear(rule, cut, place, mode, moved, at):
    inside = tf.function if place == "around a function" else eager
    wrap = tf.function if place == "in a function" else eager
    due = {"right"} if cut is tf.identity else {"raises", "NaN"}

    def run(x):
        return mode(moved, inside(RULES[rule](cut)), x, at * tf.ones_like(x))

    assert verdict(wrap(run), exact(1)) in due


@pytest.mark.parametrize(
    ("rule", "cut", "wrap"),
    spread(
        [rule for rule in RULES if "twice" not in rule],
        [tf.identity, tf.stop_gradient, on_host(lambda t: t + 0)],
        [eager, tf.function],
    ),
)
def test_under_vectorized_map(rule, cut, wrap):
    def run(x):
        return in_reverse(pulled, mapped(RULES[rule](cut)), x, tf.zeros_like(x))

    assert verdict(wrap(run), exact(1)) in ({"right"} if cut is tf.identity else {"raises", "NaN"})


@pytest.mark.parametrize("mode", [in_reverse, forward])
@pytest.mark.parametrize("wrap", [eager, tf.function], ids=["eager", "in a function"])
def test_the_upstream_gradient_of_another_output(mode, wrap):
    form = sgtrick.custom_vjp(
        lambda x: ((hidden(x), hidden(x)), lambda u, v: (tf.stop_gradient(u) + v) * slope(x))
    )

    def run(x, which):
        def moved(f, x, t):
            with tf.GradientTape() as tape:
                tape.watch(x)
                ys = f(x)
            return tape.gradient(ys, x, [t, 2 * tf.ones_like(x)][:: 1 - 2 * which])

        return mode(moved, form, x, tf.ones_like(x))

    assert verdict(wrap(lambda x: run(x, 0)), exact(1)) in {"raises", "NaN"}
    assert verdict(wrap(lambda x: run(x, 1)), exact(1)) == "right"


@pytest.mark.parametrize("wrap", [eager, tf.function], ids=["eager", "in a function"])
@pytest.mark.parametrize("cut", [tf.stop_gradient, on_host(lambda j: j + 0)])
def test_the_pullback_of_a_tangent_loses_what_the_tangent_loses(cut, wrap):
    form = sgtrick.with_gradient(hidden, lambda x: cut(slope(x)))

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = in_reverse(pushed, form, x, tf.ones_like(x))
        return tape.gradient(y, x)

    assert verdict(wrap(run), exact(2)) in {"raises", "NaN"}


def test_where_they_are_zero_nothing_else_is_refused():
    """Of two outputs, the host computes the tangents of the one that is not used."""
    form = sgtrick.custom_jvp(lambda x: (hidden(x), hidden(x)))
    copied = on_host(lambda t: t + 0)
    form.defjvp(
        lambda primals, ts: (
            form(*primals),
            (copied(ts[0]) * slope(primals[0]), ts[0] * slope(primals[0])),
        )
    )

    def second(x):
        return form(x)[1]

    for wrap in (eager, tf.function):
        one = wrap(lambda x: pulled(second, x, tf.ones_like(x)))
        assert verdict(one, exact(1)) == "right"
        assert verdict(wrap(lambda x: pulled(form, x, None)), exact(1)) in {"raises", "NaN"}
        none = wrap(lambda x: pulled(second, x, tf.zeros_like(x)))
        assert verdict(none, 0 * exact(1)) == "right"


@pytest.mark.parametrize(
    ("form", "modes"),
    [
        (form, modes)
        for form in ("with_gradient, stopped", "custom_jvp, host", "custom_vjp, stopped")
        for modes in itertools.product(["reverse", "forward"], repeat=3)
        # TensorFlow's accumulators raise an IndexError of their own, also of rules that lose nothing.
        if "custom_vjp" not in form or modes != 3 * ("forward",)
    ],
    ids=str,
)
def test_third_derivatives_of_what_is_lost(form, modes):
    run = FIRST_ORDER[form]
    for mode in modes:
        run = MODES[mode](run)
    assert verdict(run, exact(3)) in {"raises", "NaN"}


def along_one(f, x):
    return forward(pushed, f, x, tf.ones_like(x))


def along_both_factors(f, x):
    a, b, one = tf.ones_like(x), tf.ones_like(x), tf.ones_like(x)
    with tf.autodiff.ForwardAccumulator(b, one) as outer:
        with tf.autodiff.ForwardAccumulator(a, one) as inner:
            g = pulled(f, x, a * b)
        t = inner.jvp(g)
    return outer.jvp(t)


@pytest.mark.parametrize(
    ("make", "case", "wrap"),
    spread(
        [sgtrick.with_gradient, jvp_form, vjp_form],
        [
            (tf.identity, along_one),
            (on_host(lambda j: j + 0), along_one),
            # What is not lost, TensorFlow cannot differentiate here.
            (on_host(lambda j: j + 0), along_both_factors),
        ],
        [eager, tf.function],
    ),
)
def test_the_tangent_of_what_is_linear_loses_the_same(make, case, wrap):
    """Forward mode by what the gradient, or the tangent, is linear in, and then by the point."""
    cut, along = case
    due = {"right"} if cut is tf.identity else {"raises", "NaN"}
    form = make(hidden, lambda x: cut(slope(x)))
    assert verdict(wrap(derivative(lambda x: along(form, x))), exact(2)) in due


@pytest.mark.parametrize("wrap", [eager, tf.function], ids=["eager", "in a function"])
def test_a_gradient_that_is_made_of_the_upstream_gradient_alone_loses_nothing(wrap):
    """Other constants may have been computed by NumPy."""
    form = sgtrick.custom_vjp(lambda x: (2 * x, lambda u: u + u))
    run = wrap(derivative(derivative(lambda x: form(x) * x)))
    assert verdict(run, 4 + 0 * exact(1)) == "right"
