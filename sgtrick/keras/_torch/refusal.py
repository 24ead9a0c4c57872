"""Tensors whose derivatives raise, and zeros in place of missing gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sgtrick._types import Args


def refused(kept: Tensor, message: str, by: Sequence[Tensor]) -> Tensor:
    """Returns `kept`, whose derivative with respect to the tensors `by` raises a LookupError."""
    return Refuse.apply(kept, LookupError(message), *by)


class Refuse(torch.autograd.Function):  # type: ignore[misc]
    """The first argument; its derivative with respect to those after the error raises the error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kept: Tensor, error: Exception, *by: Tensor) -> Tensor:
        del by, error
        return kept.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        del output
        _, ctx.error, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, *by = ctx.needs_input_grad
        if any(by):
            raise ctx.error
        return u, None, *[None] * len(by)

    @staticmethod
    def jvp(
        ctx: FunctionCtx, kept: Tensor | None, _error: None, *by: Tensor | None
    ) -> Tensor | None:
        if any(t is not None for t in by):
            raise ctx.error
        return kept


def zeros_for_none(gradients: Sequence[Tensor | None], xs: Sequence[Tensor]) -> list[Tensor]:
    """`gradients`, with zeros like `xs` in place of None."""
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]
