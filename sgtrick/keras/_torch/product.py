"""Products that are zero wherever a tangent or an upstream gradient is zero."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sgtrick.keras._torch import modes


def zero(x: Tensor) -> Tensor:
    """Zero with the identity as its derivative; `x - stop(x)` would be NaN at infinity."""
    z = x - x.detach()
    return torch.where(z == 0, z, torch.zeros_like(z))


def times(c: Tensor, z: Tensor) -> Tensor:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite."""
    if torch.compiler.is_compiling():
        return _CompiledTimes.apply(c, z)
    modes.check_one_forward_mode()
    return _Times.apply(c, z)


class _CompiledTimes(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(c: Tensor, z: Tensor) -> Tensor:
        return torch.where(z == 0, torch.zeros_like(z), c * z)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor) -> tuple[Tensor | None, Tensor | None]:
        c, z = ctx.saved_tensors
        by_c, by_z = ctx.needs_input_grad
        return (
            times(z.conj(), u) if by_c else None,
            times(c.conj(), u) if by_z else None,
        )


class _Times(_CompiledTimes):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        _CompiledTimes.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if u is None else _CompiledTimes.backward(ctx, u)

    @staticmethod
    def jvp(ctx: FunctionCtx, dc: Tensor | None, dz: Tensor | None) -> Tensor:
        c, z = ctx.saved_tensors
        terms = [] if dc is None else [times(z, dc)]
        terms += [] if dz is None else [times(c, dz)]
        return sum(terms[1:], terms[0])
