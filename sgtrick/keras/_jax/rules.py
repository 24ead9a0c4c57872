"""Functions with their own vector-Jacobian product: `jax.custom_vjp`, with what they close over."""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from sgtrick._arguments import dtypes
from sgtrick._types import Args
from sgtrick.keras import _refusals
from sgtrick.keras._jax.embedding import depends, instantiated
from sgtrick.keras._rule import Rule

Arrays: TypeAlias = Sequence[Array]


def with_vjp(f: Rule, xs: Arrays) -> list[Array]:
    """Returns the outputs of `f(*xs) -> (outputs, pull)`, with `pull` as their derivative."""
    # The derivative may be taken after the trace in which f was called has ended. So f is traced
    # now, and the tracers that it closes over become arguments.
    primal, ys = jax.make_jaxpr(lambda *xs: f(*xs)[0], return_shape=True)(*xs)
    smooth = [dtypes.is_differentiable(y.dtype.name) for y in ys]

    def pull(xs: Arrays, us: Arrays) -> list[Array]:
        all_us = [u if s else None for u, s in zip(us, smooth, strict=True)]
        gradients = f(*xs)[1](*all_us)
        return [jnp.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]

    pullback = jax.make_jaxpr(pull)(list(xs), ys)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def h(constants: tuple[Arrays, Arrays], xs: Arrays) -> list[Array]:
        # The constants are what the value and what the rule close over.
        return list(jaxpr_as_fun(ClosedJaxpr(primal.jaxpr, list(constants[0])))(*xs))

    def forward(constants: Any, xs: Any) -> tuple[list[Array], tuple[Arrays, Arrays]]:
        if any(c.perturbed for c in jax.tree.leaves(constants)):
            raise LookupError(_refusals.NO_ARGUMENT.format(f.__name__))
        constants, xs = custom_vjp_primal_tree_values((constants, xs))
        # Call h, not primal, so that the rule applies to derivatives of every order.
        return h(constants, xs), (constants[1], xs)

    def backward(kept: tuple[Arrays, Arrays], us: Sequence[Any]) -> tuple[None, list[Array]]:
        constants, xs = kept
        us = [
            instantiated(u) if s else jnp.zeros(y.shape, y.dtype)
            for u, y, s in zip(us, ys, smooth, strict=True)
        ]
        points = _checked(f.__name__, pullback, xs)
        return None, list(jaxpr_as_fun(ClosedJaxpr(pullback.jaxpr, list(constants)))(*points, *us))

    h.defvjp(forward, backward, symbolic_zeros=True)
    return list(h((list(primal.consts), list(pullback.consts)), list(xs)))


def _checked(name: str, pullback: ClosedJaxpr, xs: Arrays) -> Arrays:
    """Returns `xs`, whose derivatives raise if no gradient is connected to them."""

    @functools.cache
    def is_connected() -> bool:
        found = []

        def ask(constants: list[Array], inputs: list[Array]) -> None:
            at = jaxpr_as_fun(ClosedJaxpr(pullback.jaxpr, constants))
            us = inputs[len(xs) :]
            found.append(depends(lambda xs: list(at(*xs, *us)), inputs[: len(xs)]))

        jaxpr = pullback.jaxpr
        jax.eval_shape(ask, *([v.aval for v in vs] for vs in (jaxpr.constvars, jaxpr.invars)))
        return found[0]

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def checked(xs: Arrays) -> Arrays:
        return xs

    @checked.defjvp  # type: ignore[untyped-decorator]
    def _(primals: Args, tangents: Args) -> tuple[Arrays, Arrays]:
        if not is_connected():
            raise LookupError(_refusals.NOT_CONNECTED.format(name))
        return checked(*primals), tangents[0]

    kept: Arrays = checked(xs)
    return kept
