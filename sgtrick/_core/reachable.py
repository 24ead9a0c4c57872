"""Rules that are called in other graphs than the one in which the call was traced."""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._core.rule import Changed, Rule
from sgtrick._tensorflow import graphs, ongoing, reach, tracing
from sgtrick._types import Gradient, Pullback, Tensor


class Reachable(Changed):
    """The rule for the gradient of the graph being traced, which is another graph.

    What the rule closes over is found there, if this graph has captured it. A branch or the body of
    a loop is complete before it is differentiated, and a gradient knows nothing of the graph whose
    gradient it is. So what the rule may close over alone is captured now.
    """

    def __init__(self, rule: Rule, ys: Sequence[Tensor]) -> None:
        """The rule of outputs `ys`."""
        super().__init__(rule)
        is_closed = tracing.is_soon_closed() or (ongoing.is_for_graph() and rule.is_of_caller)
        if is_closed and not ongoing.is_probing():
            # Where the rule raises, its derivative does.
            with contextlib.suppress(Exception):
                for t in tracing.Outline(self._probed, _live(ys)).captured:
                    graphs.as_used(t)
        self._found = reach.from_here(rule.pull)

    def pull(self, *upstream: Tensor | None) -> Sequence[Gradient]:
        """The gradients, in the graph that is being traced."""
        return self._found(*upstream)

    def _probed(self, *upstream: Tensor | None) -> Sequence[Gradient]:
        with (
            ongoing.running(for_graph=True),
            ongoing.not_raising(),
            ongoing.probing(),
            ongoing.transposing_nothing(),
        ):
            return self._rule.pull(*upstream)


def once(pull: Pullback, ys: Sequence[Tensor]) -> Pullback:
    """A pullback that is run once, as the caller's may have to be, if the graph is soon closed."""
    if tf.executing_eagerly() or not tracing.is_soon_closed() or ongoing.is_probing():
        return pull
    live = _live(ys)

    def run(*us: Tensor | None) -> Sequence[Gradient]:
        with ongoing.running(for_graph=True), ongoing.not_raising():
            return pull(*us)

    function = tracing.traced_once(run, live)

    def call(*us: Tensor | None) -> list[Gradient]:
        # In loops of TensorFlow 1, an upstream gradient may be missing.
        given = [
            tf.zeros_like(y) if u is None and y is not None else u
            for u, y in zip(us, live, strict=True)
        ]
        return list(function(*given))

    return call


def _live(ys: Sequence[Tensor]) -> list[Tensor | None]:
    """The outputs that have derivatives, and None in place of others."""
    return [y if structures.is_differentiable(y.dtype) else None for y in ys]
