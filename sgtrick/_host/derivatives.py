"""The derivatives of what an engine returns, as kept overrides.

An engine returns its gradients with the values, or it has functions for products with its
derivatives, which are called when these are requested.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import embedding, unknown
from sgtrick._core.embedding import symmetric
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule, plus
from sgtrick._host.host_call import HostCall, as_high
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Gradient, Structure, Tangent, Tensor

# From vectors like the values to ones like the points, or the reverse.
Linear = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def with_gradients(
    call: HostCall, at: Sequence[Tensor], values: Sequence[Tensor], jacobians: Sequence[list[Leaf]]
) -> list[Tensor]:
    """The values with the gradients that came with them.

    Args:
        call: The host call.
        at: The leaves, and where the engine failed if it tells.
        values: The values.
        jacobians: For each value, the points with its gradients.
    """
    name, points = call.spec.name, [leaf.x for leaf in jacobians[0]]
    if call.engine.gives_hessian and not call.spec.value.is_number:
        vjp, jvp = _contractions(values, jacobians)
        return with_products(call, at, points, values, vjp, jvp)
    hessian: Structure = _no_second(call)
    if call.engine.gives_hessian:
        hessian = symmetric(name, call.hessian_times, at, points)
    return [
        embedding.embed_constant(name, value, leaves, hessian)
        for value, leaves in zip(values, jacobians, strict=True)
    ]


def _contractions(
    values: Sequence[Tensor], jacobians: Sequence[list[Leaf]]
) -> tuple[Linear, Linear]:
    """The products with Jacobians, and with their transposes."""

    def vjp(us: Sequence[Tensor]) -> list[Tensor]:
        pulled = [
            [TENSORFLOW.transpose(leaf, u) for leaf in leaves]
            for leaves, u in zip(jacobians, us, strict=True)
        ]
        return [tf.add_n(column) for column in zip(*pulled, strict=True)]

    def jvp(ts: Sequence[Tensor]) -> list[Tensor]:
        return [
            TENSORFLOW.push(leaves, ts, value)
            for value, leaves in zip(values, jacobians, strict=True)
        ]

    return vjp, jvp


def by_products(
    call: HostCall, at: Sequence[Tensor], points: Sequence[Tensor], values: Sequence[Tensor]
) -> list[Tensor]:
    """The values with the derivatives that `vjp`, `jvp` and `hessp` return on request."""
    gives = call.engine.gives

    def vjp(us: Sequence[Tensor]) -> list[Tensor]:
        return call.vjp(list(map(here, at)), us, points)

    def jvp(ts: Sequence[Tensor]) -> list[Tensor]:
        return call.jvp(list(map(here, at)), ts, values)

    return with_products(
        call, at, points, values, vjp if gives("vjp") else None, jvp if gives("jvp") else None
    )


def with_products(
    call: HostCall,
    at: Sequence[Tensor],
    points: Sequence[Tensor],
    values: Sequence[Tensor],
    vjp_of: Linear | None,
    jvp_of: Linear | None,
) -> list[Tensor]:
    """The values with the derivatives of these linear functions, and second ones by `hessp`.

    The products are linear, and the derivative of each along its vector is the other one. By the
    point, their derivative is the Hessian or unknown. Third derivatives are unknown.
    """
    name, n = call.spec.name, len(points)
    no_second = _NO_THIRD.format(name) if call.engine.gives_hessian else _no_second(call)

    def vjp(us: Sequence[Tensor], *, is_first: bool = True) -> list[Gradient]:
        if vjp_of is None:
            return list(unknown.failures(points, _no_gradient(call), us))
        has_second = is_first and call.engine.gives_hessian

        def pull(*zs: Tensor) -> list[Gradient]:
            by_points = second(us, zs) if has_second else unknown.failures(points, no_second, zs)
            return [*jvp(zs, is_first=False), *by_points]

        def push(*tangents: Tensor) -> list[Tangent]:
            along, moved = vjp(tangents[: len(us)], is_first=False), tangents[len(us) :]
            if has_second:
                return plus(along, second(us, moved))
            return unknown.unless_moving(no_second, along, moved, points)

        return list(keep(vjp_of(us), [*us, *points], Rule(name, pull, push)))

    def jvp(ts: Sequence[Tensor], *, is_first: bool = True) -> list[Tensor]:
        if jvp_of is None:
            message = _NO_JVP.format(name)
            return [unknown.failure(value, message, ts) for value in values]
        has_second = is_first and call.engine.gives_hessian

        def pull(*zs: Tensor) -> list[Gradient]:
            by_points = second(zs, ts) if has_second else unknown.failures(points, no_second, zs)
            return [*vjp(zs, is_first=False), *by_points]

        def push(*tangents: Tensor) -> list[Tangent]:
            along, moved = jvp(tangents[:n], is_first=False), tangents[n:]
            return unknown.unless_moving(_NO_TWICE.format(name), along, moved, points)

        return keep(jvp_of(ts), [*ts, *points], Rule(name, pull, push))

    def second(us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Gradient]:
        """The Hessian of the sum of `u * value`, times `v`."""
        no_third, others = _NO_THIRD.format(name), [*us, *points]

        def pull(*zs: Tensor) -> list[Gradient]:
            return [*second(us, zs), *unknown.failures(others, no_third, zs, vs)]

        def push(*tangents: Tensor) -> list[Tangent]:
            along, moved = second(us, tangents[:n]), tangents[n:]
            return unknown.unless_moving(no_third, along, moved, others)

        return list(keep(_second(us, vs), [*vs, *others], Rule(name, pull, push)))

    def _second(us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Tensor]:
        now = list(map(here, at))
        if not call.spec.value.is_number:
            return call.hessian_times(now, vs, us)
        (u,) = us
        return [p * tf.cast(as_high(u, p), p.dtype) for p in call.hessian_times(now, vs)]

    def pull(*us: Tensor) -> list[Gradient]:
        return vjp(us)

    def push(*ts: Tensor) -> list[Tangent]:
        return list(jvp(ts))

    rule = Rule(name, pull, _NO_JVP.format(name) if jvp_of is None else push)
    return keep(values, points, rule)


def _no_second(call: HostCall) -> str:
    """The error for a second derivative."""
    of_number = call.spec.value.is_number
    ways = [_HESSP if of_number else _HESSP_OF_SUM, *[_HESS] * of_number]
    if "grad" not in call.engine.schemes:
        ways.append('hess="3-point" for finite differences')
    return _NO_SECOND.format(call.spec.name, ", or ".join(ways))


def _no_gradient(call: HostCall) -> str:
    missing = _NO_VJP if call.engine.gives("jvp") else _NO_GRADIENT
    return missing.format(call.spec.name)


_NO_GRADIENT = (
    "{0} was asked for a gradient, but its engine has none, grad=False. Return (value, gradient), "
    'pass a function as grad= or vjp=, or grad="3-point" for finite differences; or use a sampler '
    "that needs no gradient, such as tfp.mcmc.RandomWalkMetropolis."
)

_NO_VJP = (
    "{0} was asked for a gradient, but its engine has only jvp=. Pass vjp=, a function of "
    "(*arrays, u) that returns the gradients of the sum of u times the value."
)

_NO_JVP = (
    "{0} was asked for a derivative in forward mode, or for a second derivative that needs one, "
    "but its engine has no jvp=. Pass jvp=, a function of (*arrays, t) that returns the tangent of "
    "the value."
)

_NO_SECOND = (
    "{0} was asked for a second derivative, but its engine gives only a value and its first "
    "derivatives. Pass {1}; from_jax and from_torch compute it themselves."
)
_HESSP = "hessp=, a function of (*arrays, v) that returns the Hessian times v"
_HESSP_OF_SUM = (
    "hessp=, a function of (*arrays, u, v) that returns the Hessian of the sum of u * value times v"
)
_HESS = "hess=, a function of (*arrays) that returns the Hessian"

_NO_TWICE = (
    "{0} was asked for a second derivative by forward mode over forward mode, which hessp= does "
    "not give. Use a tape for one of the two, inside or outside."
)

_NO_THIRD = (
    "{0} was asked for a third derivative, but its engine gives only a value and its first and "
    "second derivatives."
)
