"""A value with given gradients, whose own derivative is a given product or raises."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from sgtrick._arguments.structures import Leaf
from sgtrick._types import Args, Structure
from sgtrick.keras import _refusals
from sgtrick.keras._backends import Product
from sgtrick.keras._tensors import KERAS

Arrays: TypeAlias = Sequence[Array]


def embed(fx: Array, leaves: Sequence[Leaf], product: Product | None) -> Array:
    """Returns `fx` with the Jacobians of the leaves, and `product` as their derivative."""
    gs, xs = [leaf.gx for leaf in leaves], [leaf.x for leaf in leaves]
    # The derivative may be taken after the trace in which product was made has ended. So product is
    # traced now, and what it closes over becomes an argument. It is not evaluated here.
    hessian = None if product is None else jax.make_jaxpr(product)(xs)

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def h(constants: Arrays, fx: Array, gs: Arrays, xs: Arrays) -> Array:
        del constants, gs, xs
        return fx

    def rule(primals: Args, tangents: Args) -> tuple[Array, Array]:
        constants, fx, gs, xs = primals
        gs = _known(hessian, constants, gs, xs)
        known = [leaf._replace(gx=g) for leaf, g in zip(leaves, gs, strict=True)]
        z = [instantiated(t) for t in tangents[3]]
        return h(*primals), KERAS.push(known, z, like=fx)

    h.defjvp(rule, symbolic_zeros=True)
    return h([] if hessian is None else hessian.consts, fx, gs, xs)


def instantiated(t: Array | SymbolicZero) -> Array:
    """A tangent as an array."""
    return jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t


def _known(hessian: ClosedJaxpr | None, constants: Arrays, gs: Arrays, xs: Arrays) -> Structure:
    """Returns `gs`, whose derivative with respect to `xs` is the Hessian; the next one raises."""
    if hessian is None:
        return refused(gs, _refusals.NO_SECOND, xs)

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def known(constants: Arrays, gs: Arrays, xs: Arrays) -> Arrays:
        del constants, xs
        return gs

    def rule(primals: Args, tangents: Args) -> tuple[Arrays, Arrays]:
        constants, gs, xs = primals
        if all(isinstance(t, SymbolicZero) for t in tangents[2]):
            return known(*primals), [jnp.zeros_like(g) for g in gs]
        z = [instantiated(t) for t in tangents[2]]
        products = jaxpr_as_fun(ClosedJaxpr(hessian.jaxpr, list(constants)))(*z)
        one = refused(jnp.ones((), "float32"), _refusals.NO_THIRD, xs)
        return known(*primals), [one.astype(hz.dtype) * hz for hz in products]

    known.defjvp(rule, symbolic_zeros=True)
    return known(constants, gs, xs)


def refused(kept: Structure, message: str, by: Arrays) -> Structure:
    """Returns `kept`, whose derivative with respect to `by` raises a LookupError."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def same(kept: Structure, by: Arrays) -> Structure:
        del by
        return kept

    def rule(primals: Args, tangents: Args) -> tuple[Structure, Structure]:
        if not all(isinstance(t, SymbolicZero) for t in tangents[1]):
            raise LookupError(message)
        return same(*primals), jax.tree.map(instantiated, tangents[0])

    same.defjvp(rule, symbolic_zeros=True)
    return same(kept, by)


def depends(f: Product, xs: Arrays) -> bool:
    """Whether `f(xs)` is connected to `xs`."""
    found = []

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def probe(y: Array) -> Array:
        return y

    def rule(primals: Args, tangents: Args) -> tuple[Array, Array]:
        found.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    probe.defjvp(rule, symbolic_zeros=True)
    jax.eval_shape(lambda xs: jax.vjp(lambda xs: list(map(probe, f(xs))), xs)[0], list(xs))
    return any(found)
