"""Functions called where TensorFlow has silenced tapes, and recorded as one operation.

While an accumulator computes a JVP, no tape that is started then records anything, and a rule may
need one. So a function is traced in another thread. TensorFlow could differentiate the call, but it
derives all that might be asked for, and forward mode as the gradient of a gradient, which takes
several times as long. Here each derivative is traced when it is asked for, by its own mode.
"""

import types
from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments.structures import present, spread
from sgtrick._tensorflow import graphs, ongoing, tapes, tracing
from sgtrick._types import Function, Gradient, Tangent, Tensor


def call(f: Function, arguments: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns `f(*arguments)`, tensors and None, with derivatives of every order."""
    traced = tapes.in_thread(lambda: tracing.Traced(f, arguments))
    with tapes.not_recording():
        outputs = list(map(tf.identity, present(traced(arguments, traced.captured))))
    used = {id(t): t for t in [*present(arguments), *traced.captured]}.values()
    sources = [t for t in used if graphs.carries_derivatives(t) or graphs.holds_floats(t)]
    called = _Call(f, arguments, sources)
    tapes.record_override(outputs, list(map(graphs.as_used, sources)), called.pull, called.push)
    return spread(outputs, traced.outputs)


class _Call:
    """A call of a function, which is made again for each of its derivatives."""

    def __init__(
        self, f: Function, arguments: Sequence[Tensor | None], sources: Sequence[Tensor]
    ) -> None:
        """`sources` are the tensors, and the handles of variables, that it depends on."""
        self._f, self._arguments, self._sources = f, arguments, sources

    def _results(self) -> list[Tensor]:
        return list(map(tf.convert_to_tensor, present(self._f(*self._arguments))))

    def pull(self, *upstream: Tensor | None) -> list[Tensor | None]:
        """The gradients with respect to all sources, whichever were requested."""
        return call(self._gradients, upstream)

    def _gradients(self, *upstream: Tensor | None) -> list[Gradient]:
        with ongoing.not_raising():
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self._sources)
                ys = self._results()
            reached = [y for y, u in zip(ys, upstream, strict=True) if u is not None]
            return tape.gradient(reached, self._sources, present(upstream))  # type: ignore[no-any-return]

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """The tangents of the results."""
        return call(self._tangents, tangents)

    def _tangents(self, *tangents: Tangent) -> list[Tangent]:
        pairs = zip(self._sources, tangents, strict=True)
        moving = [_watchable(x, t) for x, t in pairs if t is not None]
        with tf.autodiff.ForwardAccumulator(moving, present(tangents)) as accumulator:
            ys = self._results()
        return [accumulator.jvp(y) for y in ys]


def _watchable(x: Tensor, tangent: Tensor) -> object:
    """What an accumulator takes for a tensor: something like a variable for a handle."""
    if x.dtype != tf.resource:
        return x
    return types.SimpleNamespace(handle=x, dtype=tangent.dtype)
