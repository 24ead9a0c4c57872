"""By the point that a rule covers, and by what the rule does not cover, in either order."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, verdict
from matrix import LOUD, spread, traced
from shared import (
    MODES,
    TWICE,
    WAYS,
    WRAPS,
    Way,
    compiled,
    constant,
    derivative,
    mapped,
    on_host,
)

FORMS = {name: make for name, make in OF_SLOPE.items() if name != "custom_vjp"}
X, W = np.float64(0), 2.0


def value(x, w):
    return x * w**2 + x**2 * w


def slope(x, w):
    return w**2 + 2 * x * w


# Derivatives of `value` at X and W. Those by `w` alone are zero there, so that the cotangents of
# upstream gradients vanish, and what should be refused is silent where it hangs on these.
EXACT = {"wx": 2 * W, "xw": 2 * W, "ww": 0, "xx": 2 * W}
EXACT |= {"wwx": 2, "wxw": 2, "wxx": 2, "xww": 2, "xwx": 2, "xxw": 2}


def closed_over(make):
    w = constant(W)
    return make(lambda x: value(x, w), lambda x: slope(x, w)), w


def of_variable(read, **options):
    def source(make):
        v = tf.Variable([1.0, W], dtype=tf.float64, **options)
        return make(lambda x: value(x, read(v)), lambda x: slope(x, read(v))), v

    return source


def unseen(make):
    """Operations that have no gradient compute it, in a function that has one of its own."""
    whole = tf.custom_gradient(lambda w: (tf.cast(tf.cast(w, tf.int32), w.dtype), lambda u: u))
    w = constant(W)
    return make(lambda x: value(x, whole(w)), lambda x: slope(x, whole(w))), w


SOURCES = {
    "a tensor": closed_over,
    "a tensor, by tf.custom_gradient": unseen,
    "a variable": of_variable(lambda v: v[1]),
    "a variable that is watched": of_variable(lambda v: v[1], trainable=False),
    "a row that is gathered": of_variable(lambda v: tf.gather(v, [1])[0]),
    "a row, and all of it": of_variable(lambda v: (tf.gather(v, [1])[0] + v[1]) / 2),
    "a row, in a function": of_variable(tf.function(lambda v: tf.gather(v, [1])[0])),
}


def by(f, source):
    """The sum of the derivatives of a number by what `source` returns for `x`."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(source(x))
            y = f(x)
        return tf.reduce_sum(tf.convert_to_tensor(tape.gradient(y, source(x))))

    return run


SOME_WAYS = ["eager", "in tf.function", "in XLA", "around tf.function"]
OF_SOURCES = {way: WAYS[way] for way in SOME_WAYS} | {
    "in a branch": Way(
        around=lambda f: tf.function(lambda x: tf.cond(x < 1, lambda: f(x), lambda: x))
    ),
}


def came(make, source, order, way):
    h, w = SOURCES[source](make)
    sources = {"x": lambda x: x, "w": lambda x: w}
    modes = [functools.partial(by, source=sources[one]) for one in order]
    return verdict(OF_SOURCES[way](h, *modes), np.asarray(EXACT[order], float), X)


THIRD = ["a tensor", "a variable", "a row, and all of it"]
CASES = [
    *spread(FORMS, SOURCES, [order for order in EXACT if len(order) == 2], OF_SOURCES),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in spread(
            FORMS,
            THIRD,
            [order for order in EXACT if len(order) == 3],
            ["eager", "in tf.function"],  # around a function it takes TensorFlow half a minute
        )
    ),
]


@pytest.mark.parametrize(("name", "source", "order", "way"), CASES)
def test_are_right_if_the_point_comes_first(name, source, order, way):
    """Else they are refused, also where they depend on nothing but zeros."""
    found = came(FORMS[name], source, order, way)
    # The value that comes with a gradient is computed once, at a point where both are stopped.
    of_gradient = name == "from_value_and_gradient" and order == "xwx"
    if of_gradient or (order.startswith("w") and "x" in order):
        assert found in LOUD
    elif found != "right":  # TensorFlow cannot do it with native code either
        assert found in LOUD
        assert came(lambda f, _: f, source, order, way) in LOUD


OF_TWO = {
    "with_gradient": sgtrick.with_gradient,
    "from_value_and_gradient": lambda f, slope: sgtrick.from_value_and_gradient(
        lambda x, w: (f(x, w), slope(x, w))
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "outer", "inner", "way"),
    spread(OF_TWO, MODES.values(), MODES.values(), ["eager", "in tf.function", "in XLA"]),
)
def test_of_another_argument_in_both_modes(name, outer, inner, way):
    h = OF_TWO[name](value, slope)
    x, w = constant(X), constant(W)

    def run(first, second):
        modes = functools.partial(inner, k=first), functools.partial(outer, k=second)
        return WAYS[way](h, *modes)

    np.testing.assert_allclose(run(0, 1)(x, w), 2 * W)
    assert verdict(lambda x: run(1, 0)(x, w), np.asarray(2 * W), X) in LOUD


@pytest.mark.parametrize(
    ("name", "outer", "way"), spread(OF_TWO, MODES, ["eager", "in tf.function", "in XLA"])
)
def test_along_the_point_alone(name, outer, way):
    """The derivative along it and zero, differentiated again."""

    def along(f):
        def run(x, w):
            tangents = [tf.ones_like(x), tf.zeros_like(w)]
            with tf.autodiff.ForwardAccumulator([x, w], tangents) as accumulator:
                y = f(x, w)
            return accumulator.jvp(y)

        return run

    run = WAYS[way](OF_TWO[name](value, slope), along, MODES[outer])
    np.testing.assert_allclose(run(constant(X), constant(W)), EXACT["xx"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "wrap", "masked"),
    spread(OF_TWO, [tf.function, compiled], [-np.inf, np.nan, np.finfo(float).min], together=1),
)
def test_a_mask_as_the_other_argument(name, wrap, masked):
    """Whatever it holds, it does not spoil derivatives by the point alone."""

    def times(x, mask):
        return tf.where(mask == 0, x, 0)

    h = OF_TWO[name](
        lambda x, mask: tf.reduce_sum(times(x, mask) ** 3), lambda x, mask: 3 * times(x, mask) ** 2
    )
    mask = constant([0, masked, masked])
    np.testing.assert_allclose(
        derivative(derivative(wrap(h)))(constant([1.0, 2, 3]), mask), [6, 0, 0]
    )


def test_the_error_says_what_to_do():
    h = sgtrick.with_gradient(value, slope)
    message = "mixed derivative of value is unknown.*among argnums.*covered arguments first"
    with pytest.raises(LookupError, match=message):
        derivative(derivative(h, 1))(constant(X), constant(W))
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        tf.function(derivative(derivative(h, 1)))(constant(X), constant(W))


@WRAPS
@pytest.mark.parametrize("name", [*FORMS, "custom_vjp"])
def test_by_the_upstream_gradient_and_then_by_the_point(name, wrap):
    """Of a gradient that the host computes, also where it is zero."""
    form = OF_SLOPE[name](lambda x: x**3, on_host(lambda x: 3 * x**2))

    def pulled(u, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = form(x)
        return tape.gradient(y, x, u)

    def run(x):
        return derivative(derivative(pulled), 1)(constant(2.0), x)

    for x in (X, X + 1):
        assert verdict(wrap(run), np.asarray(6 * x), x) in LOUD


power = sgtrick.with_gradient(lambda n, x: x**n, lambda n, x: n * power(n - 1, x), argnums=1)
RECURSIVE = {way: WAYS[way] for way in ("eager", "in tf.function", "in XLA")} | {
    "around tf.function": Way(inside=tf.function),
    "in map_fn": Way(inside=lambda f: lambda n, x: tf.map_fn(lambda x: f(n, x), x[tf.newaxis])[0]),
    "around vectorized_map": Way(
        inside=lambda f: lambda n, x: mapped(lambda x: f(n, x))(x[tf.newaxis])[0], around=traced
    ),
}


@pytest.mark.parametrize("way", RECURSIVE)
def test_a_rule_that_calls_its_own_function(way):
    """Beside another tensor as argument."""
    n, x = constant(2.0), constant(3.0)
    np.testing.assert_allclose(RECURSIVE[way](power, k=1)(n, x), 6)
    np.testing.assert_allclose(RECURSIVE[way](power, *TWICE, k=1)(n, x), 2)
