"""The backend that Keras runs on, and the operations that `keras.ops` lacks there."""

from types import ModuleType

import keras


def is_tensorflow() -> bool:
    """Whether this backend uses sgtrick's TensorFlow forms."""
    return bool(keras.backend.backend() == "tensorflow")


def native() -> ModuleType:
    """The module of this backend with the operations that `keras.ops` lacks.

    Each module has

    * `with_vjp(f, xs, refusal)`: the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as the
      derivative. Derivatives with respect to tensors that are not among `xs` raise `refusal`.

    Those of jax and torch also have, for the value form,

    * `embed(fx, leaves, product)`: `fx` with the Jacobians of the leaves, whose derivative is
      `product`. If `product` is None, second derivatives raise `NO_SECOND`; third derivatives
      always raise `NO_THIRD`;
    * `zero(x)`: zero with the identity as its derivative, for any `x`;
    * `times(c, z)`: the bilinear product of tensors of the same shape, zero where `z` is zero even
      if `c` is not finite;
    * `depends(f, xs)`: whether `f(xs)` is connected to `xs`.
    """
    # Import statements, because torch.compile cannot trace importlib.
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
        f"sgtrick.keras expects the Keras backend tensorflow, jax or torch, got {name}, which has "
        "no derivatives. Set KERAS_BACKEND before Keras is imported."
    )


NO_SECOND = (
    "sgtrick.keras.custom_gradient was asked for a second derivative, but was given only a value "
    "and a gradient. Pass the Hessian or a function for Hessian-vector products as hx=, or hx=0 if "
    "the Hessian is zero; None in place of a block means that this block is zero."
)
NO_THIRD = (
    "sgtrick.keras.custom_gradient was asked for a third derivative, but was given only a value, a "
    "gradient and a Hessian. Apply keras.ops.stop_gradient to what need not be differentiated "
    "again."
)
