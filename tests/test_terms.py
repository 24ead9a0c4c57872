"""Second derivatives of rules with two terms, of which one may be lost.

There is one term for each output, or for each argument. That one of them is not stopped does not
mean that the other one was meant to be, also where both arguments are one tensor.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from forms import (
    MODES,
    POINTS,
    derivative,
    exact,
    hidden,
    host_slope,
    mapped,
    on_host,
    slope,
    true,
    verdict,
)
from matrix import spread

pytestmark = pytest.mark.long


def of_two_outputs_by_vjp(first, second):
    return sgtrick.custom_vjp(
        lambda x: ((hidden(x), 2 * hidden(x)), lambda u, v: first(x) * u + 2 * second(x) * v)
    )


def of_two_outputs_by_jvp(first, second):
    form = sgtrick.custom_jvp(lambda x: (hidden(x), 2 * hidden(x)))

    @form.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return form(x), (first(x) * t, 2 * second(x) * t)

    return form


def beside_integers_by_vjp(first, second):
    form = sgtrick.custom_vjp(
        lambda x: (
            (tf.cast(x, tf.int32), hidden(x), 2 * hidden(x)),
            lambda _, u, v: first(x) * u + 2 * second(x) * v,
        )
    )
    return lambda x: form(x)[1:]


def beside_integers_by_jvp(first, second):
    form = sgtrick.custom_jvp(lambda x: (tf.cast(x, tf.int32), hidden(x), 2 * hidden(x)))

    @form.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return form(x), (None, first(x) * t, 2 * second(x) * t)

    return lambda x: form(x)[1:]


# The others are of asinh(x) asinh(w).
def of_two_arguments_by_vjp(first, second):
    return sgtrick.custom_vjp(
        lambda x, w: (
            hidden(x) * hidden(w),
            lambda u: (u * first(x) * true(w), u * second(w) * true(x)),
        )
    )


def of_two_arguments_by_jvp(first, second):
    form = sgtrick.custom_jvp(lambda x, w: hidden(x) * hidden(w))

    @form.defjvp
    def rule(primals, tangents):
        (x, w), (t, s) = primals, tangents
        return form(x, w), first(x) * true(w) * t + second(w) * true(x) * s

    return form


def of_one_argument_by_with_gradient(first, _):
    return sgtrick.with_gradient(lambda x, w: hidden(x) * true(w), lambda x, w: first(x) * true(w))


def of_one_argument_with_the_value(first, _):
    return sgtrick.from_value_and_gradient(lambda x, w: (hidden(x) * true(w), first(x) * true(w)))


OUTPUTS = [of_two_outputs_by_vjp, of_two_outputs_by_jvp]
BESIDE_INTEGERS = [beside_integers_by_vjp, beside_integers_by_jvp]
ARGUMENTS = [
    of_two_arguments_by_vjp,
    of_two_arguments_by_jvp,
    of_one_argument_by_with_gradient,
    of_one_argument_with_the_value,
]


def stopped(x):
    return tf.stop_gradient(slope(x))


def alone(form):
    """With the other argument at a constant."""
    return lambda x: form(x, tf.sinh(tf.ones_like(x)))


def together(form):
    """With both arguments made of one."""
    return lambda x: form(x, x**3)


SQUARED = derivative(derivative(lambda x: true(x) ** 2))(tf.constant(POINTS))
USES = {
    "same": lambda form: lambda x: form(x, x),
    "copy last": lambda form: lambda x: form(x, tf.identity(x)),
    "copy first": lambda form: lambda x: form(tf.identity(x), x),
}

TWICE = list(itertools.product(MODES, repeat=2))
WAYS = [
    *((modes, lambda f: f) for modes in TWICE),
    *((modes, tf.function) for modes in (("reverse", "reverse"), ("forward", "reverse"))),
]
EVERY_WAY = pytest.mark.parametrize(
    ("modes", "wrap"),
    WAYS,
    ids=lambda part: " then ".join(part) if isinstance(part, tuple) else "",
)


def second_derivative(f, modes):
    for mode in modes:
        f = MODES[mode](f)
    return f


@pytest.mark.parametrize(("make", "cut", "way"), spread(OUTPUTS, [stopped, host_slope], WAYS))
def test_the_term_of_an_output_is_lost(make, cut, way):
    form, (modes, wrap) = make(cut, slope), way
    run = wrap(second_derivative(lambda x: form(x)[0], modes))
    assert verdict(run, exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize(
    ("make", "cuts", "way"),
    spread([*OUTPUTS, *BESIDE_INTEGERS], [(stopped, slope), (slope, stopped)], WAYS),
)
def test_one_of_the_terms_of_two_outputs_is_lost(make, cuts, way):
    form, (modes, wrap) = make(*cuts), way
    run = wrap(second_derivative(lambda x: sum(form(x)) / 3, modes))
    assert verdict(run, exact(2)) in {"raises", "NaN"}


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "in tf.function"])
@pytest.mark.parametrize("cut", [tf.stop_gradient, on_host(np.copy)], ids=["stopped", "host"])
@pytest.mark.parametrize("first", [slope, stopped])
def test_a_term_of_which_the_upstream_gradient_is_cut_off(first, cut, wrap):
    form = sgtrick.custom_vjp(
        lambda x: (
            (hidden(x), 2 * hidden(x)),
            lambda u, v: first(x) * cut(u) + 2 * slope(x) * v,
        )
    )
    run = wrap(second_derivative(lambda x: sum(form(x)) / 3, ("reverse", "reverse")))
    assert verdict(run, exact(2)) in ({"right"} if first is slope else {"raises", "NaN"})


@pytest.mark.parametrize(
    ("make", "way", "cuts"),
    spread(
        [*OUTPUTS, *BESIDE_INTEGERS, *ARGUMENTS[:2]],
        [
            (("reverse", "reverse"), lambda f: f),
            (("reverse", "reverse"), tf.function),
            (("forward", "reverse"), tf.function),
        ],
        [(slope, slope), (stopped, slope), (slope, stopped)],
    ),
)
def test_two_terms_under_vectorized_map(make, way, cuts):
    modes, wrap = way

    def member(x):
        return form(x, x) if make in ARGUMENTS else sum(form(x)) / 3

    form = make(*cuts)
    expected = SQUARED if make in ARGUMENTS else exact(2)
    run = wrap(second_derivative(mapped(member), modes))
    due = {"right"} if stopped not in cuts else {"raises", "NaN"}
    assert verdict(run, expected) in due


def by_closing_over_it_with_gradient(first):
    return lambda x: sgtrick.with_gradient(
        lambda z: hidden(z) * true(x), lambda z: first(z) * true(x)
    )(x)


def by_closing_over_it_with_the_value(first):
    return lambda x: sgtrick.from_value_and_gradient(
        lambda z: (hidden(z) * true(x), first(z) * true(x))
    )(x)


def by_closing_over_it_by_jvp(first):
    def at(x):
        form = sgtrick.custom_jvp(lambda z: hidden(z) * true(x))
        form.defjvp(lambda primals, ts: (form(*primals), first(primals[0]) * true(x) * ts[0]))
        return form(x)

    return at


@pytest.mark.parametrize(
    ("rule", "use", "way"),
    spread(
        [
            *((make, (stopped, slope)) for make in ARGUMENTS),
            *((make, (slope, stopped)) for make in ARGUMENTS[:2]),
        ],
        USES,
        WAYS,
    ),
)
def test_the_term_of_an_argument_that_is_passed_twice_is_lost(rule, use, way):
    (make, cuts), (modes, wrap) = rule, way
    run = wrap(second_derivative(USES[use](make(*cuts)), modes))
    assert verdict(run, SQUARED) in {"raises", "NaN"}


@pytest.mark.parametrize(
    ("make", "first", "second"),
    spread(
        ARGUMENTS,
        MODES,
        MODES,
        valid=lambda make, first, second: (
            make in ARGUMENTS[:2] or not first == second == "forward by the upstream gradient"
        ),  # takes long
    ),
)
def test_no_term_of_an_argument_that_is_passed_twice_is_lost(make, first, second):
    run = second_derivative(USES["same"](make(slope, slope)), (first, second))
    assert verdict(run, SQUARED) == "right"


@EVERY_WAY
@pytest.mark.parametrize(
    "make",
    [
        by_closing_over_it_with_gradient,
        by_closing_over_it_with_the_value,
        by_closing_over_it_by_jvp,
    ],
)
def test_the_term_of_an_argument_that_is_closed_over_is_lost(make, modes, wrap):
    assert verdict(wrap(second_derivative(make(stopped), modes)), SQUARED) in {"raises", "NaN"}


@pytest.mark.parametrize("make", ARGUMENTS[:3])
def test_an_argument_that_is_passed_twice_is_named(make):
    form, x = make(stopped, slope), tf.constant(POINTS)
    with pytest.raises(LookupError, match="was differentiated again"):
        derivative(derivative(lambda x: form(x, x)))(x)


@EVERY_WAY
@pytest.mark.parametrize("make", OUTPUTS)
def test_the_term_of_an_output_that_is_not_used_was_stopped(make, modes, wrap):
    form = make(slope, stopped)
    came = verdict(wrap(second_derivative(lambda x: form(x)[0], modes)), exact(2))
    # An accumulator computes the tangents of the tangents of all outputs at once.
    is_asked_for = modes == ("forward", "forward")
    assert came == ("raises" if is_asked_for else "right")


@pytest.mark.parametrize(
    ("make", "rule", "way"),
    spread(ARGUMENTS, [(stopped, alone), (stopped, together), (host_slope, alone)], WAYS),
)
def test_the_term_of_an_argument_is_lost(make, rule, way):
    (cut, place), (modes, wrap) = rule, way
    f, native = (place(g) for g in (make(cut, slope), lambda x, w: true(x) * true(w)))
    expected = derivative(derivative(native))(tf.constant(POINTS))
    assert verdict(wrap(second_derivative(f, modes)), expected) in {"raises", "NaN"}


@pytest.mark.parametrize(("make", "cut", "way"), spread(ARGUMENTS[:2], [stopped, host_slope], WAYS))
def test_the_term_of_an_argument_that_does_not_move_is_lost(make, cut, way):
    modes, wrap = way
    f = alone(make(slope, cut))
    assert verdict(wrap(second_derivative(f, modes)), exact(2)) == "right"


@pytest.mark.parametrize(
    "modes", list(itertools.product(["reverse", "forward"], repeat=2)), ids=str
)
@pytest.mark.parametrize("make", ARGUMENTS)
def test_no_term_is_lost(make, modes):
    f, native = (together(g) for g in (make(slope, slope), lambda x, w: true(x) * true(w)))
    expected = derivative(derivative(native))(tf.constant(POINTS))
    assert verdict(second_derivative(f, modes), expected) == "right"


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "in tf.function"])
def test_a_term_with_an_upstream_gradient_that_is_zero_and_differentiated(wrap):
    form = of_two_outputs_by_vjp(host_slope, slope)

    def run(x):
        u = tf.zeros_like(x)
        with tf.GradientTape() as outer:
            outer.watch(u)
            with tf.GradientTape() as middle:
                middle.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    ys = form(x)
                g = inner.gradient(ys, x, [u, tf.ones_like(x)])
            d = middle.gradient(g, x)
        return outer.gradient(d, u)

    assert verdict(wrap(run), exact(2)) in {"raises", "NaN"}
