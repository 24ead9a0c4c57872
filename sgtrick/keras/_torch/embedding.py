"""A value with given gradients, whose own derivative is a given product or raises."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from sgtrick._core.structures import Leaf
from sgtrick.keras import _backends
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._torch import modes
from sgtrick.keras._torch.refusal import refused, zeros_for_none


def embed(fx: Any, leaves: Sequence[Leaf], product: _backends.Product | None) -> Any:
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


def _one_level(xs: list[Any]) -> bool:
    """Whether no derivative other than that of plain autograd can be taken here.

    Only then can `product`, with whatever it closes over, be evaluated later.
    """
    if modes.transformed():
        return False
    return all(forward_ad.unpack_dual(x).tangent is None for x in xs)


def _as_they_are(gs: Any, xs: Any) -> Any:
    del xs
    return gs


def _without_second(gs: Any, xs: Any) -> Any:
    return [refused(g, _backends.NO_SECOND, xs) for g in gs]


def _added_if_asked_for(product: _backends.Product, gs: Any, xs: Any) -> Any:
    return _added(product, gs, xs) if torch.is_grad_enabled() else gs


def _added(product: _backends.Product, gs: Any, xs: Any) -> Any:
    z = [_Once.apply(x) for x in xs]
    # Keeps the gradient connected, as torch raises for an unconnected one instead of giving zero.
    zero = sum(0 * KERAS.cast(z_i, "float32").sum() for z_i in z)
    return [
        g + hz + KERAS.as_dtype(zero, KERAS.dtype_of(g))
        for g, hz in zip(gs, product(z), strict=True)
    ]


class _Known:
    """The gradients of a value, `known(gs, xs)`, which have derivatives themselves."""

    def __init__(self, known: Callable[[Any, Any], Any], batch_ndims: list[int]) -> None:
        self._known, self._batch_ndims = known, batch_ndims

    def at(self, tensors: Sequence[Any]) -> list[Leaf]:
        """The points with these gradients."""
        n = len(self._batch_ndims)
        gs, xs = list(tensors[:n]), list(tensors[n:])
        leaves = zip(xs, self._known(gs, xs), self._batch_ndims, strict=True)
        return [Leaf("", *leaf) for leaf in leaves]

    def pull(self, tensors: Sequence[Any], u: Any) -> list[Any]:
        """Maps a gradient of the value to gradients of the points."""
        return [KERAS.transpose(leaf, u) for leaf in self.at(tensors)]

    def push(self, tensors: Sequence[Any], z: Sequence[Any], like: Any) -> Any:
        """Maps tangents of the points to the tangent of the value."""
        leaves = self.at(tensors)
        return KERAS.push(leaves, zeros_for_none(z, [leaf.x for leaf in leaves]), like)


class _CompiledEmbedded(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(known: _Known, fx: Any, *tensors: Any) -> Any:
        del known, tensors
        return fx.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.known, fx, *tensors = inputs
        ctx.save_for_backward(*tensors, fx)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
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
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _CompiledEmbedded.setup_context(ctx, inputs, output)
        _, fx, *tensors = inputs
        ctx.save_for_forward(*tensors, fx)  # vmap requires the same tensors as for backward
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
        if u is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, _ = ctx.saved_tensors
        pulled = ctx.known.pull(tensors, u)
        return None, None, *[None] * len(pulled), *pulled

    @staticmethod
    def jvp(ctx: Any, _known: Any, _fx: Any, *dt: Any) -> Any:
        *tensors, fx = ctx.saved_tensors
        return ctx.known.push(tensors, dt[len(dt) // 2 :], like=fx)


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Zero with the identity as its derivative, whose own derivative raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
        return None if u is None else refused(u, _backends.NO_THIRD, ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, dx: Any) -> Any:
        return refused(dx, _backends.NO_THIRD, ctx.saved_tensors)


def depends(f: Callable[[list[Any]], list[Any]], xs: Sequence[Any]) -> bool:
    """Whether `f(xs)` is connected to `xs`."""
    found: list[bool] = []

    def probed(*xs: Any) -> Any:
        ys = f(list(xs))
        found.extend(y.requires_grad for y in ys)
        return tuple(ys)

    torch.func.vjp(probed, *[torch.zeros_like(x) for x in xs])
    return any(found)
