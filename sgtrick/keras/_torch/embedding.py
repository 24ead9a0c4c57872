"""A value with given gradients, whose own derivative is a given product or raises."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sgtrick._arguments.structures import Leaf
from sgtrick._types import Args
from sgtrick.keras import _refusals
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._torch import modes
from sgtrick.keras._types import Product

Tensors: TypeAlias = list[Tensor]
Known: TypeAlias = Callable[[Tensors, Tensors], Tensors]


def embed(fx: Tensor, leaves: Sequence[Leaf], product: Product | None) -> Tensor:
    """Returns `fx` with the Jacobians of the leaves, and `product` as their derivative."""
    gs, xs = [leaf.gx for leaf in leaves], [leaf.x for leaf in leaves]
    batch_ndims = [leaf.batch_ndims for leaf in leaves]
    if modes.compiling():  # torch.compile has no second derivatives
        return _CompiledEmbedded.apply(lambda: (_as_they_are, batch_ndims), fx, *gs, *xs)
    modes.check_one_forward_mode()
    known: Known
    if product is None:
        known = functools.partial(_refused, _refusals.NO_SECOND)
    elif modes.transformed() or any(map(modes.has_tangent, xs)):
        # By the time of the derivative, what product closes over may no longer be differentiable.
        gs, known = _added(product, gs, xs), _as_they_are
    else:
        known = functools.partial(_added_if_asked_for, product)
    return _Embedded.apply(lambda: (known, batch_ndims), fx, *gs, *xs)


def _as_they_are(gs: Tensors, xs: Tensors) -> Tensors:
    del xs
    return gs


def _refused(message: str, gs: Tensors, xs: Tensors) -> Tensors:
    return [refused(g, message, xs) for g in gs]


def _added_if_asked_for(product: Product, gs: Tensors, xs: Tensors) -> Tensors:
    return _added(product, gs, xs) if torch.is_grad_enabled() else gs


def _added(product: Product, gs: Tensors, xs: Tensors) -> Tensors:
    z = [_zero(x, functools.partial(_refused, _refusals.NO_THIRD)) for x in xs]
    # Keeps the gradient connected, as torch raises for an unconnected one instead of giving zero.
    zero = sum(0 * KERAS.cast(z_i, "float32").sum() for z_i in z)
    return [
        g + hz + KERAS.as_dtype(zero, KERAS.dtype_of(g))
        for g, hz in zip(gs, product(z), strict=True)
    ]


def _zero(x: Tensor, known: Known) -> Tensor:
    """Zero with the identity as its derivative, which has the derivative of `known`."""
    return _Embedded.apply(lambda: (known, [x.dim()]), torch.zeros_like(x), torch.ones_like(x), x)


class _CompiledEmbedded(torch.autograd.Function):  # type: ignore[misc]
    """The first tensor, with the gradients `known(gs, xs)`, which have derivatives themselves."""

    @staticmethod
    def forward(how: Callable[[], tuple[Known, list[int]]], fx: Tensor, *tensors: Tensor) -> Tensor:
        del how, tensors
        return fx.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        del output
        (ctx.known, ctx.batch_ndims), *tensors = inputs[0](), *inputs[1:]
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor) -> tuple[Tensor | None, ...]:
        leaves = _leaves(ctx)
        pulled = [KERAS.transpose(leaf, u) for leaf in leaves]
        if torch.compiler.is_compiling():
            # It raises for second derivatives only if the first visibly depend on x.
            never = [torch.zeros_like(leaf.x, dtype=torch.bool) for leaf in leaves]
            pulled = [torch.where(n, p.x, g) for n, p, g in zip(never, leaves, pulled, strict=True)]
        return None, None, *[None] * len(pulled), *pulled


class _Embedded(_CompiledEmbedded):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        _CompiledEmbedded.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None) -> tuple[Tensor | None, ...]:
        if u is None:
            return (None,) * len(ctx.needs_input_grad)
        return _CompiledEmbedded.backward(ctx, u)

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Tensor | None) -> Tensor:
        leaves = _leaves(ctx)
        z = [
            torch.zeros_like(leaf.x) if t is None else t
            for leaf, t in zip(leaves, tangents[-len(leaves) :], strict=True)
        ]
        return KERAS.push(leaves, z, like=ctx.saved_tensors[0])


def _leaves(ctx: FunctionCtx) -> list[Leaf]:
    """The points of `_Embedded` with their gradients."""
    _, *tensors = ctx.saved_tensors
    n = len(ctx.batch_ndims)
    gs, xs = list(tensors[:n]), list(tensors[n:])
    leaves = zip(xs, ctx.known(gs, xs), ctx.batch_ndims, strict=True)
    return [Leaf("", *leaf) for leaf in leaves]


def depends(f: Product, xs: Sequence[Tensor]) -> bool:
    """Whether `f(xs)` is connected to `xs`."""
    if not modes.transformed():  # so that f may use NumPy
        points = [x.detach().requires_grad_() for x in xs]
        with torch.enable_grad():
            return any(y.requires_grad for y in f(points))
    found: list[bool] = []

    def probed(*xs: Tensor) -> tuple[Tensor, ...]:
        ys = f(list(xs))
        found.extend(y.requires_grad for y in ys)
        return tuple(ys)

    torch.func.vjp(probed, *xs)
    return any(found)


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
