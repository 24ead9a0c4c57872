"""Every form of one true function, `asinh`, entry by entry.

Their forwards have twice its derivative: who drops an override gets double. Those in `EVERY_ORDER`
have rules that TensorFlow can differentiate as often as it likes, those in `FIRST_ORDER` have none
of them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import matrix
import sgtrick
from matrix.functions import misled
from shared import Form, mapped, mapped_with_loops, on_host

POINTS = np.array([-1.3, 0.4, 2.1])


def true(x: Any) -> Any:
    return tf.asinh(x)


hidden = misled(true)


def slope(x: Any) -> Any:
    return (1 + x**2) ** -0.5


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


def tangent_form(f: Form, slope: Form) -> Form:
    """The same by a rule that leaves the value to `f`."""
    form = sgtrick.custom_jvp(f)
    form.defjvp(lambda primals, tangents: (None, slope(primals[0]) * tangents[0]))
    return form


def vjp_form(f: Form, slope: Form) -> Form:
    return sgtrick.custom_vjp(lambda x: (f(x), lambda upstream: upstream * slope(x)))


# Of a function and its slope, entry by entry.
OF_SLOPE: dict[str, Callable[..., Any]] = {
    "with_gradient": sgtrick.with_gradient,
    "from_value_and_gradient": lambda f, slope: sgtrick.from_value_and_gradient(
        lambda x: (f(x), slope(x))
    ),
    "custom_jvp": jvp_form,
    "custom_vjp": vjp_form,
}


def every_order(f: Form, slope: Form, residual: Callable[..., Any]) -> dict[str, Form]:
    """The forms of `f` whose rules have derivatives of every order."""
    return {name: make(f, slope) for name, make in OF_SLOPE.items()} | {
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


def map_of(name: str) -> Callable[[Form], Form]:
    """The one that serves a form of `ALL`."""
    return mapped_with_loops if name in CALLS_HOST - {"from_numpy"} else mapped


def verdict(run: Form, expected: Any, x: Any = POINTS) -> str:
    """On what `run` makes of a point."""
    return matrix.verdict(lambda: run(tf.constant(x)), expected)
