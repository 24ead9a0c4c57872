"""The JVP of a rule that only has a pullback: the transpose of the pullback, with a test."""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core import adjoint, unknown
from sgtrick._core.rule import Rule
from sgtrick._types import Gradient, Tangent, Tensor


def transposed(
    rule: Rule, ys: Sequence[Tensor], tangents: Sequence[Tangent], *, is_tested: bool = True
) -> list[Tangent]:
    """The transpose of the pullback at `tangents`, or if tested an error where it has none."""
    likes = structures.differentiable(ys)

    def pull(us: Sequence[Tensor]) -> Sequence[Gradient]:
        return rule.pull(*spread(us, likes))

    found, fits, of = adjoint.transpose(pull, present(likes), tangents)
    if is_tested:
        message = NOT_TRANSPOSED.format(rule.name)
        found = unknown.known_if(fits, message, found, present(likes), of)
    return spread(found, likes)


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which may be `tf.IndexedSlices`."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return tf.convert_to_tensor(gradient)


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """A gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part


NOT_TRANSPOSED = (
    "Forward mode transposes the gradient function of {0} by differentiating it with respect to "
    "the upstream gradient, and the result is not the transpose: a part of it is a host call, is "
    "stopped, or is not linear in the upstream gradient. Add a JVP rule, by defjvp of custom_vjp; "
    "or use sgtrick.custom_jvp, whose rule serves both modes, or reverse mode (tf.GradientTape)."
)
