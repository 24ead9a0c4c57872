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
from sgtrick.keras._jax.kept import as_arrays, keep, moves
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._types import Product

Arrays: TypeAlias = Sequence[Array]


def embed(fx: Array, leaves: Sequence[Leaf], product: Product | None) -> Array:
    """Returns `fx` with the Jacobians of the leaves, and `product` as their derivative."""
    gs, xs = [leaf.gx for leaf in leaves], [leaf.x for leaf in leaves]
    # The derivative may be taken after the trace in which product was made has ended. So product is
    # traced now, and what it closes over becomes an argument. It is not evaluated here.
    hessian = None if product is None else jax.make_jaxpr(product)(xs)
    constants: Arrays = [] if hessian is None else hessian.consts

    def rule(fx: Array, by: Args, _: Array, moved: Args) -> Array:
        constants, gs, xs = by
        if hessian is None:
            gs = guarded(gs, xs, refusal(_refusals.NO_SECOND))
        else:
            gs = _known(hessian, constants, gs, xs)
        known = [leaf._replace(gx=g) for leaf, g in zip(leaves, gs, strict=True)]
        return KERAS.push(known, as_arrays(moved[2]), like=fx)

    return keep(fx, (constants, gs, xs), rule)


def _known(hessian: ClosedJaxpr, constants: Arrays, gs: Arrays, xs: Arrays) -> Arrays:
    """Returns `gs`, whose derivative with respect to `xs` is the Hessian; the next one raises."""

    def rule(gs: Arrays, by: Args, _: Arrays, moved: Args) -> Arrays:
        constants, xs = by
        if not moves(moved[1]):
            return [jnp.zeros_like(g) for g in gs]
        product = jaxpr_as_fun(ClosedJaxpr(hessian.jaxpr, list(constants)))
        one = guarded(jnp.ones((), "float32"), xs, refusal(_refusals.NO_THIRD))
        return [one.astype(hz.dtype) * hz for hz in product(*as_arrays(moved[1]))]

    return keep(gs, (constants, xs), rule)  # type: ignore[no-any-return]


def guarded(kept: Structure, by: Structure, check: Callable[[], None]) -> Structure:
    """Returns `kept`; `check` is called where a derivative with respect to `by` is taken."""

    def rule(kept: Structure, by: Structure, tangents: Structure, moved: Structure) -> Structure:
        del kept, by
        if moves(moved):
            check()
        return tangents

    return keep(kept, by, rule)


def refusal(message: str) -> Callable[[], None]:
    """A check that always fails."""

    def refuse() -> None:
        raise LookupError(message)

    return refuse


def depends(f: Function, xs: Structure, *others: Structure) -> bool:
    """Whether `f(xs, *others)` is connected to `xs`; all may be abstract."""
    found = []

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def probe(y: Array) -> Array:
        return y

    def rule(primals: Args, tangents: Args) -> tuple[Array, Array]:
        found.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    probe.defjvp(rule, symbolic_zeros=True)

    def differentiate(xs: Structure, *others: Structure) -> None:
        jax.vjp(lambda xs: list(map(probe, f(xs, *others))), xs)

    jax.eval_shape(differentiate, list(xs), *others)
    return any(found)
