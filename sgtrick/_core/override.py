"""The kept override: outputs whose derivatives are those of a rule, however they were computed.

TensorFlow drops overrides in forward mode inside a graph and in `tf.vectorized_map`. Both can be
prevented: accumulators are given the JVP itself, and the operation comes with its own rule for
`tf.vectorized_map`, which overrides the batched outputs again, with the mapped pullback.

The pullback runs only when a gradient is requested. It may be anything: nonlinear, a host call, a
loop, stateful. TensorFlow differentiates what it returns like everything else.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import devices, structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core import adjoint, jvp_call, mapped, unknown
from sgtrick._core.rule import Rule, for_later, in_addition, is_for_graph, running
from sgtrick._core.transposition import NOT_TRANSPOSED, transposed, values_of, with_values
from sgtrick._tensorflow import graphs, linear, mapping, overrides, reach, tapes, tracing
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Gradient, Graph, Pullback, Pushforward, Tangent, Tensor


@unconverted
def keep(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    rule: Rule,
    if_lost: Sequence[Tensor] | None = None,
    *,
    in_graph: bool = True,
) -> list[Tensor]:
    """Returns `ys`, to the last bit, with the derivatives of a rule with respect to `xs`.

    Args:
        ys: Tensors. Nothing else that they depend on gets a gradient: to keep the derivatives of
            `ys` themselves, pass them among `xs` too. If no `xs` have derivatives, or if nobody
            records, they are returned as they are.
        xs: Tensors.
        rule: The derivatives.
        if_lost: The same values, by operations whose own derivatives are right to first order, for
            transformations that drop overrides from a stored model. Without it, these raise.
        in_graph: Whether a graph keeps the override. If not, tapes and accumulators within it use
            the rule, and everything else uses `if_lost`.
    """
    ys, xs = list(ys), list(xs)
    if not any(structures.is_differentiable(x.dtype) for x in xs):
        return ys
    if tf.executing_eagerly():
        if not tapes.somebody_records():
            return ys
        with tapes.not_recording():
            outputs = [tf.raw_ops.Identity(input=y) for y in ys]
    else:
        # A tensor from outside is captured, and recorded as such, before recording is suspended.
        ys, xs = [here(y) for y in ys], [here(x) for x in xs]
        carried = rule if _counts_as_connected(rule) else _reachable(rule, ys)
        outputs = _outputs(ys, xs, rule, carried, if_lost, in_graph)
    tapes.record_override(
        outputs,
        xs,
        lambda *upstream: _pull(rule, ys, xs, upstream),
        lambda *tangents: _push(rule, ys, tangents),
    )
    return outputs


def with_transpose(rule: Rule, push: Pushforward, xs: Sequence[Tensor]) -> Rule:
    """The same rule with a pushforward, which is also the derivative by upstream gradients.

    Around a function, and around `tf.vectorized_map`, forward mode is that derivative. `xs` are the
    inputs: where the rule returns None, their gradient is zero, so that their tangents count.
    """

    def filled(*upstream: Tensor | None) -> list[Gradient]:
        return [
            tf.zeros_like(x) if g is None and structures.is_differentiable(x.dtype) else g
            for g, x in zip(rule.pull(*upstream), xs, strict=True)
        ]

    def pull(*upstream: Tensor | None) -> list[Gradient]:
        us = present(upstream)
        found = filled(*spread(list(map(tf.stop_gradient, us)), upstream))
        gradients = list(map(tf.convert_to_tensor, present(found)))  # not slices

        def pull_back(*zs: Tensor) -> list[Gradient]:
            moved = push(*spread(zs, found))
            return [t for t, u in zip(moved, upstream, strict=True) if u is not None]

        def push_on(*ts: Tensor) -> list[Tangent]:
            return present(filled(*spread(ts, upstream)))

        transpose = in_addition(Rule(rule.name, pull_back, push_on), len(gradients))
        return spread(keep(gradients, [*gradients, *us], transpose), found)

    return rule._replace(pull=pull, push=push)


def _reachable(rule: Rule, ys: Sequence[Tensor]) -> Rule:
    """The rule for the gradient of the graph being traced, which is another graph.

    What the rule closes over is found there, if this graph has captured it. A branch or the body of
    a loop is complete before it is differentiated, and a gradient knows nothing of the graph whose
    gradient it is. So what the rule may close over alone is captured now.
    """
    is_closed = tracing.is_soon_closed() or (is_for_graph() and rule.is_of_caller)
    if is_closed and not graphs.is_asking():

        def run(*us: Tensor | None) -> Sequence[Gradient]:
            with running(for_graph=True), unknown.not_raising(), graphs.thrown_away(), for_later():
                return rule.pull(*us)

        # Where the rule raises, its derivative does.
        with contextlib.suppress(Exception):
            for t in tracing.Outline(run, _live(ys)).captured:
                graphs.as_used(t)
    return rule._replace(pull=reach.from_here(rule.pull))


def once(pull: Pullback, ys: Sequence[Tensor]) -> Pullback:
    """A pullback that is run once, as the caller's may have to be, if the graph is soon closed."""
    if tf.executing_eagerly() or not tracing.is_soon_closed() or graphs.is_asking():
        return pull
    live = _live(ys)

    def run(*us: Tensor | None) -> Sequence[Gradient]:
        with running(for_graph=True), unknown.not_raising():
            return pull(*us)

    function = tracing.traced_once(run, live)

    def call(*us: Tensor | None) -> list[Gradient]:
        pairs = zip(us, live, strict=True)
        # In loops of TensorFlow 1, an upstream gradient may be missing.
        return list(
            function(*(tf.zeros_like(y) if u is None and y is not None else u for u, y in pairs))
        )

    return call


def _live(ys: Sequence[Tensor]) -> list[Tensor | None]:
    """The outputs that have derivatives, and None in place of others."""
    return [y if structures.is_differentiable(y.dtype) else None for y in ys]


def _outputs(
    ys: list[Tensor],
    xs: list[Tensor],
    rule: Rule,
    carried: Rule,
    if_lost: Sequence[Tensor] | None,
    in_graph: bool,
) -> list[Tensor]:
    """The outputs in a graph, not recorded by any tape.

    `carried` is the rule for other graphs.
    """
    if not in_graph:
        with tapes.not_recording():
            return [tf.identity(y) for y in if_lost or ys]
    meaning = overrides.Override(
        lambda *upstream: _pull_for_graph(rule, carried, ys, xs, upstream),
        lambda batch: _vectorized(carried, len(ys), batch),
        is_connected=_counts_as_connected(rule),
    )
    dropped = _DROPPED.format(rule.name)
    if_lost = if_lost or [
        mapping.unconvertible(y, dropped) if structures.is_differentiable(y.dtype) else y
        for y in ys
    ]
    outputs = overrides.override(if_lost, xs, meaning)
    for output, y in zip(outputs, ys, strict=True):
        output.set_shape(y.shape)
    return outputs


_DROPPED = (
    "TensorFlow dropped the gradient of {0}: a tf.vectorized_map over a loop is differentiated in "
    "forward mode; or a loaded SavedModel is mapped by tf.vectorized_map, or was saved with "
    "experimental_custom_gradients=False. Call the map in a tf.function; or map with tf.map_fn, or "
    "save with experimental_custom_gradients=True."
)


def _pull(
    rule: Rule, ys: Sequence[Tensor], xs: Sequence[Tensor], upstream: Sequence[Gradient]
) -> list[Gradient]:
    """Calls the pullback on the device of the outputs."""
    if _counts_as_connected(rule):
        return _connected(ys, xs, _dense(ys, upstream))
    with running(), devices.of(ys[0]):
        return list(rule.pull(*_dense(ys, upstream)))


def _counts_as_connected(rule: Rule) -> bool:
    """Whether it is only asked what is connected, and a guard of the rule's own tells the rest."""
    return rule.is_guarded and graphs.is_thrown_away()


def _connected(
    ys: Sequence[Tensor], xs: Sequence[Tensor], us: Sequence[Tensor | None]
) -> list[Gradient]:
    """Gradients that are connected to all that they may depend on, in a graph that never runs.

    Not to the values, which a host call may have computed: these keep their own derivatives.
    """
    of_values = {id(y): u for y, u in zip(ys, us, strict=True)}
    number = unknown.depending_on([*(x for x in xs if id(x) not in of_values), *present(us)])

    def connected(x: Tensor) -> Gradient:
        if id(x) in of_values or not structures.is_differentiable(x.dtype):
            return of_values.get(id(x))
        return tf.fill(tf.shape(x), tf.cast(number, x.dtype))

    return list(map(connected, xs))


def _dense(ys: Sequence[Tensor], upstream: Sequence[Gradient]) -> list[Tensor | None]:
    """Upstream gradients as tensors: behind `tf.gather` they are `tf.IndexedSlices`."""

    def dense(u: Gradient) -> Tensor | None:
        if not isinstance(u, tf.IndexedSlices):
            return u
        if u.dense_shape is None:
            return tf.convert_to_tensor(u)
        return tf.math.unsorted_segment_sum(u.values, u.indices, u.dense_shape[0])

    return [
        dense(u) if structures.is_differentiable(y.dtype) else None
        for u, y in zip(upstream, ys, strict=True)
    ]


def _pull_for_graph(
    rule: Rule,
    carried: Rule,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    upstream: Sequence[Gradient],
) -> list[Gradient]:
    """The same for `tf.gradients`, and for the gradient of a function, a branch or a loop.

    The latter is of all arguments, whether or not somebody asked for it, so it raises no errors.
    TensorFlow may transpose it.
    """
    if _counts_as_connected(rule) or ys[0].graph is tf.compat.v1.get_default_graph():
        return _pull(rule, ys, xs, upstream)

    def pull() -> list[Gradient]:
        with running(for_graph=True), unknown.not_raising(), devices.of(ys[0]):
            us = _dense(ys, upstream)
            gradients = list(carried.pull(*us))
            if callable(rule.push) and not rule.transposes:
                return gradients
            return _tested(carried, gradients, us)

    return tapes.in_thread(pull) if tapes.tapes_are_silenced() else pull()


def _tested(
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

    graph = tf.compat.v1.get_default_graph()

    def guarded(i: int, g: Gradient) -> Gradient:
        def pull(z: Tensor) -> list[Gradient]:
            if isinstance(rule.push, str):
                fits, message = tf.constant(False), rule.push
            else:
                fits, message = _fits(rule, i, upstream, graph), NOT_TRANSPOSED
            zero = unknown.zero_if(fits, message.format(rule.name), [z, *us])
            return [z, *(tf.zeros_like(u) + tf.cast(zero, u.dtype) for u in us)]

        part = values_of(g)
        passed = Rule(rule.name, pull, lambda along, *_: [along])
        return with_values(g, keep([part], [part, *us], passed)[0])

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


def _push(rule: Rule, ys: Sequence[Tensor], tangents: Sequence[Tangent]) -> list[Tangent]:
    """The tangents of the outputs."""
    if isinstance(rule.push, str):
        raise NotImplementedError(rule.push)

    def run(*ts: Tangent) -> Sequence[Tangent]:
        with running():  # in another thread
            return rule.push(*ts) if callable(rule.push) else transposed(rule, ys, ts)

    with devices.of(ys[0]):
        try:
            return jvp_call.call(run, tangents)
        except tf.errors.OperatorNotAllowedInGraphError as error:
            if not tf.executing_eagerly():
                raise
            raise NotImplementedError(_UNTRACEABLE.format(rule.name)) from error


_UNTRACEABLE = (
    "Forward mode traces the rule of {0} as tf.function does, and cannot trace it: it uses a "
    "tensor as a Python bool, or iterates over one. Use tf.cond, tf.where or tf.map_fn there."
)


def _vectorized(rule: Rule, count: int, batch: mapping.Vectorized) -> list[Tensor]:
    """The outputs for all members of a batch, as a kept override again."""
    if rule.batched is not None:
        inputs = batch.inputs[count:]
        outputs = rule.batched(inputs)
        is_stacked = any(is_stacked for _, is_stacked in inputs)
        return list(outputs if is_stacked else map(batch.stack, outputs))
    if _counts_as_connected(rule):
        ys = [t if is_stacked else batch.stack(t) for t, is_stacked in batch.inputs[:count]]
        xs = [x for x, _ in batch.inputs[count:]]
    else:
        ys, xs, rule = mapped.of_batch(rule, count, batch)
    return keep(ys, xs, rule, if_lost=ys)
