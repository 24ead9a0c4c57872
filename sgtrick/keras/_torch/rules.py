"""Functions with their own vector-Jacobian product, in reverse mode and `vmap` of torch."""

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from sgtrick._types import Args, Function, Gradient, Kwargs, Pullback, Structure
from sgtrick.keras import _refusals
from sgtrick.keras._rule import Rule
from sgtrick.keras._torch import modes
from sgtrick.keras._torch.embedding import depends, refused

Tensors: TypeAlias = Sequence[Tensor]
Gradients: TypeAlias = Sequence[Gradient]


def with_vjp(f: Rule, xs: Tensors) -> list[Tensor]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    by_closure = _refusals.NO_ARGUMENT.format(f.__name__)
    if modes.compiling():
        # Tensors that a compiled Function closes over silently get no gradient.
        outputs, _ = f(*[x.detach() for x in xs])
        if any(y.requires_grad for y in outputs):
            raise LookupError(by_closure)
        return list(_CompiledPulled.apply(f.again, *xs))
    transformed = modes.transformed()
    with torch.no_grad(), _Outside(xs) as outside:
        ys, pull = f(*xs)
        if transformed:
            pull(*(torch.ones_like(y) if _is_smooth(y) else None for y in ys))
    call = _Call(f, list(outside.found), None if transformed else (ys, pull))
    # Passed as arguments, so that every transformation sees them.
    constants = [refused(t.detach(), by_closure, [t]) for t in outside.found.values()]
    return list(_Pulled.apply(call, len(xs), *xs, *constants))


class _Pulled(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(call: "_Call", n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # pull keeps the outputs alive. Returning them would make a cycle that is never freed.
        return tuple(y.detach() for y in call.outputs(tensors[:n], tensors[n:]))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.n, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)  # else torch fails before jvp under vmap
        ctx.smooth = list(map(_is_smooth, output))

    @staticmethod
    def backward(ctx: FunctionCtx, *us: Tensor) -> tuple[Gradient, ...]:
        tensors = ctx.saved_tensors  # checkpoint gives them only once
        xs, constants = tensors[: ctx.n], tensors[ctx.n :]
        smooth = [u if s else None for u, s in zip(us, ctx.smooth, strict=True)]
        return None, None, *ctx.call.pull(xs, constants, smooth), *[None] * len(constants)

    @staticmethod
    def jvp(*_: Any) -> NoReturn:
        raise NotImplementedError(
            "sgtrick.keras.custom_vjp has no forward mode on torch. Use reverse mode: "
            "torch.func.jacrev instead of jacfwd, and jacrev of jacrev instead of hessian."
        )


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
        if self._evaluated is None:
            with _Outside(xs, dict(zip(self._outside, constants, strict=True))) as inside:
                inside.know(us)
                return self._once_more(xs, us)
        # For higher derivatives, pull has to be recomputed with a graph from these xs.
        return self._once_more(xs, us) if torch.is_grad_enabled() else self._evaluated[1](*us)

    def _once_more(self, xs: Tensors, us: Gradients) -> Gradients:
        """The gradients, whose derivatives raise if none is connected to the arguments."""
        gradients = self._f(*xs)[1](*us)
        if not torch.is_grad_enabled() or depends(lambda xs: self._connected(xs, us), xs):
            return gradients
        message = _refusals.NOT_CONNECTED.format(self._f.__name__)
        return [g if g is None else refused(g, message, xs) for g in gradients]

    def _connected(self, xs: Tensors, us: Gradients) -> list[Tensor]:
        stopped = [u if u is None else u.detach() for u in us]
        return [g for g in self._f(*xs)[1](*stopped) if g is not None]


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


def _is_smooth(y: Tensor) -> bool:
    return bool(y.is_floating_point() or y.is_complex())
