"""The JVP of a rule that only has a pullback: the transpose of the pullback, with a test."""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core import adjoint, unknown
from sgtrick._core.rule import Rule
from sgtrick._tensorflow import graphs, linear, overrides, tapes, tracing
from sgtrick._types import Gradient, Graph, Pullback, Pushforward, Tangent, Tensor


def transposed(
    rule: Rule, ys: Sequence[Tensor], tangents: Sequence[Tangent], *, is_tested: bool = True
) -> list[Tangent]:
    """The transpose of the pullback at `tangents`, or if tested an error where it has none."""
    likes = [y if structures.is_differentiable(y.dtype) else None for y in ys]

    def pull(us: Sequence[Tensor]) -> Sequence[Gradient]:
        return rule.pull(*spread(us, likes))

    found, fits, of = adjoint.transpose(pull, present(likes), tangents)
    if is_tested:
        message = _MESSAGE.format(rule.name)
        found = unknown.known_if(fits, message, found, present(likes), of)
    return spread(found, likes)


def tested(
    rule: Rule,
    gradients: Sequence[Gradient],
    upstream: Sequence[Tensor | None],
) -> list[Gradient]:
    """The gradients of a function as a whole, with an error if they are transposed and cannot be.

    Forward mode around a function transposes its gradient.

    Args:
        rule: The rule.
        gradients: What its pullback returned, in the graph being traced.
        upstream: The upstream gradients that they were computed from.
    """
    us = present(upstream)
    if overrides.is_storing():
        operations = tf.compat.v1.get_default_graph().get_operations()
        if linear.are_linear(list(map(values_of, present(gradients))), us, operations):
            return list(gradients)

    def guarded(i: int, g: Gradient) -> Gradient:
        def derivatives(part: Tensor, at: Sequence[Tensor]) -> tuple[Pullback, Pushforward]:
            def pull(z: Tensor) -> list[Gradient]:
                if isinstance(rule.push, str):
                    fits, message = tf.constant(False), rule.push
                else:
                    fits, message = _fits(rule, i, upstream, part.graph), _MESSAGE
                zero = unknown.zero_if(fits, message.format(rule.name), [z, *at])
                return [z, *(tf.zeros_like(u) + tf.cast(zero, u.dtype) for u in at)]

            return pull, lambda along, *_: [along]

        return with_values(g, unknown.pass_on(values_of(g), us, derivatives))

    return [None if g is None else guarded(i, g) for i, g in enumerate(gradients)]


def _fits(rule: Rule, i: int, upstream: Sequence[Tensor | None], graph: Graph) -> Tensor:
    """Whether gradient `i` of a rule, which is in a graph, can be transposed."""

    def fits() -> list[Tensor]:
        def pull(us: Sequence[Tensor]) -> list[Gradient]:
            gradients = list(rule.pull(*spread(us, upstream)))
            # The size of the others tells what is rounding.
            first = [gradients.pop(i), *gradients]
            return [None if g is None else values_of(g) for g in first]

        with unknown.not_raising():
            _, holds, _ = adjoint.transpose(pull, present(upstream), None, of_first=True)
        return [holds]

    # What the rule uses is only known in its graph, to which nothing may be added any more: as long
    # as that happens, TensorFlow differentiates it anew.
    traced = tapes.in_thread(lambda: tracing.Traced(fits, [], graph))
    with graph.as_default():
        captured = list(map(graphs.as_used, traced.captured))
    with tapes.not_recording():
        (holds,) = traced([], captured)
    return holds


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which may be `tf.IndexedSlices`."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return tf.convert_to_tensor(gradient)


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """The same gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part


_MESSAGE = (
    "Forward mode transposes the gradient function of {0} by differentiating it with respect to "
    "the upstream gradient, and the result is not the transpose: a part of it is a host call, is "
    "stopped, or is not linear in the upstream gradient. Add a JVP rule, by defjvp of custom_vjp; "
    "or use sgtrick.custom_jvp, whose rule serves both modes, or reverse mode (tf.GradientTape)."
)
