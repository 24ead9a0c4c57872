"""The backend that Keras runs on, and the operations that `keras.ops` lacks there."""

from types import ModuleType

import keras

from sgtrick._types import Function


def is_tensorflow() -> bool:
    """Whether this backend uses sgtrick's TensorFlow forms."""
    return bool(keras.backend.backend() == "tensorflow")


def native() -> ModuleType:
    """The module for jax or torch, with the operations that `keras.ops` lacks there.

    * `with_vjp(rule)`: the outputs of a `Rule` at its inputs, with its derivative. Derivatives with
      respect to tensors that it closes over raise.
    * `prepared(gs, xs, product, message)`: `gs`, the constants of `product`, and a function of the
      constants, `gs` and `xs` that returns `gs` with `product` as its derivative by `xs`; the next
      one raises.
    * `refused(kept, by, message)`: the tensors `kept`, whose derivatives by the tensors `by` raise.
    * `depends(f, xs)`: whether `f(xs)` is connected to `xs`.
    * `zero(x)`: zero with the identity as its derivative, for any `x`.
    * `times(c, z)`: the bilinear product of tensors of the same shape, zero where `z` is zero even
      if `c` is not finite.
    """
    # Import statements, because torch.compile cannot trace importlib.
    name = keras.backend.backend()
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


def is_compiling() -> bool:
    """Whether torch.compile is tracing."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return bool(torch.compiler.is_compiling())


def constant(f: Function) -> Function:
    """`f`, which torch.compile calls instead of tracing it, and takes its result for a constant."""
    if keras.backend.backend() != "torch":
        return f
    import torch

    return torch.compiler.assume_constant_result(lambda *args: f(*args))  # type: ignore[no-any-return]
