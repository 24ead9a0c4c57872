"""Rules on torch: autograd functions for reverse mode, `torch.func` and torch.compile.

Under torch.compile they have no rules for forward mode and vmap, which it does not support. Which
transformation is running, torch has no public API for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from sgtrick._types import Args
from sgtrick.keras._torch_closures import (
    Outside,
    Unchanged,
    depends,
    is_smooth,
    read_by,
    transformed,
)
from sgtrick.keras._types import Derived, Gradient, Gradients, Product, Pullback, Rule, Tensors


def with_vjp(rule: Rule) -> list[Tensor]:
    """Returns the outputs of the rule at its inputs, with its derivative."""
    xs = rule.inputs
    points = [x.detach() for x in xs]
    if _compiling():
        # Tensors that a compiled Function closes over silently get no gradient.
        if rule.push is None and any(y.requires_grad for y in rule(*points)[0]):
            raise LookupError(rule.not_argument)
        return list(_CompiledKept.apply(rule, *xs))
    if rule.push is not None:
        _check_one_forward_mode()
        ys = [y.clone() for y in rule(*points)[0]]
        return list(_Kept.apply(_Call(rule, {}), len(ys), *ys, *xs))
    is_transformed = transformed()
    with torch.no_grad(), Outside([*xs, *points]) as outside:
        ys, pull = rule(*points)
        if is_transformed:
            pull(*(torch.ones_like(y) if is_smooth(y) else None for y in ys))
    # Passed as arguments, so that every transformation sees them.
    found = outside.found if is_transformed else outside.read
    constants = [t.detach().clone() for t in found.values()]
    for i, t in enumerate(found.values()):
        if id(t) in outside.read:
            (constants[i],) = refused([t.detach()], [t], rule.not_argument)
    call = _Call(rule, found)
    if not is_transformed:
        is_followed = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
        call.evaluated = pull, Unchanged([*read_by(pull), *ys] if is_followed else [])
    return list(_Kept.apply(call, len(ys), *[y.detach() for y in ys], *xs, *constants))


class _Kept(torch.autograd.Function):  # type: ignore[misc]
    """The first `count` tensors, whose derivative by the others is that of the call of a rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: "_Call", count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        del call
        return tuple(y.detach() for y in tensors[:count])

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.count :])
        ctx.save_for_forward(*tensors[ctx.count :])  # else torch fails before jvp under vmap
        ctx.smooth = list(map(is_smooth, output))

    @staticmethod
    def backward(ctx: FunctionCtx, *us: Tensor) -> tuple[Gradient, ...]:
        smooth = [u if s else None for u, s in zip(us, ctx.smooth, strict=True)]
        return None, None, *[None] * len(us), *ctx.call.pull(ctx.saved_tensors, smooth)

    @staticmethod
    def jvp(ctx: FunctionCtx, _call: None, _count: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(ctx.call.push(ctx.saved_tensors, tangents[ctx.count :]))


class _Call:
    """A rule as a function of its inputs, with the tensors that it closes over among them.

    Attributes:
        evaluated: The pullback, where it can be called later, and what it reads.
    """

    def __init__(self, rule: Rule, outside: dict[int, Tensor]) -> None:
        self._rule, self._outside = rule, outside
        self.evaluated: tuple[Pullback, Unchanged] | None = None

    def push(self, xs: Tensors, tangents: Tensors) -> Tensors:
        if self._rule.push is None:
            raise NotImplementedError(
                "sgtrick.keras.custom_vjp has no forward mode on torch. Use reverse mode: "
                "torch.func.jacrev instead of jacfwd, and jacrev of jacrev instead of hessian."
            )
        return self._rule.push(xs, tangents)

    def pull(self, tensors: Tensors, us: Gradients) -> Gradients:
        count = len(self._rule.inputs)
        xs, constants = tensors[:count], tensors[count:]
        nothing = [None] * len(constants)
        if self.evaluated is not None:
            pull, read = self.evaluated
            read.check()
            # For higher derivatives, it has to be recomputed with a graph from these xs.
            return [*(self._once_more(xs, us) if torch.is_grad_enabled() else pull(*us)), *nothing]
        if not constants:
            return self._once_more(xs, us)
        with Outside(xs, dict(zip(self._outside, constants, strict=True))) as inside:
            inside.know(us)
            return [*self._once_more(xs, us), *nothing]

    def _once_more(self, xs: Tensors, us: Gradients) -> Gradients:
        """The gradients, whose derivatives raise if none is connected to the arguments."""
        gradients, message = self._rule(*xs)[1](*us), self._rule.not_connected
        if message is None or not torch.is_grad_enabled():
            return gradients
        if depends(lambda xs: self._connected(xs, us), xs):
            return gradients
        return [g if g is None else refused([g], xs, message)[0] for g in gradients]

    def _connected(self, xs: Tensors, us: Gradients) -> list[Tensor]:
        stopped = [u if u is None else u.detach() for u in us]
        return [g for g in self._rule(*xs)[1](*stopped) if g is not None]


class _CompiledKept(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, rule: Rule, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rule = rule
        ctx.save_for_backward(*xs)
        return tuple(y.detach() for y in rule(*xs)[0])

    @staticmethod
    def backward(ctx: FunctionCtx, *us: Tensor) -> tuple[Gradient, ...]:
        xs = ctx.saved_tensors
        gradients = ctx.rule(*xs)[1](*us)
        # torch.compile raises for second derivatives only if the first visibly depend on x.
        known = [
            g if g is None else torch.where(torch.zeros_like(x, dtype=torch.bool), x, g)
            for g, x in zip(gradients, xs, strict=True)
        ]
        return (None, *known)


def prepared(
    gs: Tensors, xs: Tensors, product: Product, message: str
) -> tuple[Tensors, Tensors, Derived]:
    """Returns `gs`, no constants, and a function that gives `gs` a derivative."""
    if not (transformed() or any(forward_ad.unpack_dual(x).tangent is not None for x in xs)):
        return gs, [], lambda _, gs, xs: _derived(gs, xs, product, message)
    # By the time of the derivative, what product closes over may no longer be differentiable.
    _check_one_forward_mode()
    return _derived(gs, xs, product, message), [], lambda _, gs, __: gs


def _derived(gs: Tensors, xs: Tensors, product: Product, message: str) -> Tensors:
    if not _is_followed():
        return gs
    z = [_Refused.apply(zero(x), message, 1, x) for x in xs]
    # Keeps the gradient connected, as torch raises for an unconnected one instead of giving zero.
    nothing = sum(0 * z_i.real.sum() for z_i in z)
    return [g + hz + nothing.to(g.real.dtype) for g, hz in zip(gs, product(z), strict=True)]


def refused(kept: Tensors, by: Tensors, message: str | None) -> list[Tensor]:
    """Returns `kept`, whose derivative with respect to the tensors `by` raises a LookupError."""
    return [_Refused.apply(k, message, 0, *by) if _is_followed() else k for k in kept]


class _Refused(torch.autograd.Function):  # type: ignore[misc]
    """The first tensor, whose derivatives by the last ones, of an order beyond `after`, raise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kept: Tensor, message: str, after: int, *by: Tensor) -> Tensor:
        del message, after, by
        return kept.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Args, output: Tensor) -> None:
        del output
        _, ctx.message, ctx.after, *by = inputs
        ctx.save_for_backward(*by)
        ctx.save_for_forward(*by)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: FunctionCtx, u: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, _, *by = ctx.needs_input_grad
        return _passed(ctx, u, any(by)), *[None] * (2 + len(by))

    @staticmethod
    def jvp(ctx: FunctionCtx, t: Tensor | None, _m: None, _a: None, *by: Any) -> Tensor | None:
        return _passed(ctx, t, any(b is not None for b in by))


def _passed(ctx: FunctionCtx, t: Tensor | None, is_by_them: bool) -> Tensor | None:
    if not is_by_them:
        return t
    if ctx.after == 0:
        raise LookupError(ctx.message)
    if t is None:
        return None
    by = ctx.saved_tensors
    one = torch.ones((), dtype=t.real.dtype, device=t.device)
    return t * _Refused.apply(one, ctx.message, ctx.after - 1, *by)


def zero(x: Tensor) -> Tensor:
    """Zero with the identity as its derivative; `x - stop(x)` would be NaN at infinity."""
    z = x - x.detach()
    return torch.where(z == 0, z, torch.zeros_like(z))


def times(c: Tensor, z: Tensor) -> Tensor:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite."""
    if torch.compiler.is_compiling():
        return _CompiledTimes.apply(c, z)
    _check_one_forward_mode()
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


def _is_followed() -> bool:
    """Whether derivatives may be taken of what is computed now."""
    if torch.compiler.is_compiling():  # which has no second derivatives
        return False
    return torch.is_grad_enabled() or forward_ad._current_level >= 0 or transformed()


def _compiling() -> bool:
    """Whether torch.compile is tracing; it raises inside transformations of `torch.func`."""
    if not torch.compiler.is_compiling():
        return False
    if transformed():
        raise NotImplementedError(
            "torch.compile loses custom derivatives inside transformations of torch.func. Do "
            "not compile the transformed function: transform without torch.compile, or around it."
        )
    return True


def _check_one_forward_mode() -> None:
    """Raises for nested forward mode, where tangents of custom functions have no derivatives."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    jvp = torch._C._functorch.TransformType.Jvp
    if sum(level.key() == jvp for level in levels) > 1:
        raise NotImplementedError(
            "torch loses the derivatives of custom functions in forward mode over forward mode. "
            "Use torch.func.jacfwd over torch.func.jacrev, as torch.func.hessian does."
        )
