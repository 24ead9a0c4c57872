"""Every form of one true function, `asinh`, entry by entry.

Their forwards have twice its derivative: who drops an override gets double. Those in `EVERY_ORDER`
have rules that TensorFlow can differentiate as often as it likes, those in `FIRST_ORDER` have none
of them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sgtrick
from matrix.functions import misled
from matrix.problem import SLIPS, traced

POINTS = np.array([-1.3, 0.4, 2.1])

Form = Callable[[Any], Any]


def true(x: Any) -> Any:
    return tf.asinh(x)


hidden = misled(true)


def slope(x: Any) -> Any:
    return (1 + x**2) ** -0.5


def on_host(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` of arrays as an operation that TensorFlow cannot differentiate."""

    def call(*tensors: Any) -> Any:
        y = tf.numpy_function(f, tensors, tensors[0].dtype, stateful=False)
        y.set_shape(tensors[0].shape)
        return y

    return call


host_slope = on_host(lambda x: (1 + x**2) ** -0.5)


def exact(order: int, x: Any = POINTS) -> Any:
    """The derivative of this order at POINTS."""
    return [
        np.arcsinh(x),
        (1 + x**2) ** -0.5,
        -x * (1 + x**2) ** -1.5,
        (2 * x**2 - 1) * (1 + x**2) ** -2.5,
    ][order]


def jvp_form(f: Form, slope: Form) -> Form:
    form = sgtrick.custom_jvp(f)
    form.defjvp(lambda primals, tangents: (f(primals[0]), slope(primals[0]) * tangents[0]))
    return form


def vjp_form(f: Form, slope: Form) -> Form:
    return sgtrick.custom_vjp(lambda x: (f(x), lambda upstream: upstream * slope(x)))


def every_order(f: Form, slope: Form, residual: Callable[..., Any]) -> dict[str, Form]:
    """The forms of `f` whose rules have derivatives of every order."""
    return {
        "with_gradient": sgtrick.with_gradient(f, slope),
        "from_value_and_gradient": sgtrick.from_value_and_gradient(lambda x: (f(x), slope(x))),
        "custom_jvp": jvp_form(f, slope),
        "custom_vjp": vjp_form(f, slope),
        "implicit_root": lambda a: sgtrick.implicit_root(
            residual, f(a), a, batch_ndims=a.shape.rank
        ),
    }


EVERY_ORDER = every_order(hidden, slope, lambda y, a: tf.sinh(y) - a)

FIRST_ORDER: dict[str, Form] = {
    "custom_gradient": lambda x: sgtrick.custom_gradient(hidden(x), slope(x), x),
    "with_gradient, host": sgtrick.with_gradient(hidden, host_slope),
    "with_gradient, stopped": sgtrick.with_gradient(hidden, lambda x: tf.stop_gradient(slope(x))),
    "from_value_and_gradient, host": sgtrick.from_value_and_gradient(
        lambda x: (hidden(x), host_slope(x))
    ),
    "custom_jvp, host": jvp_form(hidden, host_slope),
    "custom_vjp, host": vjp_form(hidden, host_slope),
    "custom_vjp, stopped": vjp_form(hidden, lambda x: tf.stop_gradient(slope(x))),
    "from_numpy": sgtrick.from_numpy(
        lambda x: (np.arcsinh(x), (1 + x**2) ** -0.5), event_ndims=0, vectorized=True
    ),
}

ALL = EVERY_ORDER | FIRST_ORDER

CALLS_HOST = {name for name in FIRST_ORDER if "host" in name or name == "from_numpy"}


def derivative(f: Form) -> Form:
    """The derivative entry by entry, by a tape."""

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    return run


def forward_derivative(f: Callable[..., Any], k: int = 0) -> Callable[..., Any]:
    """The derivative with respect to argument `k`, entry by entry, by an accumulator."""

    def run(*args: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(args[k], tf.ones_like(args[k])) as accumulator:
            y = f(*args)
        return accumulator.jvp(y)

    return run


def linear_in_upstream(f: Form) -> Form:
    """The derivative entry by entry, as the tangent of a pullback: it is linear in what it pulls.

    The upstream gradient is none of those for which TensorFlow knows that they are zero.
    """

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        u = 2 * tf.ones_like(y)
        with tf.autodiff.ForwardAccumulator(u, tf.ones_like(u)) as accumulator:
            gradient = tape.gradient(y, x, u)
        return accumulator.jvp(gradient)

    return run


MODES: dict[str, Callable[[Form], Form]] = {
    "reverse": derivative,
    "forward": forward_derivative,
    "forward by the upstream gradient": linear_in_upstream,
}


def mapped(f: Form) -> Form:
    return lambda x: tf.vectorized_map(f, x, fallback_to_while_loop=False)


def mapped_with_loops(f: Form) -> Form:
    """For what calls the host by an operation that TensorFlow cannot map otherwise."""
    return lambda x: tf.vectorized_map(f, x)


def map_of(name: str) -> Callable[[Form], Form]:
    """The one that serves a form of `ALL`."""
    return mapped_with_loops if name in CALLS_HOST - {"from_numpy"} else mapped


def compiled(f: Form) -> Form:
    return traced(f, jit_compile=True)


def looped(f: Form) -> Form:
    """`f`, by a loop that adds up two halves of it."""

    def run(x: Any) -> Any:
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y + f(x) / 2), (0, tf.zeros_like(x))
        )[1]

    return run


# Ways to a first derivative.
FIRST_WAYS = {
    "eager": derivative,
    "in tf.function": lambda f: tf.function(derivative(f)),
    "around tf.function": lambda f: derivative(tf.function(f)),
    "forward": forward_derivative,
    "forward in tf.function": lambda f: tf.function(forward_derivative(f)),
    "forward around tf.function": lambda f: forward_derivative(tf.function(f)),
}


def verdict(run: Form, expected: Any, x: Any = POINTS) -> str:
    """`right`, `raises`, `NaN` (nothing finite), `None` or `wrong`."""
    try:
        y = run(tf.constant(x))
        if y is None:
            return "None"
        y = y.numpy()
    except SLIPS:
        raise
    except Exception:
        return "raises"
    if y.shape == expected.shape and np.allclose(y, expected, rtol=1e-9, atol=1e-12):
        return "right"
    return "wrong" if np.any(np.isfinite(y)) else "NaN"
