"""Functions with their own vector-Jacobian product: `jax.custom_vjp`, with what they close over."""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax import Array
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from sgtrick._arguments import dtypes
from sgtrick.keras import _refusals
from sgtrick.keras._jax.embedding import depends, guarded, refusal
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
    # What the value and what the rule close over.
    constants = [list(primal.consts), list(pullback.consts)]
    by_closure = refusal(_refusals.NO_ARGUMENT.format(f.__name__))

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def h(constants: list[Arrays], xs: Arrays) -> list[Array]:
        return list(jaxpr_as_fun(ClosedJaxpr(primal.jaxpr, constants[0]))(*xs))

    def forward(constants: list[Arrays], xs: Arrays) -> tuple[list[Array], tuple[Arrays, Arrays]]:
        # Call h, not primal, so that the rule applies to derivatives of every order.
        return h(constants, xs), (constants[1], xs)

    def backward(kept: tuple[Arrays, Arrays], us: Arrays) -> tuple[None, list[Array]]:
        constants, xs = kept
        us = [
            u if s else jnp.zeros(y.shape, y.dtype) for u, y, s in zip(us, ys, smooth, strict=True)
        ]
        points = guarded(xs, xs, functools.partial(_check_connected, f.__name__, pullback, len(xs)))
        return None, list(jaxpr_as_fun(ClosedJaxpr(pullback.jaxpr, constants))(*points, *us))

    h.defvjp(forward, backward)
    return list(h(guarded(constants, constants, by_closure), list(xs)))


def _check_connected(name: str, pullback: ClosedJaxpr, count: int) -> None:
    """Raises if no gradient is connected to the arguments, the first `count` of the inputs."""

    def gradients(xs: Arrays, us: Arrays, constants: Arrays) -> Arrays:
        return list(jaxpr_as_fun(ClosedJaxpr(pullback.jaxpr, constants))(*xs, *us))

    inputs, constants = (
        [v.aval for v in vs] for vs in (pullback.jaxpr.invars, pullback.jaxpr.constvars)
    )
    if not depends(gradients, inputs[:count], inputs[count:], constants):
        raise LookupError(_refusals.NOT_CONNECTED.format(name))
