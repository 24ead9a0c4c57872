"""Rules that are called in other graphs than the one in which the call was traced."""

import contextlib
import functools
from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._core.rule import Changed, Rule
from sgtrick._tensorflow import captures, graphs, ongoing, tracing
from sgtrick._types import Gradient, Pullback, Tensor


class Reachable(Changed):
    """The rule for the gradient of the graph being traced, which is another graph.

    What the rule closes over is found there, if this graph has captured it. A branch or the body of
    a loop is complete before it is differentiated, and a gradient knows nothing of the graph whose
    gradient it is. So what the rule may close over alone is captured now, by tracing it.
    """

    def __init__(self, rule: Rule, ys: Sequence[Tensor]) -> None:
        """The rule of outputs `ys`."""
        super().__init__(rule)
        self.push = rule.push
        pull, is_theirs = rule.pull, rule.is_of_caller
        is_closed = tracing.is_soon_closed() or (ongoing.is_for_graph() and is_theirs)
        if is_closed and not rule.is_reachable and ongoing.may_trace_pullbacks(of_caller=is_theirs):
            # Where the rule raises, its derivative does.
            with contextlib.suppress(Exception), ongoing.not_tracing_pullbacks(is_theirs):
                pull = _traced(rule.pull, ys)
        self._found = captures.from_here(pull)

    def pull(self, *upstream: Tensor | None) -> Sequence[Gradient]:
        """The gradients, in the graph that is being traced."""
        return self._found(*upstream)


def once(pull: Pullback, ys: Sequence[Tensor]) -> Pullback:
    """A pullback that is run once, as the caller's may have to be, if the graph is soon closed."""
    if tf.executing_eagerly() or not tracing.is_soon_closed() or not ongoing.may_trace_pullbacks():
        return pull
    graph = tf.compat.v1.get_default_graph()

    @functools.cache
    def traced() -> Pullback:
        with graph.as_default():
            return _traced(pull, ys)

    return lambda *us: traced()(*us)


def _traced(pull: Pullback, ys: Sequence[Tensor]) -> Pullback:
    """A pullback of `ys` as a function of the graph being traced."""
    live = structures.differentiable(ys)
    structure: list[Gradient] = []

    def flat(*us: Tensor | None) -> list[Tensor | None]:
        with ongoing.running(for_graph=True), ongoing.not_raising(), ongoing.transposing_nothing():
            structure[:] = pull(*us)
        return list(tf.nest.flatten(structure, expand_composites=True))  # slices stay slices

    traced = tracing.Traced(flat, live)
    captured = list(map(graphs.as_used, traced.captured))

    def call(*us: Tensor | None) -> list[Gradient]:
        # In loops of TensorFlow 1, an upstream gradient may be missing.
        given = [
            tf.zeros_like(y) if u is None and y is not None else u
            for u, y in zip(us, live, strict=True)
        ]
        found = traced(given, list(map(graphs.as_used, captured)))
        return list(tf.nest.pack_sequence_as(structure, found, expand_composites=True))

    return call
