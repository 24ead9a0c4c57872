"""Whether TensorFlow can differentiate a gradient again, and the message if it cannot."""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._core import ancestry
from sgtrick._core._tensorflow import tracing
from sgtrick._core.absent import present, spread
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Tensor


def message(name: str) -> str:
    """The error for a gradient that cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, but TensorFlow sees no connection from "
        "the gradient to the point: it was computed by a host call or by NumPy, was stopped, or "
        "does not depend on the point. If it really is a constant, add 0 * x to it. Otherwise "
        "compute it from TensorFlow ops, or give the host call its own gradient with one of "
        "sgtrick's functions."
    )


def is_lost(gradient: Tensor, sources: Sequence[Tensor], us: Sequence[Tensor]) -> bool:
    """Whether a gradient in a graph depends on more than `us`, but cannot be differentiated."""
    connected = ancestry.is_connected(gradient, sources, us)
    return not connected and not ancestry.is_made_of(gradient, us)


def is_constant(rule: Rule, us: Sequence[Tensor | None], place: int) -> bool:
    """Whether a gradient depends on the upstream gradient alone, like that of a linear function."""
    at = present(us)

    def gradient(*upstream: Tensor) -> Tensor:
        return values_of(rule.pull(*spread(upstream, us))[place])

    try:
        graph = tracing.trace(gradient, tracing.specs_of(at)).graph
    except Exception:  # a rule that cannot be traced may depend on anything
        return False
    return ancestry.is_made_of(graph.outputs[0], graph.inputs[: len(at)])


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which may be `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """The same gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part
