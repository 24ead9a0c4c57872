"""Operations that `keras.ops` lacks on tensorflow: sgtrick's own forms."""

from collections.abc import Callable, Sequence
from typing import Any

import sgtrick


def with_vjp(f: Callable[..., Any], xs: Sequence[Any], refusal: Exception) -> Sequence[Any]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    del refusal  # on tensorflow, tensors that are not among xs are unconnected
    outputs: Sequence[Any] = sgtrick.custom_vjp(f)(*xs)
    return outputs
