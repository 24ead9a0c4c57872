"""Rules under `tf.vectorized_map`: the pullback of one member, mapped.

The tensors that the pullback uses from the forward pass are found by tracing it, and replaced by
those of the batch.
"""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core import unknown
from sgtrick._core.rule import Rule
from sgtrick._core.transposed import transposed
from sgtrick._tensorflow import graphs, ongoing, pfor, tapes, tracing
from sgtrick._types import Gradient, Tangent, Tensor


def of_batch(
    rule: Rule,
    ys: Sequence[Tensor],
    inputs: Sequence[tuple[Tensor, bool]],
    batch: pfor.Vectorized,
) -> Rule:
    """The rule for all members.

    Args:
        rule: The rule of one member.
        ys: The outputs for all members.
        inputs: The inputs for all members, and whether each has a batch dimension.
        batch: The operation for all members.
    """
    live = structures.differentiable(batch.outputs[: len(ys)])

    def of_member(*us: Tensor | None) -> Sequence[Gradient]:
        with ongoing.not_raising(), ongoing.running(for_graph=True), ongoing.for_member():
            return rule.pull(*us)

    def trace() -> tracing.Traced:
        return tracing.Traced(of_member, live, batch.graph)

    try:
        # Accumulators would add their tangents to what is traced.
        member = tapes.in_thread(trace) if tapes.somebody_pushes() else trace()
    except Exception as error:  # whatever the caller's code raises: the derivative does, later
        return _Failing(rule.name, error)
    try:
        taken = map(batch.take, member.captured)
        captured = [(graphs.as_used(t), is_stacked) for t, is_stacked in taken]
    except pfor.OutOfReachError:
        return _OutOfReach(rule.name, [x for x, _ in inputs])
    return OfBatch(rule, ys, inputs, member, captured)


class OfBatch(Rule):
    """The rule of the outputs for all members: the pullback of one member, mapped."""

    def __init__(
        self,
        rule: Rule,
        ys: Sequence[Tensor],
        inputs: Sequence[tuple[Tensor, bool]],
        member: tracing.Traced,
        captured: Sequence[tuple[Tensor, bool]],
    ) -> None:
        """The rule of a batch.

        Args:
            rule: That of one member.
            ys: The outputs.
            inputs: The inputs, and whether each has a batch dimension.
            member: The pullback of one member.
            captured: What that has captured, likewise.
        """
        self.name = rule.name
        self._ys, self._inputs, self._member, self._captured = ys, inputs, member, captured
        # A rule's own JVP is not mapped: the transpose of the pullback is the same.
        self.push = rule.push
        if callable(rule.push):
            self.push = None if rule.transposes else self._transposed

    def pull(self, *upstream: Tensor) -> list[Gradient]:
        """The gradients of all members; of what they share, the sum."""
        # The derivative of a reshape is dense. Where the size is unknown or one, TensorFlow gathers
        # what is mapped, and cannot differentiate the slices again.
        us = [
            u if u.shape.is_fully_defined() and u.shape[0] > 1 else tf.reshape(u, tf.shape(u))
            for u, y in zip(upstream, self._ys, strict=True)
            if structures.is_differentiable(y.dtype)
        ]
        with ongoing.not_raising():
            mapped = pfor.over_members(lambda *at: present(self._member(*at)), us, self._captured)
        gradients = spread(mapped, self._member.outputs)
        for i, (g, (x, is_stacked)) in enumerate(zip(gradients, self._inputs, strict=True)):
            if g is not None:
                g = g if is_stacked else tf.cast(tf.reduce_sum(structures.for_sums(g), 0), g.dtype)
                g.set_shape(x.shape)
                gradients[i] = g
        return gradients

    def _transposed(self, *tangents: Tangent) -> list[Tangent]:
        return transposed(self, self._ys, tangents, is_tested=False)


class _Failing(Rule):
    """A rule that raises the error with which it could not be traced."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error

    def pull(self, *_: Tensor | None) -> list[Gradient]:
        raise self._error


class _OutOfReach(Rule):
    """A rule that raises an error when the batched outputs are differentiated."""

    def __init__(self, name: str, xs: Sequence[Tensor]) -> None:
        self.name, self._xs, self.push = name, xs, _OUT_OF_REACH.format(name)

    def pull(self, *upstream: Tensor | None) -> list[Gradient]:
        return unknown.gradients(self._xs, _OUT_OF_REACH.format(self.name), present(upstream))


_OUT_OF_REACH = (
    "{0} cannot be mapped by tf.vectorized_map here: it is called in a function within the mapped "
    "one, such as a tf.function or the gradient function of another form, and its own gradient "
    "function closes over a tensor that was computed outside of that function. Pass this tensor to "
    "{0} as an argument, or map with tf.map_fn."
)
