"""What torch.compile has to be told; on other backends nothing."""

import keras

from sgtrick._types import Function


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
