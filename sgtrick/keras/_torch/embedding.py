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
from sgtrick.keras._backends import Product
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._torch import modes

Tensors: TypeAlias = list[Tensor]


def embed(fx: Tensor, leaves: Sequence[Leaf], product: Product | None) -> Tensor:
    """Returns `fx` with the Jacobians of the leaves, and `product` as their derivative."""
    gs, xs = [leaf.gx for leaf in leaves], [leaf.x for leaf in leaves]
    batch_ndims = [leaf.batch_ndims for leaf in leaves]
    if modes.compiling():  # torch.compile has no second derivatives
        return _CompiledEmbedded.apply(_Known(_as_they_are, batch_ndims), fx, *gs, *xs)
    modes.check_one_forward_mode()
    if product is None:
        known = _without_second
    elif _one_level(xs):
        known = functools.partial(_added_if_asked_for, product)
    else:
        gs, known = _added(product, gs, xs), _as_they_are
    return _Embedded.apply(_Known(known, batch_ndims), fx, *gs, *xs)


def _one_level(xs: Tensors) -> bool:
    """Whether no derivative other than that of plain autograd can be taken here.

    Only then can `product`, with whatever it closes over, be evaluated later.
    """
    return not (modes.transformed() or any(map(modes.has_tangent, xs)))


def _as_they_are(gs: Tensors, xs: Tensors) -> Tensors:
    del xs
    return gs


def _without_second(gs: Tensors, xs: Tensors) -> Tensors:
    return [refused(g, _refusals.NO_SECOND, xs) for g in gs]


def _added_if_asked_for(product: Product, gs: Tensors, xs: Tensors) -> Tensors:
    return _added(product, gs, xs) if torch.is_grad_enabled() else gs


def _added(product: Product, gs: Tensors, xs: Tensors) -> Tensors:
    z = [_Once.apply(x) for x in xs]
    # Keeps the gradient connected, as torch raises for an unconnected one instead of giving zero.
    zero = sum(0 * KERAS.cast(z_i, "float32").sum() for z_i in z)
    return [
        g + hz + KERAS.as_dtype(zero, KERAS.dtype_of(g))
        for g, hz in zip(gs, product(z), strict=True)
    ]


class _Known:
    """The gradients of a value, `known(gs, xs)`, which have derivatives themselves."""

    def __init__(
        self, known: Callable[[Tensors, Tensors], Tensors], batch_ndims: list[int]
    ) -> None:
        self._known, self._batch_ndims = known, batch_ndims

    def at(self, tensors: Sequence[Tensor]) -> list[Leaf]:
        """The points with these gradients."""
        n = len(self._batch_ndims)
        gs, xs = list(tensors[:n]), list(tensors[n:])
        leaves = zip(xs, self._known(gs, xs), self._batch_ndims, strict=True)
        return [Leaf("", *leaf) for leaf in leaves]

    def pull(self, tensors: Sequence[Tensor], u: Tensor) -> Tensors:
        """Maps a gradient of the value to gradients of the points."""
        return [KERAS.transpose(leaf, u) for leaf in self.at(tensors)]

    def push(self, tensors: Sequence[Tensor], z: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Maps tangents of the points to the tangent of the value."""
        leaves = self.at(tensors)
        moving = [
            torch.zeros_like(leaf.x) if t is None else t for t, leaf in zip(z, leaves, strict=True)
        ]
        return KERAS.push(leaves, moving, like)


class _CompiledEmbedded(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(known: _Known, fx: Tensor, *tensors: Tensor) -> Tensor:
        del known, tensors
        return fx.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        del output
        ctx.known, fx, *tensors = inputs
        ctx.save_for_backward(*tensors, fx)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, _ = ctx.saved_tensors
        pulled = ctx.known.pull(tensors, u)
        xs = tensors[len(pulled) :]
        # torch.compile raises for second derivatives only if the first visibly depend on x.
        never = [torch.zeros_like(x, dtype=torch.bool) for x in xs]
        pulled = [torch.where(*leaf) for leaf in zip(never, xs, pulled, strict=True)]
        return None, None, *[None] * len(pulled), *pulled


class _Embedded(_CompiledEmbedded):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        _CompiledEmbedded.setup_context(ctx, inputs, output)
        _, fx, *tensors = inputs
        ctx.save_for_forward(*tensors, fx)  # vmap requires the same tensors as for backward
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None) -> tuple[Tensor | None, ...]:
        if u is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, _ = ctx.saved_tensors
        pulled = ctx.known.pull(tensors, u)
        return None, None, *[None] * len(pulled), *pulled

    @staticmethod
    def jvp(ctx: FunctionCtx, _known: None, _fx: Tensor | None, *dt: Tensor | None) -> Tensor:
        *tensors, fx = ctx.saved_tensors
        return ctx.known.push(tensors, dt[len(dt) // 2 :], like=fx)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Zero with the identity as its derivative, whose own derivative raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None) -> Tensor | None:
        return None if u is None else refused(u, _refusals.NO_THIRD, ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: FunctionCtx, dx: Tensor) -> Tensor:
        return refused(dx, _refusals.NO_THIRD, ctx.saved_tensors)


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
