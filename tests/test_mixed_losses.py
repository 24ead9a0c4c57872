"""Mixed derivatives by the point and by something else that the gradient gets from the host.

The value is `asinh(x) * w**2`, and `w` is another argument, a closed-over tensor or a variable.
"""

import pytest
import tensorflow as tf

import sgtrick
from forms import POINTS, on_host, slope, verdict
from matrix import spread

pytestmark = pytest.mark.long

X = tf.constant(POINTS)
W = tf.constant(1.5 + 0 * POINTS)
DATA = tf.constant(1.0 + 0 * POINTS)
MIXED = 2 * W.numpy() * (1 + POINTS**2) ** -0.5

host_square = on_host(lambda w: w**2)
SQUARES = {
    "in part": lambda w: (w**2 + host_square(w)) / 2,
    "wholly": host_square,
    "in a function": lambda w: tf.function(lambda w: (w**2 + host_square(w)) / 2)(w),
    "computed first": lambda w: tf.exp((w + host_square(tf.sqrt(tf.sqrt(w**2)))) / 2 - w) * w**2,
}
FINE = {
    "not": lambda w: w**2,
    "of data": lambda w: w**2 * host_square(DATA),
    "stopped in part": lambda w: w**2 + tf.stop_gradient(host_square(w) - w**2),
    "with a gradient": sgtrick.with_gradient(host_square, lambda w: 2 * w, batch_ndims=1),
}


def value(x, w):
    return tf.asinh(x) * w**2


def with_gradient(square):
    return sgtrick.with_gradient(value, lambda x, w: slope(x) * square(w), batch_ndims=1)


def with_gradient_closing_over_it(square):
    def form(x, w):
        def grad(x):
            return slope(x) * square(tf.convert_to_tensor(w))

        return sgtrick.with_gradient(lambda x: value(x, w), grad, batch_ndims=1)(x)

    return form


def from_value_and_gradient(square):
    return sgtrick.from_value_and_gradient(
        lambda x, w: (value(x, w), slope(x) * square(w)), batch_ndims=1
    )


def from_value_and_gradient_closing_over_it(square):
    def form(x, w):
        def run(x):
            return value(x, w), slope(x) * square(tf.convert_to_tensor(w))

        return sgtrick.from_value_and_gradient(run, batch_ndims=1)(x)

    return form


def custom_jvp_closing_over_it(square):
    def form(x, w):
        of_x = sgtrick.custom_jvp(lambda x: value(x, w))

        @of_x.defjvp
        def _(primals, tangents):
            moved = slope(primals[0]) * square(tf.convert_to_tensor(w)) * tangents[0]
            return value(primals[0], w), moved

        return of_x(x)

    return form


def custom_vjp(square):
    @sgtrick.custom_vjp
    def form(x, w):
        return value(x, w), lambda u: (u * slope(x) * square(w), u * tf.asinh(x) * 2 * w)

    return form


def custom_vjp_closing_over_it(square):
    def form(x, w):
        w = tf.convert_to_tensor(w)

        @sgtrick.custom_vjp
        def of_x(x):
            return value(x, w), lambda u: u * slope(x) * square(w)

        return of_x(x)

    return form


FORMS = [
    with_gradient,
    with_gradient_closing_over_it,
    from_value_and_gradient,
    from_value_and_gradient_closing_over_it,
    custom_jvp_closing_over_it,
    custom_vjp,
    custom_vjp_closing_over_it,
]


def reverse(f, *places):
    """The derivative by the first of some arguments, while a tape watches all of them."""

    def run(*args):
        with tf.GradientTape() as tape:
            tape.watch([args[i] for i in places])
            y = f(*args)
        return tape.gradient(y, [args[i] for i in places])[0]

    return run


def forward(f, place):
    def run(*args):
        x = args[place]
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = f(*args)
        return accumulator.jvp(y)

    return run


X_FIRST = {
    "x, w": lambda f: reverse(reverse(f, 0), 1),
    "x, w of both": lambda f: reverse(reverse(f, 0, 1), 1, 0),
    "x forward, w": lambda f: reverse(forward(f, 0), 1),
    "x, w forward": lambda f: forward(reverse(f, 0), 1),
    "x forward, w forward": lambda f: forward(forward(f, 0), 1),
}
W_FIRST = {
    "w, x": lambda f: reverse(reverse(f, 1), 0),
    "w, x of both": lambda f: reverse(reverse(f, 1, 0), 0, 1),
    "w, x forward": lambda f: forward(reverse(f, 1), 0),
}
WHERE = {
    "eager": lambda ask, f: ask(f),
    "tf.function": lambda ask, f: tf.function(ask(f)),
    "around tf.function": lambda ask, f: ask(tf.function(f)),
}
ORDERS = X_FIRST | W_FIRST
FEW = [("x, w", "eager"), ("w, x", "tf.function")]
CLOSED = [form for form in FORMS if "closing" in form.__name__]


def is_run(form, order, where):
    if form is custom_vjp_closing_over_it and order in W_FIRST:
        return False  # it has no gradient by what it closes over
    # Around functions TensorFlow itself has no derivatives of forward mode.
    return where == "eager" or not (
        "of both" in order or ("around" in where and "forward" in order)
    )


def asked(order, form, square, where):
    run = WHERE[where](ORDERS[order], form((SQUARES | FINE)[square]))
    return verdict(lambda _: run(X, W), MIXED)


HERE_AND_THERE = pytest.mark.parametrize(
    ("form", "order", "where"),
    [(form, *cell) for form in FORMS for cell in FEW if is_run(form, *cell)],
)


def check_is_loud(came, form, order):
    allowed = {"raises", "NaN"}
    if form is custom_vjp and order in W_FIRST:  # which has a gradient by w of its own
        allowed.add("right")
    assert came in allowed


@pytest.mark.parametrize(("form", "order", "where"), spread(FORMS, ORDERS, WHERE, valid=is_run))
def test_in_part(form, order, where):
    check_is_loud(asked(order, form, "in part", where), form, order)


@HERE_AND_THERE
def test_wholly(form, order, where):
    check_is_loud(asked(order, form, "wholly", where), form, order)


@pytest.mark.parametrize(
    ("square", "order", "where"),
    spread(
        ["in a function", "computed first"],
        ORDERS,
        WHERE,
        valid=lambda _, *cell: is_run(with_gradient, *cell),
    ),
)
def test_in_every_way(square, order, where):
    check_is_loud(asked(order, with_gradient, square, where), with_gradient, order)


@HERE_AND_THERE
def test_of_data_is_right(form, order, where):
    assert asked(order, form, "of data", where) == "right"


@pytest.mark.parametrize(("order", "where"), FEW)
@pytest.mark.parametrize("square", FINE)
def test_what_is_differentiable_is_right(square, order, where):
    assert asked(order, with_gradient, square, where) == "right"


def by_variable(of_x, w, order):
    def run(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            if "forward" in order:
                with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as inner:
                    y = of_x(x)
                first = inner.jvp(y)
            else:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = of_x(x)
                first = inner.gradient(y, x if order == "x, w" else w)
        return outer.gradient(first, x if order == "w, x" else w)

    return run


@pytest.mark.parametrize(
    ("form", "order", "where"),
    # The last form gives the gradients of variables itself.
    spread(CLOSED[:-1], ["x, w", "w, x", "x forward, w"], WHERE, valid=is_run),
)
def test_of_a_variable(form, order, where):
    w = tf.Variable(W)

    def of_x(square):
        return lambda x: form(square)(x, w)

    def run(square):
        f = of_x(square)
        ask = by_variable(tf.function(f) if "around" in where else f, w, order)
        ask = tf.function(ask) if where == "tf.function" else ask
        return verdict(lambda _: ask(X), MIXED)

    assert run(SQUARES["in part"]) in {"raises", "NaN"}
    assert run(FINE["of data"]) == "right"
