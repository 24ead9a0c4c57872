"""The types in signatures, for every backend."""

from collections.abc import Callable
from typing import Any, TypeAlias

# A tf.Tensor, jax.Array or torch.Tensor; in functional models also a KerasTensor. `Any` to type
# checkers, since Keras cannot say which.
Tensor: TypeAlias = Any
TensorLike: TypeAlias = Any  # a tensor, Keras variable, NumPy array or number
Gradient: TypeAlias = Tensor | None

# `(*upstream)` to a gradient for each input.
Pullback: TypeAlias = Callable[..., list[Gradient]]
# `z -> H z`, for tensors like the points; each result has the shape and dtype of its Jacobian.
Product: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
