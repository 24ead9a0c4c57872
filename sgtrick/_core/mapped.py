"""An override under `tf.vectorized_map`: the override of the batch, with the mapped pullback.

The tensors that the pullback uses from the forward pass are found by tracing it, and replaced by
those of the batch.
"""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core import unknown
from sgtrick._core.rule import Rule, running
from sgtrick._core.transposition import transposed
from sgtrick._tensorflow import graphs, mapping, tapes, tracing
from sgtrick._types import Gradient, Tangent, Tensor


def of_batch(
    rule: Rule, count: int, batch: mapping.Vectorized
) -> tuple[list[Tensor], list[Tensor], Rule]:
    """The outputs for all members, the inputs, and the rule for the batch.

    Args:
        rule: The rule of one member.
        count: The number of outputs, which are the first inputs of its operation.
        batch: The operation for all members.
    """
    # None for outputs without derivatives.
    live = [y if structures.is_differentiable(y.dtype) else None for y in batch.outputs[:count]]
    ys = [t if is_stacked else batch.stack(t) for t, is_stacked in batch.inputs[:count]]
    inputs = batch.inputs[count:]
    xs = [x for x, _ in inputs]

    def of_member(*us: Tensor | None) -> Sequence[Gradient]:
        with unknown.not_raising(), running(for_graph=True), mapping.for_member():
            return rule.pull(*us)

    def trace() -> tracing.Traced:
        return tracing.Traced(of_member, live, batch.graph)

    try:
        # Accumulators would add their tangents to what is traced.
        member = tapes.in_thread(trace) if tapes.somebody_pushes() else trace()
    except Exception as error:  # whatever the caller's code raises: the derivative does, later
        return ys, xs, _failing(rule.name, error)
    try:
        taken = map(batch.take, member.captured)
        captured = [(graphs.as_used(t), is_stacked) for t, is_stacked in taken]
    except mapping.OutOfReachError:
        return ys, xs, _out_of_reach(rule.name, xs)

    def pull(*upstream: Tensor) -> list[Gradient]:
        live_us = [u for u, y in zip(upstream, live, strict=True) if y is not None]
        # The derivative of a reshape is dense. Where the size is unknown or one, TensorFlow gathers
        # what is mapped, and cannot differentiate the slices again.
        is_gathered = [not u.shape.is_fully_defined() or u.shape[0] == 1 for u in live_us]
        pairs = zip(live_us, is_gathered, strict=True)
        us = [tf.reshape(u, tf.shape(u)) if is_so else u for u, is_so in pairs]
        with unknown.not_raising():
            mapped = mapping.over_members(lambda *at: present(member(*at)), us, captured)
        gradients = spread(mapped, member.outputs)
        for i, (g, (x, is_stacked)) in enumerate(zip(gradients, inputs, strict=True)):
            if g is not None:
                g = g if is_stacked else tf.cast(tf.reduce_sum(structures.wide(g), 0), g.dtype)
                g.set_shape(x.shape)
                gradients[i] = g
        return gradients

    def transpose(*tangents: Tangent) -> list[Tangent]:
        return transposed(Rule(rule.name, pull), ys, tangents, is_tested=False)

    push = rule.push
    if callable(push):  # not mapped itself: the transpose of the pullback is the same
        push = None if rule.transposes else transpose
    return ys, xs, Rule(rule.name, pull, push, is_local=True)


def _failing(name: str, error: Exception) -> Rule:
    """A rule that raises the error with which it could not be traced."""

    def pull(*_: Tensor | None) -> list[Gradient]:
        raise error

    return Rule(name, pull)


def _out_of_reach(name: str, xs: Sequence[Tensor]) -> Rule:
    """A rule that raises an error when the batched outputs are differentiated."""
    message = (
        f"{name} cannot be mapped by tf.vectorized_map here: it is called in a function within the "
        "mapped one, such as a tf.function or the gradient function of another form, and its own "
        "gradient function closes over a tensor that was computed outside of that function. Pass "
        f"this tensor to {name} as an argument, or map with tf.map_fn."
    )

    def pull(*upstream: Tensor | None) -> list[Gradient]:
        return unknown.failures(xs, message, present(upstream))

    return Rule(name, pull, message)
