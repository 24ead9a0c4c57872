"""The types in signatures, for every backend."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

# A tf.Tensor, jax.Array or torch.Tensor; in functional models also a KerasTensor. `Any` to type
# checkers, since Keras cannot say which.
Tensor: TypeAlias = Any
TensorLike: TypeAlias = Any  # a tensor, Keras variable, NumPy array or number
Tensors: TypeAlias = Sequence[Tensor]
Gradient: TypeAlias = Tensor | None
Gradients: TypeAlias = Sequence[Gradient]

# `(*upstream)` to a gradient for each input.
Pullback: TypeAlias = Callable[..., Gradients]
# `z -> H z`, for tensors like the points; each result has the shape and dtype of its Jacobian.
Product: TypeAlias = Callable[[Tensors], list[Tensor]]
# `(constants, gs, xs)` to `gs` with a derivative by `xs`.
Derived: TypeAlias = Callable[[Tensors, Tensors, Tensors], Tensors]


class Rule(Protocol):
    """Outputs and their derivative, as functions of a flat list of tensors.

    Attributes:
        inputs: The tensors that it is called with.
        push: From the inputs and their tangents to the tangents of the outputs. A rule that has it
            closes over nothing that is differentiated. None: forward mode transposes the pullback.
        not_argument: The error for a derivative with respect to a tensor that the rule closes over,
            if it has no `push`.
        not_connected: The error for a second derivative where no gradient depends on the inputs, if
            it has no `push`.
    """

    inputs: list[Tensor]
    push: Callable[[Tensors, Tensors], list[Tensor]] | None
    not_argument: str | None
    not_connected: str | None

    def __call__(self, *inputs: Tensor) -> tuple[list[Tensor], Pullback]:
        """Returns the outputs at the inputs, and the pullback from them to these."""
