"""The JVP of a rule that only has a pullback: the transpose of the pullback, with a test."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._core import adjoint, loud, structures
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core.absent import present, spread
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Graph, Pullback, Pushforward, Tangent, Tensor

# Tensors, and as many others of the same dtypes.
Paired = tuple[list[Tensor], list[Tensor]]


def transposed(rule: Rule, ys: Sequence[Tensor], tangents: Sequence[Tangent]) -> list[Tangent]:
    """The transpose of the pullback at `tangents`, or an error if it has none."""
    likes = [y if structures.is_differentiable(y.dtype) else None for y in ys]

    def pull(us: Sequence[Tensor]) -> Paired:
        return paired(rule.pull(*spread(us, likes)), tangents)

    found, fits, (gs, ts) = transpose(pull, present(likes))
    # Not of what is far, which may overflow.
    zero = loud.zero_if(fits, _MESSAGE.format(rule.name), [*gs, *ts])
    return spread([t + tf.cast(zero, t.dtype) for t in found], likes)


def transpose(
    pull: Callable[[Sequence[Tensor]], Paired], likes: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Paired]:
    """The transpose of a linear function, and whether it is one.

    Args:
        pull: Returns the results of the function, and the cotangents at which to transpose it.
        likes: Tensors like its arguments.

    Returns:
        The transpose; whether the dot-product test holds; what `pull` returned in the test.
    """
    us, far = adjoint.probes(likes), adjoint.far_probes(likes)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(far)
        gs, ts = pull(far)
    gradients = tape.gradient(gs, far, output_gradients=ts) if gs else [None] * len(far)
    pairs = zip(gradients, us, strict=True)
    found = [tf.zeros_like(u) if g is None else tf.convert_to_tensor(g) for g, u in pairs]
    gs, ts = pull(us)
    return found, adjoint.holds(gs, ts, found, us), (gs, ts)


def checked(
    rule: Rule,
    gradients: Sequence[Gradient],
    upstream: Sequence[Tensor | None],
    pass_on: Callable[..., Tensor],
) -> list[Gradient]:
    """The gradients of a function as a whole, with an error if they are transposed and cannot be.

    Forward mode around a function transposes its gradient.

    Args:
        rule: The rule.
        gradients: What its pullback returned, in the graph being traced.
        upstream: The upstream gradients that they were computed from.
        pass_on: `override.pass_on`.
    """
    us = present(upstream)

    def guarded(i: int, g: Gradient) -> Gradient:
        def derivatives(part: Tensor, at: Sequence[Tensor]) -> tuple[Pullback, Pushforward]:
            def pull(z: Tensor) -> list[Gradient]:
                if isinstance(rule.push, str):
                    fits, message = tf.constant(False), rule.push
                else:
                    fits, message = _fits(rule, i, upstream, part.graph, z), _MESSAGE
                zero = loud.zero_if(fits, message.format(rule.name), [z, *at])
                return [z, *(tf.zeros_like(u) + tf.cast(zero, u.dtype) for u in at)]

            return pull, lambda along, *_: [along]

        return with_values(g, pass_on(values_of(g), us, derivatives))

    return [None if g is None else guarded(i, g) for i, g in enumerate(gradients)]


def _fits(rule: Rule, i: int, upstream: Sequence[Tensor | None], graph: Graph, z: Tensor) -> Tensor:
    """Whether gradient `i` of a rule, which is in a graph, can be transposed for a cotangent."""

    def fits(z: Tensor) -> list[Tensor]:
        def pull(us: Sequence[Tensor]) -> Paired:
            gradient = rule.pull(*spread(us, upstream))[i]
            return paired([None if gradient is None else values_of(gradient)], [z])

        with loud.not_raising():
            _, holds, _ = transpose(pull, present(upstream))
        return [holds]

    # What the rule uses is only known in its graph, to which nothing may be added any more: as long
    # as that happens, TensorFlow differentiates it anew.
    traced = tapes.apart(lambda: tracing.Traced(fits, tracing.specs_of([z]), graph))
    with graph.as_default():
        captured = list(map(graphs.as_used, traced.captured))
    with tapes.not_recording():
        (holds,) = traced([z], captured)
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


def paired(some: Sequence[Gradient], others: Sequence[Tensor | None]) -> Paired:
    """The pairs without None, as tensors of one dtype: such as gradients and tangents."""
    pairs = [
        (tf.convert_to_tensor(a), b)  # IndexedSlices, for a table that is gathered from
        for a, b in zip(some, others, strict=True)
        if a is not None and b is not None
    ]
    return [a for a, _ in pairs], [tf.cast(b, a.dtype) for a, b in pairs]


_MESSAGE = (
    "Forward mode transposes the gradient function of {0} by differentiating it with respect to "
    "the upstream gradient, and the result is not the transpose: a part of it is a host call, is "
    "stopped, or is not linear in the upstream gradient. Use sgtrick.custom_jvp, whose rule serves "
    "forward mode, or use reverse mode (tf.GradientTape)."
)
