"""Tensors whose derivatives raise, and zeros in place of missing gradients."""

from collections.abc import Sequence
from typing import Any

import torch


def refused(kept: Any, message: str, by: Any) -> Any:
    """Returns `kept`, whose derivative with respect to the tensors `by` raises a LookupError."""
    return Refuse.apply(kept, LookupError(message), *by)


class Refuse(torch.autograd.Function):  # type: ignore[misc]
    """The first argument; its derivative with respect to those after the error raises the error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kept: Any, error: Exception, *by: Any) -> Any:
        del by, error
        return kept.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        _, ctx.error, *_ = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
        _, _, *by = ctx.needs_input_grad
        if any(by):
            raise ctx.error
        return u, None, *[None] * len(by)

    @staticmethod
    def jvp(ctx: Any, kept: Any, _error: Any, *by: Any) -> Any:
        if any(t is not None for t in by):
            raise ctx.error
        return kept


def zeros_for_none(gradients: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """`gradients`, with zeros like `xs` in place of None."""
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]
