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

Gradients = Callable[[Any, Sequence[Any], Sequence[Any]], Sequence[Any]]


def zeros(
    name: str, gradients: Gradients, upstream: Any, xs: Sequence[Any], others: Sequence[Any]
) -> list[Any]:
    """Zeros like `others`, whose derivative with respect to `xs` is that mixed part of a Hessian.

    For reverse mode, to be added to the gradients with respect to `others`.

    Args:
        name: What errors call the function.
        gradients: From an upstream gradient, points and other arguments to the gradients with
            respect to the points.
        upstream: The upstream gradient.
        xs: The points.
        others: The other arguments.
    """
    upstream, xs, others = here(upstream), [here(x) for x in xs], [here(o) for o in others]

    def push(*tangents: Any) -> list[Any]:
        return _by_others(gradients, upstream, xs, others, tangents)

    def pull(*z: Any) -> list[Any]:
        return _along_others(gradients, upstream, xs, others, z)

    rule = Rule(name, pull, push, lost=[False] * len(xs))
    return keep([tf.zeros_like(o) for o in others], xs, rule)


def tangent(
    name: str,
    gradients: Gradients,
    y: Any,
    xs: Sequence[Any],
    others: Sequence[Any],
    tangents: Sequence[Any],
) -> Any:
    """A zero like the value `y`, whose derivative with respect to `xs` is that mixed part.

    For forward mode, to be added to the tangent of `y` along `tangents` of `others`.
    """
    xs, others = [here(x) for x in xs], [here(o) for o in others]
    tangents = [here(t) for t in tangents]

    def pull(upstream: Any) -> list[Any]:
        return _along_others(gradients, upstream, xs, others, tangents)

    return keep([tf.zeros_like(y)], xs, Rule(name, pull, lost=[False] * len(xs)))[0]


def _by_others(
    gradients: Gradients, upstream: Any, xs: Any, others: Any, weights: Sequence[Any]
) -> list[Any]:
    """The gradient of `<gradients, weights>` with respect to `others`."""
    # What a graph captured before is not recorded when it is used again.
    xs, others = [here(x) for x in xs], [here(o) for o in others]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(others)
        pairs = [
            (g, tf.cast(w, g.dtype))
            for g, w in zip(gradients(upstream, xs, others), weights, strict=True)
            if g is not None
        ]
    gs, ws = [g for g, _ in pairs], [w for _, w in pairs]
    found = tape.gradient(gs, others, output_gradients=ws)
    return [tf.zeros_like(o) if g is None else g for g, o in zip(found, others, strict=True)]


def _along_others(
    gradients: Gradients, upstream: Any, xs: Any, others: Any, tangents: Sequence[Any]
) -> list[Any]:
    """The derivative of the gradients along tangents of `others`: the transpose of `_by_others`."""
    weights = [adjoint.probe(x) for x in xs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weights)
        pulled = _by_others(gradients, upstream, xs, others, weights)
    found = tape.gradient(pulled, weights, output_gradients=list(tangents))
    return [tf.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)]
