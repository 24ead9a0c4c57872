"""Which backend Keras runs on, and what `keras.ops` lacks there."""

import importlib
from typing import Any

import keras


def is_tensorflow() -> bool:
    """Whether sgtrick's own forms serve this backend."""
    return bool(keras.backend.backend() == "tensorflow")


def native() -> Any:
    """The module of this backend with `with_vjp`, and on jax and torch two functions more.

    * `times(c, z, once)`: the product of tensors of one shape, bilinear, and zero where `z` is zero
      even if `c` is not finite. With `once`, its second derivative by `z` raises.
    * `with_vjp(f, xs, refusal)`: the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as the
      derivative. By what is not among `xs`, the derivative raises `refusal`.
    * `depends(f, xs)`: whether the derivative of `f(xs)` by `xs` is connected.
    """
    name = keras.backend.backend()
    if name not in ("tensorflow", "jax", "torch"):
        raise NotImplementedError(
            f"sgtrick.keras has the Keras backends tensorflow, jax and torch, got {name}, which "
            "has no derivatives. Set KERAS_BACKEND before Keras is imported."
        )
    return importlib.import_module(f"sgtrick.keras._{name}")


NO_SECOND = (
    "A second derivative was asked for of sgtrick.keras.custom_gradient, which was given none. "
    "Pass hx, the Hessian; None in the place of its blocks says that these are zero."
)
