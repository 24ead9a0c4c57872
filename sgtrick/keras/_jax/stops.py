"""Derivatives of a gradient that `stop_gradient` has removed, and an error in their place."""

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from sgtrick._types import Args
from sgtrick.keras._jax.embedding import depends


def are_lost(pulled: ClosedJaxpr, n: int) -> list[bool]:
    """By which of its first `n` inputs the derivative of a gradient is stopped, and wholly lost.

    A gradient that is constant does not depend on them at all, so nothing is lost of it.
    """
    stopped = _stopped(pulled.jaxpr, n)
    return [k in stopped and not _is_connected(pulled.jaxpr, k) for k in range(n)]


def _is_connected(jaxpr: Jaxpr, k: int) -> bool:
    """Whether an output has a derivative with respect to input `k`."""
    found = []

    def at(constants: list[Array], inputs: list[Array]) -> None:
        def along(x: list[Array]) -> list[Array]:
            args = [*inputs[:k], *x, *inputs[k + 1 :]]
            return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*args))

        found.append(depends(along, [inputs[k]]))

    jax.eval_shape(at, *([v.aval for v in vs] for vs in (jaxpr.constvars, jaxpr.invars)))
    return any(found)


def _stopped(jaxpr: Jaxpr, n: int) -> set[int]:
    """Which of the first `n` inputs reach an output through a `stop_gradient`."""
    reached = {v: {k} for k, v in enumerate(jaxpr.invars[:n])}
    stopped = dict[Var, set[int]]()
    for equation in jaxpr.eqns:
        read = [v for v in equation.invars if isinstance(v, Var)]
        by = set[int]().union(*(reached.get(v, ()) for v in read))
        through = set[int]().union(*(stopped.get(v, ()) for v in read))
        for v in equation.outvars:
            if jnp.issubdtype(v.aval.dtype, jnp.inexact):  # others have no derivatives to lose
                reached[v], stopped[v] = by, through | by if _stops(equation) else through
    return set[int]().union(*(stopped.get(v, ()) for v in jaxpr.outvars if isinstance(v, Var)))


def _stops(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "stop_gradient":
        return True
    inside = [p for p in jax.tree.leaves(equation.params) if isinstance(p, (ClosedJaxpr, Jaxpr))]
    return any(map(_stops, (e for jaxpr in inside for e in jaxpr.eqns)))


def refusing(x: Array, error: Exception) -> Array:
    """Returns `x`, with a derivative that raises."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def same(x: Array) -> Array:
        return x

    def rule(primals: Args, tangents: Args) -> tuple[Array, Array]:
        if not isinstance(tangents[0], SymbolicZero):
            raise error
        return same(*primals), jnp.zeros_like(primals[0])

    same.defjvp(rule, symbolic_zeros=True)
    kept: Array = same(x)
    return kept
