"""Which backend Keras runs on, and what `keras.ops` lacks there."""

from collections.abc import Callable
from typing import Any

import keras

# `z -> H z`, for tensors like the points; each result has the shape and dtype of its Jacobian.
Product = Callable[[list[Any]], list[Any]]


def is_tensorflow() -> bool:
    """Whether sgtrick's own forms serve this backend."""
    return bool(keras.backend.backend() == "tensorflow")


def native() -> Any:
    """The module of this backend, with what `keras.ops` lacks.

    Each has

    * `with_vjp(f, xs, refusal)`: the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as the
      derivative. By what is not among `xs`, the derivative raises `refusal`;

    and jax and torch have, for the value form,

    * `embed(fx, leaves, product)`: `fx` with the Jacobians of the leaves, their derivative being
      `product`, or, if that is None, `NO_SECOND` raised. Of third order, `NO_THIRD` is;
    * `zero(x)`: zero, with the identity as its derivative, whatever `x` is;
    * `times(c, z)`: the product of tensors of one shape, bilinear, and zero where `z` is zero even
      if `c` is not finite;
    * `depends(f, xs)`: whether the derivative of `f(xs)` by `xs` is connected.
    """
    # By statements, since torch.compile cannot read importlib.
    name = keras.backend.backend()
    if name == "tensorflow":
        from sgtrick.keras import _tensorflow

        return _tensorflow
    if name == "jax":
        from sgtrick.keras import _jax

        return _jax
    if name == "torch":
        from sgtrick.keras import _torch

        return _torch
    raise NotImplementedError(
        f"sgtrick.keras has the Keras backends tensorflow, jax and torch, got {name}, which "
        "has no derivatives. Set KERAS_BACKEND before Keras is imported."
    )


NO_SECOND = (
    "A second derivative was asked for of sgtrick.keras.custom_gradient, which was given none. "
    "Pass hx, the Hessian, or a product with it, or hx=0 which says that it is zero; None in the "
    "place of a block says that this one is."
)
NO_THIRD = (
    "A third derivative was asked for of sgtrick.keras.custom_gradient, which was given the second "
    "by hx and none beyond. Stop the gradient of what must not be differentiated again."
)
