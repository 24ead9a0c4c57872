"""A value with given gradients, whose own derivative is a given product or raises."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from sgtrick._arguments.structures import Leaf
from sgtrick._types import Args, Function, Structure
from sgtrick.keras import _refusals
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._types import Product

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
        if hessian is None:
            gs = guarded(gs, xs, refusal(_refusals.NO_SECOND))
        else:
            gs = _known(hessian, constants, gs, xs)
        known = [leaf._replace(gx=g) for leaf, g in zip(leaves, gs, strict=True)]
        return h(*primals), KERAS.push(known, _instantiated(tangents[3]), like=fx)

    h.defjvp(rule, symbolic_zeros=True)
    return h([] if hessian is None else hessian.consts, fx, gs, xs)


def _known(hessian: ClosedJaxpr, constants: Arrays, gs: Arrays, xs: Arrays) -> Arrays:
    """Returns `gs`, whose derivative with respect to `xs` is the Hessian; the next one raises."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def known(constants: Arrays, gs: Arrays, xs: Arrays) -> Arrays:
        del constants, xs
        return gs

    def rule(primals: Args, tangents: Args) -> tuple[Arrays, Arrays]:
        constants, gs, xs = primals
        if not _any_moves(tangents[2]):
            return known(*primals), [jnp.zeros_like(g) for g in gs]
        product = jaxpr_as_fun(ClosedJaxpr(hessian.jaxpr, list(constants)))
        one = guarded(jnp.ones((), "float32"), xs, refusal(_refusals.NO_THIRD))
        products = product(*_instantiated(tangents[2]))
        return known(*primals), [one.astype(hz.dtype) * hz for hz in products]

    known.defjvp(rule, symbolic_zeros=True)
    with_derivative: Arrays = known(constants, gs, xs)
    return with_derivative


def guarded(kept: Structure, by: Structure, check: Callable[[], None]) -> Structure:
    """Returns `kept`; `check` is called where a derivative with respect to `by` is taken."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def same(kept: Structure, by: Structure) -> Structure:
        del by
        return kept

    def rule(primals: Args, tangents: Args) -> tuple[Structure, Structure]:
        if _any_moves(tangents[1]):
            check()
        return same(*primals), _instantiated(tangents[0])

    same.defjvp(rule, symbolic_zeros=True)
    return same(kept, by)


def refusal(message: str) -> Callable[[], None]:
    """A check that always fails."""

    def refuse() -> None:
        raise LookupError(message)

    return refuse


def _any_moves(tangents: Structure) -> bool:
    return any(not isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangents))


def _instantiated(tangents: Structure) -> Structure:
    """The tangents as arrays."""
    return jax.tree.map(
        lambda t: jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t, tangents
    )


def depends(f: Function, xs: Structure, *others: Structure) -> bool:
    """Whether `f(xs, *others)` is connected to `xs`; all may be abstract."""
    found = []

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def probe(y: Array) -> Array:
        return y

    def rule(primals: Args, tangents: Args) -> tuple[Array, Array]:
        found.append(_any_moves(tangents))
        return primals[0], tangents[0]

    probe.defjvp(rule, symbolic_zeros=True)

    def differentiate(xs: Structure, *others: Structure) -> None:
        jax.vjp(lambda xs: list(map(probe, f(xs, *others))), xs)

    jax.eval_shape(differentiate, list(xs), *others)
    return any(found)
