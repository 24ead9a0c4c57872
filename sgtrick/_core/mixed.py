"""Mixed second derivatives of a value whose gradient is known for some arguments only.

With respect to the others, the value is differentiated at a fixed point, and nothing says how that
moves with the point. It moves as the known gradient does with the others: the Hessian is symmetric.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import adjoint
from sgtrick._core._tensorflow import here
from sgtrick._core.override import Rule, keep


def zeros(
    name: str,
    gradients: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    xs: Sequence[Any],
    others: Sequence[Any],
) -> list[Any]:
    """Zeros like `others`, whose derivative with respect to `xs` is that mixed part of a Hessian.

    Args:
        name: What errors call the function.
        gradients: From points and other arguments to the gradients with respect to the points.
        xs: The points.
        others: The other arguments.
    """
    xs, others = [here(x) for x in xs], [here(o) for o in others]

    def push(*tangents: Any) -> list[Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(others)
            pairs = [
                (g, tf.cast(t, g.dtype))
                for g, t in zip(gradients(xs, others), tangents, strict=True)
                if g is not None
            ]
        gs, ts = [g for g, _ in pairs], [t for _, t in pairs]
        found = tape.gradient(gs, others, output_gradients=ts)
        return [tf.zeros_like(o) if g is None else g for g, o in zip(found, others, strict=True)]

    def pull(*z: Any) -> list[Any]:
        ts = [adjoint.probe(x) for x in xs]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(ts)
            moved = push(*ts)
        found = tape.gradient(moved, ts, output_gradients=z)
        return [tf.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)]

    rule = Rule(name, pull, push, lost=[False] * len(xs))
    return keep([tf.zeros_like(o) for o in others], xs, rule)
