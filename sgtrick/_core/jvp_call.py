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

    def again() -> list[Tensor]:
        return list(map(tf.convert_to_tensor, present(f(*arguments))))

    def pull(*upstream: Tensor | None) -> list[Gradient]:
        def gradients(*us: Tensor | None) -> list[Gradient]:
            # With respect to all sources, whichever were requested.
            with ongoing.not_raising():
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    ys = again()
                reached = [y for y, u in zip(ys, us, strict=True) if u is not None]
                return tape.gradient(reached, sources, present(us))  # type: ignore[no-any-return]

        return call(gradients, upstream)

    def push(*tangents: Tangent) -> list[Tangent]:
        def pushed(*ts: Tangent) -> list[Tangent]:
            moving = [_watchable(x, t) for x, t in zip(sources, ts, strict=True) if t is not None]
            with tf.autodiff.ForwardAccumulator(moving, present(ts)) as accumulator:
                ys = again()
            return [accumulator.jvp(y) for y in ys]

        return call(pushed, tangents)

    tapes.record_override(outputs, [graphs.as_used(t) for t in sources], pull, push)
    return spread(outputs, traced.outputs)


def _watchable(x: Tensor, tangent: Tensor) -> object:
    """What an accumulator takes for a tensor: something like a variable for a handle."""
    if x.dtype != tf.resource:
        return x
    return types.SimpleNamespace(handle=x, dtype=tangent.dtype)
