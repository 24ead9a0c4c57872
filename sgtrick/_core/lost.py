"""Whether TensorFlow can differentiate a gradient again, and what is said where it cannot."""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._core import ancestry
from sgtrick._core._tensorflow import tracing
from sgtrick._core.absent import present, spread
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Tensor


def message(name: str) -> str:
    """What is said where a gradient cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, and TensorFlow sees no connection from "
        "the gradient to the point: it was computed by a host call or by NumPy, was stopped, or "
        "does not depend on the point. If it is a constant, add 0 * x to it, which says so. "
        "Otherwise make it of TensorFlow's operations, or give the call its own gradient by one of "
        "sgtrick's forms."
    )


def is_lost(gradient: Tensor, sources: Sequence[Tensor], us: Sequence[Tensor]) -> bool:
    """Whether a gradient in a graph cannot be differentiated, and is not made of `us` alone."""
    connected = ancestry.is_connected(gradient, sources, us)
    return not connected and not ancestry.is_made_of(gradient, us)


def is_constant(rule: Rule, us: Sequence[Tensor | None], place: int) -> bool:
    """Whether a gradient is made of the upstream gradient alone, as that of a linear function."""
    at = present(us)

    def gradient(*upstream: Tensor) -> Tensor:
        return values_of(rule.pull(*spread(upstream, us))[place])

    try:
        graph = tracing.trace(gradient, tracing.specs_of(at)).graph
    except Exception:  # what cannot be traced looks at numbers
        return False
    return ancestry.is_made_of(graph.outputs[0], graph.inputs[: len(at)])


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient that may be slices."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """The same gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part
