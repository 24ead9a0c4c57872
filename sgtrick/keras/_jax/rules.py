"""Functions with their own vector-Jacobian product, under every transformation of jax."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from sgtrick._arguments import dtypes
from sgtrick._types import Args, Structure
from sgtrick.keras._jax import stops
from sgtrick.keras._jax.batches import Dims, batch_size, in_front, instantiated
from sgtrick.keras._rule import Rule

Arrays: TypeAlias = Sequence[Array]
Shapes: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]
Pull: TypeAlias = Callable[[Arrays, Arrays], list[Array]]


def with_vjp(f: Rule, xs: Arrays, refusal: Exception) -> list[Array]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    # The derivative may be taken after the trace in which f was called has ended. So f is traced
    # now, and the tracers that it closes over become arguments.
    primal, ys = jax.make_jaxpr(lambda *xs: f(*xs)[0], return_shape=True)(*xs)
    smooth = [dtypes.is_differentiable(y.dtype.name) for y in ys]
    outs = tuple(_aval(y) for y, s in zip(ys, smooth, strict=True) if s)

    def pulled(xs: Arrays, us: Arrays) -> list[Array]:
        some = iter(us)
        gradients = f(*xs)[1](*[next(some) if s else None for s in smooth])
        return [jnp.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]

    backward = jax.make_jaxpr(pulled)(list(xs), outs)

    @functools.cache
    def lost() -> list[bool]:
        return stops.are_lost(backward, len(xs))

    def pull(arguments: Arrays, us: Arrays) -> list[Array]:
        n = len(backward.consts)
        closed = ClosedJaxpr(backward.jaxpr, list(arguments[:n]))
        points = [
            stops.refusing(x, f.loses()) if is_lost else x
            for x, is_lost in zip(arguments[n:], lost(), strict=True)
        ]
        return list(jaxpr_as_fun(closed)(*points, *us))

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def h(constants: tuple[Arrays, Arrays], xs: Arrays) -> list[Array]:
        return list(jaxpr_as_fun(ClosedJaxpr(primal.jaxpr, list(constants[0])))(*xs))

    def rule(primals: Args, tangents: Args) -> tuple[list[Array], list[Array]]:
        (constants, xs), (by_constants, z) = primals, tangents
        if not all(isinstance(t, SymbolicZero) for t in jax.tree.leaves(by_constants)):
            raise refusal
        z = [instantiated(t) for t in z]
        arguments = [*constants[1], *xs]
        pushed = iter(_pushed_p.bind(*arguments, *z, n=len(arguments), pull=pull, outs=outs))
        # Call h, not primal, so that the rule applies to derivatives of every order.
        values = h(constants, xs)
        dy = [next(pushed) if s else _no_tangent(y) for s, y in zip(smooth, values, strict=True)]
        return values, dy

    h.defjvp(rule, symbolic_zeros=True)
    return list(h((list(primal.consts), list(backward.consts)), list(xs)))


# The transpose of `pull`, linear in z: `pushed(*constants, *z)` with params
#   n: the number of constants;
#   pull: the function from constants and upstream gradients to gradients;
#   outs: the shapes and dtypes of the upstream gradients.


def _pushed(*args: Array, n: int, pull: Pull, outs: Shapes) -> list[Array]:
    constants, z = args[:n], args[n:]
    return list(jax.linear_transpose(lambda *us: pull(constants, us), *outs)(list(z)))


def _pushed_jvp(primals: Arrays, tangents: Sequence[Array | ad.Zero], **params: Any) -> Structure:
    moving = [k for k, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def along(*some: Array) -> list[Array]:
        args = list(primals)
        for k, arg in zip(moving, some, strict=True):
            args[k] = arg
        return _pushed(*args, **params)

    # The others do not move: an error for their derivatives would be a false alarm.
    return jax.jvp(along, [primals[k] for k in moving], [tangents[k] for k in moving])


def _pushed_transpose(
    us: Sequence[Array | ad.Zero], *args: Any, n: int, pull: Pull, **_: Any
) -> list[Array | None]:
    us = [ad.instantiate_zeros(u) for u in us]
    return [*[None] * n, *pull(args[:n], us)]


def _pushed_batch(
    args: Arrays, dims: Dims, *, n: int, pull: Pull, outs: Shapes
) -> tuple[list[Array], list[int]]:
    z = in_front(args[n:], dims[n:], size=batch_size(args, dims))
    mapped = jax.vmap(pull, in_axes=(tuple(dims[:n]), 0), axis_size=batch_size(args, dims))
    outs = tuple(jax.ShapeDtypeStruct((batch_size(args, dims), *y.shape), y.dtype) for y in outs)
    result = _pushed_p.bind(
        *args[:n], *z, n=n, pull=lambda c, us: mapped(tuple(c), tuple(us)), outs=outs
    )
    return result, [0] * len(result)


def _aval(y: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(y.shape, y.dtype)


def _no_tangent(y: Array) -> SymbolicZero:
    return zero_from_primal(y, symbolic_zeros=True)


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
