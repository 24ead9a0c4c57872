"""What `keras.ops` lacks on jax: linear maps with a transpose that jax would not find.

They are primitives with rules for every transformation of jax, so that they can be differentiated
in forward and reverse mode, mapped, compiled and staged in any order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from sgtrick import _dtypes
from sgtrick.keras import _backends, _trick


def embed(
    fx: Any, gs: list[Any], xs: list[Any], batch_ndims: list[int], product: _trick.Product | None
) -> Any:
    """Returns `fx` with the gradients `gs`, and `product` as their derivative."""
    # The derivative may be taken after the trace in which product was made has ended. So it is
    # traced now, and what it closes over becomes an argument. Nothing of it is computed here.
    hessian = None if product is None else jax.make_jaxpr(product)(xs)

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def h(constants: Any, fx: Any, gs: Any, xs: Any) -> Any:
        del constants, gs, xs
        return fx

    def rule(primals: Any, tangents: Any) -> Any:
        constants, fx, gs, xs = primals
        gs = _known(hessian, constants, gs, xs)
        z = [_instantiated(t) for t in tangents[3]]
        return h(*primals), _trick.push(gs, z, batch_ndims, like=fx)

    h.defjvp(rule, symbolic_zeros=True)
    return h([] if hessian is None else hessian.consts, fx, gs, xs)


def _known(hessian: Any, constants: Any, gs: Any, xs: Any) -> Any:
    """Returns `gs`, whose derivative by `xs` is the Hessian, once."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def known(constants: Any, gs: Any, xs: Any) -> Any:
        del constants, xs
        return gs

    def rule(primals: Any, tangents: Any) -> Any:
        constants, gs, xs = primals
        if all(isinstance(t, SymbolicZero) for t in tangents[2]):
            return known(*primals), [jnp.zeros_like(g) for g in gs]
        if hessian is None:
            raise LookupError(_backends.NO_SECOND)
        z = [_instantiated(t) for t in tangents[2]]
        products = jaxpr_as_fun(ClosedJaxpr(hessian.jaxpr, list(constants)))(*z)
        one = _last(xs)
        return known(*primals), [one.astype(hz.dtype) * hz for hz in products]

    known.defjvp(rule, symbolic_zeros=True)
    return known(constants, gs, xs)


@jax.custom_jvp  # type: ignore[untyped-decorator]
def _last(xs: Any) -> Any:
    """One, whose derivative raises."""
    del xs
    return jnp.ones((), "float32")


def _last_rule(primals: Any, tangents: Any) -> Any:
    if not all(isinstance(t, SymbolicZero) for t in tangents[0]):
        raise LookupError(_backends.NO_THIRD)
    return _last(*primals), jnp.zeros((), "float32")


_last.defjvp(_last_rule, symbolic_zeros=True)


@jax.custom_jvp  # type: ignore[untyped-decorator]
def zero(x: Any) -> Any:
    """Zero, with the identity as its derivative: `x - stop(x)` would be NaN at infinity."""
    return jnp.zeros_like(x)


zero.defjvp(lambda primals, tangents: (zero(*primals), *tangents))


def times(c: Any, z: Any) -> Any:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite.

    `jnp.where` says the same, but its transpose would ask for zeros of `z`, not of what comes back.
    """
    return _times_p.bind(c, z)


def _times(c: Any, z: Any) -> Any:
    return jnp.where(z == 0, jnp.zeros_like(z), c * z)


def _times_jvp(primals: Any, tangents: Any) -> Any:
    (c, z), (dc, dz) = primals, tangents
    terms = [] if isinstance(dc, ad.Zero) else [times(z, dc)]
    terms += [] if isinstance(dz, ad.Zero) else [times(c, dz)]
    return times(c, z), sum(terms[1:], terms[0])


def _times_transpose(u: Any, c: Any, z: Any) -> Any:
    assert not ad.is_undefined_primal(c), "tangents are the second factor"
    return None, ad.Zero(z.aval) if isinstance(u, ad.Zero) else times(c, u)


def _times_batch(args: Any, dims: Any) -> Any:
    return times(*_in_front(args, dims)), 0


def _instantiated(t: Any) -> Any:
    return jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t


def with_vjp(
    f: Callable[..., tuple[list[Any], Any]], xs: Sequence[Any], refusal: Exception
) -> list[Any]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    # The derivative may be taken after the trace in which f was called has ended. So f is traced
    # now, and the tracers of that trace that it closes over become arguments.
    forward, ys = jax.make_jaxpr(lambda *xs: f(*xs)[0], return_shape=True)(*xs)
    smooth = [_dtypes.is_differentiable(y.dtype.name) for y in ys]
    outs = tuple(_aval(y) for y, s in zip(ys, smooth, strict=True) if s)

    def pulled(xs: Sequence[Any], us: Sequence[Any]) -> list[Any]:
        some = iter(us)
        gradients = f(*xs)[1](*[next(some) if s else None for s in smooth])
        return [jnp.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]

    backward = jax.make_jaxpr(pulled)(list(xs), outs)

    def pull(arguments: Sequence[Any], us: Sequence[Any]) -> list[Any]:
        n = len(backward.consts)
        closed = ClosedJaxpr(backward.jaxpr, list(arguments[:n]))
        return list(jaxpr_as_fun(closed)(*arguments[n:], *us))

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def h(constants: Any, xs: Any) -> Any:
        return list(jaxpr_as_fun(ClosedJaxpr(forward.jaxpr, list(constants[0])))(*xs))

    def rule(primals: Any, tangents: Any) -> Any:
        (constants, xs), (by_constants, z) = primals, tangents
        if not all(isinstance(t, SymbolicZero) for t in jax.tree.leaves(by_constants)):
            raise refusal
        z = [_instantiated(t) for t in z]
        arguments = [*constants[1], *xs]
        pushed = iter(_pushed_p.bind(*arguments, *z, n=len(arguments), pull=pull, outs=outs))
        # h again, so that derivatives of the value are those of the rule at every level.
        values = h(constants, xs)
        dy = [next(pushed) if s else _no_tangent(y) for s, y in zip(smooth, values, strict=True)]
        return values, dy

    h.defjvp(rule, symbolic_zeros=True)
    return list(h((list(forward.consts), list(backward.consts)), list(xs)))


# The transpose of `pull`, linear in z: `pushed(*constants, *z)` with params
#   n: the number of constants;
#   pull: maps them and upstream gradients to gradients;
#   outs: the shapes and dtypes of upstream gradients.


def _pushed(*args: Any, n: int, pull: Any, outs: Any) -> list[Any]:
    constants, z = args[:n], args[n:]
    return list(jax.linear_transpose(lambda *us: pull(constants, us), *outs)(list(z)))


def _pushed_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *args: _pushed(*args, **params), tuple(primals), tangents)


def _pushed_transpose(us: Any, *args: Any, n: int, pull: Any, **_: Any) -> list[Any]:
    us = [ad.instantiate_zeros(u) for u in us]
    return [*[None] * n, *pull(args[:n], us)]


def _pushed_batch(args: Any, dims: Any, *, n: int, pull: Any, outs: Any) -> Any:
    z = _in_front(args[n:], dims[n:], size=_size(args, dims))
    mapped = jax.vmap(pull, in_axes=(tuple(dims[:n]), 0), axis_size=_size(args, dims))
    outs = tuple(jax.ShapeDtypeStruct((_size(args, dims), *y.shape), y.dtype) for y in outs)
    result = _pushed_p.bind(
        *args[:n], *z, n=n, pull=lambda c, us: mapped(tuple(c), tuple(us)), outs=outs
    )
    return result, [0] * len(result)


def depends(f: Callable[[list[Any]], list[Any]], xs: Sequence[Any]) -> bool:
    """Whether the derivative of `f(xs)` by `xs` is connected."""
    found = []

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def probe(y: Any) -> Any:
        return y

    def rule(primals: Any, tangents: Any) -> Any:
        found.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    probe.defjvp(rule, symbolic_zeros=True)

    def differentiated(xs: Any) -> Any:
        return jax.jvp(lambda xs: list(map(probe, f(xs))), (xs,), (xs,))

    jax.eval_shape(differentiated, list(xs))
    return any(found)


def _aval(y: Any) -> Any:
    return jax.ShapeDtypeStruct(y.shape, y.dtype)


def _no_tangent(y: Any) -> Any:
    return zero_from_primal(y, symbolic_zeros=True)


def _size(args: Any, dims: Any) -> Any:
    """An int, or an expression in symbolic dimensions."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def _in_front(args: Any, dims: Any, size: Any = None) -> list[Any]:
    size = _size(args, dims) if size is None else size
    return [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]


_times_p = Primitive("sgtrick_times")
_times_p.def_impl(jax.jit(_times))
_times_p.def_abstract_eval(lambda _, z: z)
ad.primitive_jvps[_times_p] = _times_jvp
ad.primitive_transposes[_times_p] = _times_transpose
batching.primitive_batchers[_times_p] = _times_batch
mlir.register_lowering(_times_p, mlir.lower_fun(_times, multiple_results=False))

_pushed_p = Primitive("sgtrick_pushed")
_pushed_p.multiple_results = True
_pushed_p.def_impl(_pushed)
_pushed_p.def_abstract_eval(
    lambda *_, outs, **__: [jax.core.ShapedArray(y.shape, y.dtype) for y in outs]
)
ad.primitive_jvps[_pushed_p] = _pushed_jvp
ad.primitive_transposes[_pushed_p] = _pushed_transpose
batching.primitive_batchers[_pushed_p] = _pushed_batch
mlir.register_lowering(_pushed_p, mlir.lower_fun(_pushed, multiple_results=True))
