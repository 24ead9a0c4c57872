"""Cases of the function forms, whose rules are the true ones and whose forwards mislead."""

from typing import Any

import tensorflow as tf

import sgtrick
from matrix import functions as fn
from matrix.problem import Case
from matrix.values import MATRICES, NUMBERS, POINTS


def with_gradient_cases() -> list[Case]:
    """Several arguments, and one argument that keeps autodiff."""
    hidden = fn.misled(fn.scalar)
    vector = sgtrick.with_gradient(fn.misled(fn.vector), fn.vector_jacobian)

    def members(x: Any) -> Any:
        b = 1 if x.shape.rank is None else x.shape.rank - 1
        form = sgtrick.with_gradient(fn.misled(fn.vector), fn.vector_jacobian, batch_ndims=b)
        return form(x)

    def half_hidden(x: Any, y: Any) -> Any:
        x = tf.convert_to_tensor(x)
        return fn.two(2 * x - tf.stop_gradient(x), y)

    def by_x(x: Any, y: Any) -> Any:
        return fn.two_gradients(x, y)[0]

    first = sgtrick.with_gradient(hidden, fn.scalar_gradient)
    return [
        Case("gradient of chains", fn.scalar, first, (POINTS,)),
        Case(
            "gradient, elementwise",
            fn.elementwise,
            sgtrick.with_gradient(fn.misled(fn.elementwise), fn.elementwise_gradient),
            (NUMBERS,),
        ),
        Case("Jacobian function", fn.vector, vector, (POINTS,), batched=False),
        Case("Jacobian function per member", fn.vector, members, (POINTS,)),
        Case(
            "gradients by two",
            fn.two,
            sgtrick.with_gradient(fn.misled(fn.two), fn.two_gradients, argnums=(0, 1)),
            (MATRICES, NUMBERS),
        ),
        Case(
            "gradient by one, autodiff by the other",
            fn.two,
            sgtrick.with_gradient(half_hidden, by_x, argnums="x"),
            (MATRICES, NUMBERS),
        ),
    ]


def from_value_and_gradient_cases() -> list[Case]:
    """Fused value and gradient."""

    def fused(x: Any) -> Any:
        return fn.misled(fn.scalar)(x), fn.scalar_gradient(x)

    def fused_two(x: Any, y: Any) -> Any:
        return fn.misled(fn.two)(x, y), fn.two_gradients(x, y)

    return [
        Case(
            "value and gradient",
            fn.scalar,
            sgtrick.from_value_and_gradient(fused),
            (POINTS,),
        ),
        Case(
            "value and gradients by two",
            fn.two,
            sgtrick.from_value_and_gradient(fused_two, argnums=("x", 1)),
            (MATRICES, NUMBERS),
        ),
    ]


def custom_jvp_cases() -> list[Case]:
    """One and two arguments, a vector."""

    def form(f: Any, jvp: Any, **options: Any) -> Any:
        form = sgtrick.custom_jvp(fn.misled(f), **options)
        form.defjvp(jvp)
        return form

    def vector(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return fn.vector(x), tf.linalg.matvec(fn.vector_jacobian(x), t)

    def two(primals: Any, tangents: Any) -> Any:
        by_x, by_y = fn.two_gradients(*primals)
        t, s = tangents
        return fn.two(*primals), tf.reduce_sum(by_x * t, [-2, -1]) + by_y * s

    return [
        Case("JVP of a vector", fn.vector, form(fn.vector, vector), (POINTS,)),
        Case("JVP of two", fn.two, form(fn.two, two), (MATRICES, NUMBERS)),
    ]
