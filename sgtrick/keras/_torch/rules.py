"""Functions with their own vector-Jacobian product, under every transformation of torch."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from sgtrick._core import adjoint
from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras._rule import Rule
from sgtrick.keras._torch import modes
from sgtrick.keras._torch.refusal import Refuse, RefuseAlways, zeros_for_none
from sgtrick.keras._torch.stops import Stops
from sgtrick.keras._types import Gradient, Pullback

Tensors: TypeAlias = Sequence[Tensor]
Gradients: TypeAlias = Sequence[Gradient]
Dims: TypeAlias = tuple[int | None, ...]  # the mapped axis of each tensor, None if it has none


def with_vjp(f: Rule, xs: Tensors, refusal: Exception) -> list[Tensor]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    if modes.compiling():
        # Tensors that a compiled Function closes over silently get no gradient.
        outputs, _ = f(*[x.detach() for x in xs])
        if any(y.requires_grad for y in outputs):
            raise refusal
        return list(_CompiledPulled.apply(f.again, *xs))
    modes.check_one_forward_mode()
    transformed = modes.transformed()
    with torch.no_grad(), _Outside(xs) as outside:
        ys, pull = f(*xs)
        if transformed:
            pull(*map(_upstream, ys))
    call = _Call(f, list(outside.found), None if transformed else (ys, pull))
    # Passed as arguments, so that every transformation sees them.
    constants = [Refuse.apply(t.detach(), refusal, t) for t in outside.found.values()]
    return list(_Pulled.apply(call, len(xs), *xs, *constants))


class _Pulled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(call: "_Call | _Mapped", n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # pull keeps the outputs alive. Returning them would make a cycle that is never freed.
        return tuple(y.detach() for y in call.outputs(tensors[:n], tensors[n:]))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.n, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.upstream = [_upstream(y) for y in output]
        ctx.mark_non_differentiable(
            *[y for y, u in zip(output, ctx.upstream, strict=True) if u is None]
        )

    @staticmethod
    def backward(ctx: FunctionCtx, *us: Tensor) -> tuple[Gradient, ...]:
        tensors = ctx.saved_tensors
        smooth = [u if like is not None else None for u, like in zip(us, ctx.upstream, strict=True)]
        pulled = ctx.call.pull(tensors[: ctx.n], tensors[ctx.n :], smooth)
        return None, None, *pulled, *[None] * (len(tensors) - ctx.n)

    @staticmethod
    def jvp(ctx: FunctionCtx, _: None, n: None, *z: Tensor | None) -> tuple[Gradient, ...]:
        del n
        # They still have their tangents, which would differentiate pull as well.
        tensors = tuple(forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors)
        xs, constants = tensors[: ctx.n], tensors[ctx.n :]
        smooth = [u for u in ctx.upstream if u is not None]

        def pull(*us: Tensor) -> tuple[Tensor, ...]:
            some = iter(us)
            all_us = [u if u is None else next(some) for u in ctx.upstream]
            return tuple(zeros_for_none(ctx.call.pull(xs, constants, all_us), xs))

        moving = tuple(zeros_for_none(z[: ctx.n], xs))
        found = torch.func.vjp(pull, *_probes(smooth, far=True))[1](moving)
        near = _probes(smooth, far=False)
        zero = _zero_if(_holds(pull(*near), moving, near, found), ctx.call.is_not_linear())
        pushed = iter(t + zero.to(t.dtype) for t in found)
        return tuple(u if u is None else next(pushed) for u in ctx.upstream)

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, call: "_Call | _Mapped", n: int, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], Dims]:
        ys = _Pulled.apply(_Mapped(call, n, in_dims[2:], info.batch_size), n, *tensors)
        return ys, (0,) * len(ys)


class _Call:
    """A rule as a function of its arguments alone, with tensors that it closes over among them."""

    def __init__(
        self, f: Rule, outside: list[int], evaluated: tuple[list[Tensor], Pullback] | None
    ) -> None:
        self._f, self._outside, self._evaluated = f, outside, evaluated

    def outputs(self, xs: Tensors, constants: Tensors) -> Tensors:
        if self._evaluated is not None:
            return self._evaluated[0]
        with _Outside(xs, dict(zip(self._outside, constants, strict=True))):
            return self._f(*xs)[0]

    def pull(self, xs: Tensors, constants: Tensors, us: Gradients) -> Gradients:
        if self._evaluated is not None:
            # For higher derivatives, pull has to be recomputed with a graph from these xs.
            again = torch.is_grad_enabled() or any(map(modes.has_tangent, xs))
            return self._once_more(xs, us) if again else self._evaluated[1](*us)
        with _Outside(xs, dict(zip(self._outside, constants, strict=True))) as inside:
            inside.know(us)
            return self._once_more(xs, us)

    def is_not_linear(self) -> LookupError:
        return self._f.is_not_linear()

    def _once_more(self, xs: Tensors, us: Gradients) -> Gradients:
        """The gradients, with errors for derivatives that the rule stops."""
        with Stops(xs) as stops:
            gradients = self._f(*xs)[1](*us)
        lost = list(itertools.compress(xs, stops.are_lost(gradients)))
        if not lost:
            return gradients
        error = self._f.loses()
        return [g if g is None else RefuseAlways.apply(g, error, *lost) for g in gradients]


class _Mapped:
    """A call mapped over a batch."""

    def __init__(self, call: "_Call | _Mapped", n: int, dims: Dims, size: int) -> None:
        self._call, self._x_dims, self._constant_dims = call, dims[:n], dims[n:]
        self._size = size

    def outputs(self, xs: Tensors, constants: Tensors) -> Tensors:
        mapped = self._vmap(lambda xs, c: tuple(self._call.outputs(xs, c)))
        return tuple(mapped(xs, constants))

    def pull(self, xs: Tensors, constants: Tensors, us: Gradients) -> Gradients:
        def pull(xs: Tensors, constants: Tensors, us: Gradients) -> tuple[Tensor, ...]:
            return tuple(zeros_for_none(self._call.pull(xs, constants, us), xs))

        us_dims = tuple(None if u is None else 0 for u in us)
        pulled = self._vmap(pull, us_dims)(xs, constants, tuple(us))
        return [
            g.sum(0) if d is None else g.movedim(0, d)
            for g, d in zip(pulled, self._x_dims, strict=True)
        ]

    def is_not_linear(self) -> LookupError:
        return self._call.is_not_linear()

    def _vmap(self, f: Function, *more: Dims) -> Function:
        in_dims = (self._x_dims, self._constant_dims, *more)
        if all(d is None for d in _pytree.tree_leaves(in_dims)):
            return f
        mapped: Function = torch.func.vmap(f, in_dims=in_dims)
        return mapped


class _Outside(TorchFunctionMode):  # type: ignore[misc]
    """Finds tensors that a computation closes over, and replaces them by others."""

    def __init__(self, known: Tensors, instead: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._instead = instead or {}
        self._known: dict[int, Tensor] = {}
        self.know(known)

    def know(self, tensors: Structure) -> None:
        """Marks tensors that the computation does not close over."""
        for t in _pytree.tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self._known[id(t)] = t  # keeps t alive, since its id could be reused

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Structure:
        del types

        def enter(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or id(t) in self._known:
                return t
            self.found[id(t)] = t
            return self._instead.get(id(t), t)

        args, kwargs = _pytree.tree_map(enter, (args, kwargs or {}))
        result = func(*args, **kwargs)
        self.know(result)
        return result


class _CompiledPulled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, f: Function, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.f = f
        ctx.save_for_backward(*xs)
        return tuple(y.detach() for y in f(*xs)[0])

    @staticmethod
    def backward(ctx: FunctionCtx, *us: Tensor) -> tuple[Gradient, ...]:
        return None, *ctx.f(*ctx.saved_tensors)[1](*us)


def _probes(likes: Tensors, *, far: bool) -> list[Tensor]:
    """As `adjoint.probes` and `adjoint.far_probes`."""
    probes = []
    for k, like in enumerate(likes):
        dtype = tf.complex128 if like.is_complex() else tf.float64
        numbers = adjoint.numbers((like.numel(),), dtype, k, far=far).reshape(like.shape)
        probes.append(torch.as_tensor(numbers, dtype=like.dtype, device=like.device))
    return probes


def _holds(gs: Tensors, zs: Tensors, us: Tensors, found: Tensors) -> Tensor:
    """As `adjoint.holds`: whether `<gs, zs> = <us, found>` up to rounding, or not finite."""
    pairs = [*zip(gs, zs, strict=True), *zip(us, found, strict=True)]
    terms = [(a.detach().conj() * b.detach()).real.to(torch.float64) for a, b in pairs]
    left, right = sum(t.sum() for t in terms[: len(gs)]), sum(t.sum() for t in terms[len(gs) :])
    size = sum(t.abs().sum() for t in terms)
    eps = max(torch.finfo(t.dtype).eps for t in [*gs, *us])
    return ((left - right).abs() <= eps**0.5 * size) | torch.isnan(left - right)


def _zero_if(holds: Tensor, error: Exception) -> Tensor:
    """Zero, or else an error; in transformations, which hide values, NaN."""
    if not (modes.transformed() or holds):
        raise error
    return torch.where(holds, 0.0, torch.nan)


def _upstream(y: Tensor) -> Gradient:
    return torch.ones_like(y) if y.is_floating_point() or y.is_complex() else None
