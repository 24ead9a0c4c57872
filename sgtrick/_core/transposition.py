"""The JVP of a rule that only has a pullback: the transpose of the pullback, with a test."""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._core import adjoint, loud, structures
from sgtrick._core.absent import present
from sgtrick._core.rule import Rule
from sgtrick._core.types import Tangent, Tensor


def transposed(rule: Rule, ys: Sequence[Tensor], tangents: Sequence[Tangent]) -> list[Tangent]:
    """The transpose of the pullback at `tangents`, or an error if it has none."""
    us = [adjoint.probe(y) if structures.is_differentiable(y.dtype) else None for y in ys]
    at = present(us)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(at)
        gradients = rule.pull(*us)
        pairs = [
            (tf.convert_to_tensor(g), t)
            for g, t in zip(gradients, tangents, strict=True)
            if g is not None and t is not None
        ]
    gs, ts = [g for g, _ in pairs], [tf.cast(t, g.dtype) for g, t in pairs]
    found = tape.gradient(gs, at, output_gradients=ts) if gs else [None] * len(at)
    fits = adjoint.holds(gs, ts, found, at)
    if gs:  # a rule that clips may be linear at the tested upstream gradients
        larger = rule.pull(*(None if u is None else _MANY * u for u in us))
        ls = [tf.convert_to_tensor(g) for g in present(larger)]
        fits &= adjoint.is_multiple(ls, gs, _MANY)
    zero = loud.zero_if(fits, not_transposed(rule.name), [*gs, *ts])
    pushed = iter(found)
    return [None if u is None else _plus(next(pushed), zero, u) for u in us]


_MANY = 1024  # a power of two, so that scaling does not round


def _plus(tangent: Tangent, zero: Tensor, like: Tensor) -> Tensor:
    tangent = tf.zeros_like(like) if tangent is None else tangent
    return tangent + tf.cast(zero, tangent.dtype)


def not_transposed(name: str) -> str:
    """The error for a pullback that has no transpose."""
    return (
        f"Forward mode transposes the gradient function of {name} by differentiating it with "
        "respect to the upstream gradient, and the result is not the transpose: a part of it is a "
        "host call, is stopped, or is not linear in the upstream gradient. Use sgtrick.custom_jvp, "
        "whose rule serves forward mode, or use reverse mode (tf.GradientTape)."
    )
