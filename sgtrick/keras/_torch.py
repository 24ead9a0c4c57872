"""What `keras.ops` lacks on torch: linear maps with a transpose that torch would not find.

They are autograd functions with rules for every transformation of `torch.func`. Under torch.compile
they are without a rule for forward mode, which it does not take.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from sgtrick.keras import _backends, _trick
from sgtrick.keras._rule import Rule


def embed(
    fx: Any, gs: list[Any], xs: list[Any], batch_ndims: list[int], product: _trick.Product | None
) -> Any:
    """Returns `fx` with the gradients `gs`, and `product` as their derivative."""
    if _compiling():  # which takes no second derivatives
        return _CompiledEmbedded.apply(_Known(_as_they_are, batch_ndims), fx, *gs, *xs)
    _insist_on_one_forward_mode()
    if product is None:
        known = _without_second
    elif _one_level(xs):
        known = functools.partial(_added_if_asked_for, product)
    else:
        gs, known = _added(product, gs, xs), _as_they_are
    return _Embedded.apply(_Known(known, batch_ndims), fx, *gs, *xs)


def _one_level(xs: list[Any]) -> bool:
    """Whether the one derivative in sight is that of a tape.

    Only then can `product`, with whatever it closes over, wait until it is asked for.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    return all(forward_ad.unpack_dual(x).tangent is None for x in xs)


def _as_they_are(gs: Any, xs: Any) -> Any:
    del xs
    return gs


def _without_second(gs: Any, xs: Any) -> Any:
    return [_refused(g, _backends.NO_SECOND, xs) for g in gs]


def _added_if_asked_for(product: _trick.Product, gs: Any, xs: Any) -> Any:
    return _added(product, gs, xs) if torch.is_grad_enabled() else gs


def _added(product: _trick.Product, gs: Any, xs: Any) -> Any:
    return [g + hz for g, hz in zip(gs, product([_Once.apply(x) for x in xs]), strict=True)]


class _Known:
    """The gradients of a value: `known(gs, xs)`, which have derivatives in turn."""

    def __init__(self, known: Callable[[Any, Any], Any], batch_ndims: list[int]) -> None:
        self._known, self._batch_ndims = known, batch_ndims

    def at(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns gradients and points."""
        n = len(self._batch_ndims)
        gs, xs = list(tensors[:n]), list(tensors[n:])
        return self._known(gs, xs), xs

    def pull(self, tensors: Sequence[Any], u: Any) -> list[Any]:
        """From a gradient of the value to gradients of the points."""
        gs, xs = self.at(tensors)
        return [_pulled(u, *leaf) for leaf in zip(gs, xs, self._batch_ndims, strict=True)]

    def push(self, tensors: Sequence[Any], z: Sequence[Any], like: Any) -> Any:
        """From tangents of the points to that of the value."""
        gs, xs = self.at(tensors)
        return _trick.push(gs, _zeros_for_none(z, xs), self._batch_ndims, like)


def _pulled(u: Any, g: Any, x: Any, batch_ndims: int) -> Any:
    domain = g.ndim - u.ndim
    u = _trick.cast(u, _trick.dtype_of(g)).reshape((*u.shape, *[1] * domain)).expand(g.shape)
    in_range = tuple(range(batch_ndims, g.ndim - domain))
    product = times(g.conj(), u)
    return _trick.cast(product.sum(in_range) if in_range else product, _trick.dtype_of(x))


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
        # torch.compile refuses second derivatives, if it sees that the first depend on x.
        never = [torch.zeros_like(x, dtype=torch.bool) for x in xs]
        pulled = [torch.where(*leaf) for leaf in zip(never, xs, pulled, strict=True)]
        return None, None, *[None] * len(pulled), *pulled


class _Embedded(_CompiledEmbedded):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _CompiledEmbedded.setup_context(ctx, inputs, output)
        _, fx, *tensors = inputs
        ctx.save_for_forward(*tensors, fx)  # vmap insists that these are the same
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
    """Zero, with the identity as its derivative, that of which raises."""

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
        return None if u is None else _refused(u, _backends.NO_THIRD, ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, dx: Any) -> Any:
        return _refused(dx, _backends.NO_THIRD, ctx.saved_tensors)


def zero(x: Any) -> Any:
    """Zero, with the identity as its derivative: `x - stop(x)` would be NaN at infinity."""
    z = x - x.detach()
    return torch.where(z == 0, z, torch.zeros_like(z))


def times(c: Any, z: Any) -> Any:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite."""
    if torch.compiler.is_compiling():
        return _CompiledTimes.apply(c, z)
    _insist_on_one_forward_mode()
    return _Times.apply(c, z)


class _CompiledTimes(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(c: Any, z: Any) -> Any:
        return torch.where(z == 0, torch.zeros_like(z), c * z)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
        c, z = ctx.saved_tensors
        by_c, by_z = ctx.needs_input_grad
        return (
            times(z.conj(), u) if by_c else None,
            times(c.conj(), u) if by_z else None,
        )


class _Times(_CompiledTimes):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _CompiledTimes.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, u: Any) -> Any:
        return (None, None) if u is None else _CompiledTimes.backward(ctx, u)

    @staticmethod
    def jvp(ctx: Any, dc: Any, dz: Any) -> Any:
        c, z = ctx.saved_tensors
        terms = [] if dc is None else [times(z, dc)]
        terms += [] if dz is None else [times(c, dz)]
        return sum(terms[1:], terms[0])


def _refused(kept: Any, message: str, by: Any) -> Any:
    return _Refuse.apply(kept, LookupError(message), *by)


class _Refuse(torch.autograd.Function):  # type: ignore[misc]
    """The first argument; its derivative by those after the error raises it."""

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


def with_vjp(f: Rule, xs: Sequence[Any], refusal: Exception) -> list[Any]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    if _compiling():
        # What a compiled Function closes over gets no gradient, without a word.
        outputs, _ = f(*[x.detach() for x in xs])
        if any(y.requires_grad for y in outputs):
            raise refusal
        return list(_CompiledPulled.apply(f.again, *xs))
    _insist_on_one_forward_mode()
    transformed = torch._C._are_functorch_transforms_active()
    with torch.no_grad(), _Outside(xs) as outside:
        ys, pull = f(*xs)
        if transformed:
            pull(*map(_upstream, ys))
    call = _Call(f, list(outside.found), None if transformed else (ys, pull))
    # They are arguments, so that every transformation sees them.
    constants = [_Refuse.apply(t.detach(), refusal, t) for t in outside.found.values()]
    return list(_Pulled.apply(call, len(xs), *xs, *constants))


class _Pulled(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(call: Any, n: int, *tensors: Any) -> Any:
        # What pull keeps must not be what is returned: a cycle, that would never be freed.
        return tuple(y.detach() for y in call.outputs(tensors[:n], tensors[n:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.n, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.upstream = [_upstream(y) for y in output]
        ctx.mark_non_differentiable(
            *[y for y, u in zip(output, ctx.upstream, strict=True) if u is None]
        )

    @staticmethod
    def backward(ctx: Any, *us: Any) -> Any:
        tensors = ctx.saved_tensors
        smooth = [u if like is not None else None for u, like in zip(us, ctx.upstream, strict=True)]
        pulled = ctx.call.pull(tensors[: ctx.n], tensors[ctx.n :], smooth)
        return None, None, *pulled, *[None] * (len(tensors) - ctx.n)

    @staticmethod
    def jvp(ctx: Any, _: Any, n: Any, *z: Any) -> Any:
        del n
        tensors = ctx.saved_tensors
        xs, constants = tensors[: ctx.n], tensors[ctx.n :]
        smooth = [u for u in ctx.upstream if u is not None]

        def pull(*us: Any) -> Any:
            some = iter(us)
            all_us = [u if u is None else next(some) for u in ctx.upstream]
            return tuple(_zeros_for_none(ctx.call.pull(xs, constants, all_us), xs))

        # pull is linear, so that its derivative is the same at any upstream.
        pushed = iter(torch.func.vjp(pull, *smooth)[1](tuple(_zeros_for_none(z[: ctx.n], xs))))
        return tuple(u if u is None else next(pushed) for u in ctx.upstream)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, n: int, *tensors: Any) -> Any:
        ys = _Pulled.apply(_Mapped(call, n, in_dims[2:], info.batch_size), n, *tensors)
        return ys, (0,) * len(ys)


class _Call:
    """A rule of which nothing depends on what is not an argument."""

    def __init__(self, f: Rule, outside: list[int], at_once: Any) -> None:
        self._f, self._outside, self._at_once = f, outside, at_once

    def outputs(self, xs: Any, constants: Any) -> Any:
        if self._at_once is not None:
            return self._at_once[0]
        with _Outside(xs, dict(zip(self._outside, constants, strict=True))):
            return self._f(*xs)[0]

    def pull(self, xs: Any, constants: Any, us: Any) -> Any:
        if self._at_once is not None:
            # With a graph, for higher derivatives, it has to be computed from these xs.
            pull = self._f(*xs)[1] if torch.is_grad_enabled() else self._at_once[1]
            return pull(*us)
        with _Outside(xs, dict(zip(self._outside, constants, strict=True))) as inside:
            pull = self._f(*xs)[1]
            inside.know(us)
            return pull(*us)


class _Mapped:
    """The call of every member of a batch."""

    def __init__(self, call: Any, n: int, dims: Any, size: int) -> None:
        self._call, self._x_dims, self._constant_dims = call, dims[:n], dims[n:]
        self._size = size

    def outputs(self, xs: Any, constants: Any) -> Any:
        return self._vmap(lambda xs, c: tuple(self._call.outputs(xs, c)))(xs, constants)

    def pull(self, xs: Any, constants: Any, us: Any) -> Any:
        def pull(xs: Any, constants: Any, us: Any) -> Any:
            return tuple(_zeros_for_none(self._call.pull(xs, constants, us), xs))

        us_dims = tuple(None if u is None else 0 for u in us)
        pulled = self._vmap(pull, us_dims)(xs, constants, tuple(us))
        return [
            g.sum(0) if d is None else g.movedim(0, d)
            for g, d in zip(pulled, self._x_dims, strict=True)
        ]

    def _vmap(self, f: Any, *more: Any) -> Any:
        in_dims = (self._x_dims, self._constant_dims, *more)
        if all(d is None for d in _pytree.tree_leaves(in_dims)):
            return f
        return torch.func.vmap(f, in_dims=in_dims)


class _Outside(TorchFunctionMode):  # type: ignore[misc]
    """Finds the tensors that enter a computation from elsewhere, and puts others in their place."""

    def __init__(self, known: Sequence[Any], instead: dict[int, Any] | None = None) -> None:
        super().__init__()
        self.found: dict[int, Any] = {}
        self._instead = instead or {}
        self._known: dict[int, Any] = {}
        self.know(known)

    def know(self, tensors: Any) -> None:
        """Tensors that do not come from elsewhere."""
        for t in _pytree.tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self._known[id(t)] = t  # not the id alone, which may be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    def forward(ctx: Any, f: Any, *xs: Any) -> Any:
        ctx.f = f
        ctx.save_for_backward(*xs)
        return tuple(y.detach() for y in f(*xs)[0])

    @staticmethod
    def backward(ctx: Any, *us: Any) -> Any:
        return None, *ctx.f(*ctx.saved_tensors)[1](*us)


def depends(f: Callable[[list[Any]], list[Any]], xs: Sequence[Any]) -> bool:
    """Whether the derivative of `f(xs)` by `xs` is connected."""
    found: list[bool] = []

    def probed(*xs: Any) -> Any:
        ys = f(list(xs))
        found.extend(y.requires_grad for y in ys)
        return tuple(ys)

    torch.func.vjp(probed, *[torch.zeros_like(x) for x in xs])
    return any(found)


def _compiling() -> bool:
    """Whether torch.compile reads this; it loses derivatives inside what `torch.func` makes."""
    if not torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "torch.compile loses custom derivatives inside transformations of torch.func. Compile "
            "the function that is transformed, not the transformed one."
        )
    return True


def _insist_on_one_forward_mode() -> None:
    levels = torch._C._functorch.get_interpreter_stack() or []
    forward = torch._C._functorch.TransformType.Jvp
    if sum(level.key() == forward for level in levels) > 1:
        raise NotImplementedError(
            "torch loses the derivatives of custom functions in forward mode over forward mode. "
            "Use torch.func.jacfwd over torch.func.jacrev, as torch.func.hessian does."
        )


def _upstream(y: Any) -> Any:
    return torch.ones_like(y) if y.is_floating_point() or y.is_complex() else None


def _zeros_for_none(gradients: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]
