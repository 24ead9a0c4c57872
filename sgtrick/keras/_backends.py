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
      derivative. Derivatives with respect to tensors that are not among `xs` raise `refusal`, or
      another error.

    Those of jax and torch also have, for the value form,

    * `embed(fx, leaves, product)`: `fx` with the Jacobians of the leaves, whose derivative is
      `product`. If `product` is None, second derivatives raise `NO_SECOND`; third derivatives
      always raise `NO_THIRD`;
    * `depends(f, xs)`: whether `f(xs)` is connected to `xs`.
    """
    # Import statements, because torch.compile cannot trace importlib.
    name = keras.backend.backend()
    if name == "tensorflow":
        from sgtrick.keras import _tensorflow

        return _tensorflow
    if name == "jax":
        from sgtrick.keras._jax import operations as of_jax

        return of_jax
    if name == "torch":
        from sgtrick.keras._torch import operations as of_torch

        return of_torch
    raise NotImplementedError(
        f"sgtrick.keras expects the Keras backend tensorflow, jax or torch, got {name}, which has "
        "no derivatives. Set KERAS_BACKEND before Keras is imported."
    )
