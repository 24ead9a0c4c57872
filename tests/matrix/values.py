"""Cases of the value form `custom_gradient(fx, gx, x)`, and its rivals on the same cases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from keras import ops

import sgtrick
from matrix import functions as fn
from matrix.problem import Case

_random = np.random.default_rng(7)
POINTS = _random.normal(size=(4, 3))
MATRICES, NUMBERS = _random.normal(size=(4, 2, 2)), _random.normal(size=4)


def value_cases(custom_gradient: Callable[..., Any]) -> list[Case]:
    """Every shape reading that maps over members."""

    def chains(x: Any) -> Any:
        return custom_gradient(fn.misled(fn.scalar)(x), fn.scalar_gradient(x), x)

    def vector(x: Any) -> Any:
        return custom_gradient(fn.misled(fn.vector)(x), fn.vector_jacobian(x), x)

    def vectors(x: Any) -> Any:
        b = 1 if x.shape.rank is None else x.shape.rank - 1
        return custom_gradient(fn.misled(fn.vector)(x), fn.vector_jacobian(x), x, batch_ndims=b)

    def stopped_by_hand(x: Any) -> Any:
        s = tf.stop_gradient(x)
        return custom_gradient(fn.scalar(s), fn.scalar_gradient(s), x, True)

    def elementwise(x: Any) -> Any:
        return custom_gradient(fn.misled(fn.elementwise)(x), fn.elementwise_gradient(x), x)

    def two(x: Any, y: Any) -> Any:
        gx, gy = fn.two_gradients(x, y)
        value = fn.misled(fn.two)(x, y)
        return custom_gradient(value, {"x": [gx], "y": gy}, {"x": [x], "y": y})

    def blocks(x: Any) -> Any:
        return custom_gradient(
            fn.misled(fn.scalar)(x), fn.scalar_gradient(x), x, hx=fn.scalar_hessian(x)
        )

    def product(x: Any, y: Any) -> Any:
        x_, y_ = tf.stop_gradient(x), tf.stop_gradient(y)
        return custom_gradient(
            fn.misled(fn.two)(x, y),
            fn.two_gradients(x, y),
            (x, y),
            hx=lambda v: fn.two_hessian_times(x_, y_, *v),
        )

    def jacobian_with_blocks(x: Any) -> Any:
        return custom_gradient(
            fn.misled(fn.vector)(x), fn.vector_jacobian(x), x, hx=fn.vector_hessian(x)
        )

    return [
        Case("scalar", fn.scalar, chains, (POINTS,), batched=False, order=1, stored=True),
        Case("chains", fn.scalar, chains, (POINTS,), order=1, stored=True),
        Case("stopped by hand", fn.scalar, stopped_by_hand, (POINTS,), order=1, stored=True),
        Case("elementwise", fn.elementwise, elementwise, (NUMBERS,), order=1, stored=True),
        Case("Jacobian", fn.vector, vector, (POINTS,), batched=False, order=1, stored=True),
        Case("Jacobian per member", fn.vector, vectors, (POINTS,), order=1, stored=True),
        Case("structure", fn.two, two, (MATRICES, NUMBERS), order=1, stored=True),
        Case("Hessian blocks", fn.scalar, blocks, (POINTS,), stored=True),
        Case("Hessian product", fn.two, product, (MATRICES, NUMBERS)),
        Case("Hessian of a vector", fn.vector, jacobian_with_blocks, (POINTS,), False, stored=True),
    ]


def comparison_cases() -> dict[str, dict[str, Case]]:
    """sgtrick and its rivals given the same values and gradients, by problem and library.

    The problems are one: a function of a vector; and many: four chains of it in one call. sgtrick is
    there with the Hessian and without.
    """

    def sg(x: Any) -> Any:
        return sgtrick.custom_gradient(
            fn.misled(fn.scalar)(x), fn.scalar_gradient(x), x, hx=fn.scalar_hessian(x)
        )

    def sg_no_hx(x: Any) -> Any:
        return sgtrick.custom_gradient(fn.misled(fn.scalar)(x), fn.scalar_gradient(x), x)

    def tfp_(x: Any) -> Any:
        return tfp.math.custom_gradient(fn.misled(fn.scalar)(x), fn.scalar_gradient(x), x)

    @tf.custom_gradient
    def overridden(x: Any) -> Any:
        return fn.misled(fn.scalar)(x), lambda u: u[..., tf.newaxis] * fn.scalar_gradient(x)

    @ops.custom_gradient
    def of_any_backend(x: Any) -> Any:
        def grad(*args: Any, upstream: Any = None) -> Any:  # as its documentation writes it
            if upstream is None:
                (upstream,) = args
            return ops.multiply(upstream[..., None], fn.scalar_gradient(x))

        return fn.misled(fn.scalar)(x), grad

    forms = {
        "sgtrick": sg,
        "no hx": sg_no_hx,
        "tfp": tfp_,
        "tf": lambda x: overridden(x),
        "keras": lambda x: of_any_backend(x),
    }
    return {
        problem: {
            library: Case(library, fn.scalar, form, (POINTS,), batched=problem == "many")
            for library, form in forms.items()
        }
        for problem in ("one", "many")
    }
