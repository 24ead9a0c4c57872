"""Outputs whose derivatives are those of a rule, however they were computed.

TensorFlow drops gradients of operations in forward mode inside a graph and in `tf.vectorized_map`.
Both can be prevented: accumulators are given the JVP itself, and the operation comes with its own
rule for `tf.vectorized_map`, which gives the batched outputs derivatives again, those of the mapped
pullback.

The pullback runs only when a gradient is requested. It may be anything: nonlinear, a host call, a
loop, stateful. TensorFlow differentiates what it returns like everything else.
"""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import devices, structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core import adjoint, jvp_call, mapped, unknown
from sgtrick._core.reachable import Reachable
from sgtrick._core.rule import Changed, InAddition, Rule
from sgtrick._core.transposed import NOT_TRANSPOSED, transposed, values_of, with_values
from sgtrick._tensorflow import graphs, linear, ongoing, operation, pfor, tapes, tracing
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Gradient, Graph, Pushforward, Tangent, Tensor


@unconverted
def with_derivatives(
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
            transformations that drop derivatives from a stored model. Without it, these raise.
        in_graph: Whether a graph keeps the derivatives. If not, tapes and accumulators within it
            use the rule, and everything else uses `if_lost`.
    """
    ys, xs = list(ys), list(xs)
    if not any(structures.is_differentiable(x.dtype) for x in xs):
        return ys
    is_eager = tf.executing_eagerly()
    if is_eager and not tapes.somebody_records():
        return ys
    if not is_eager:
        # A tensor from outside is captured, and recorded as such, before recording is suspended.
        ys, xs = list(map(here, ys)), list(map(here, xs))
    kept = _Kept(rule, ys, xs)
    if not in_graph and not is_eager:
        with tapes.not_recording():
            outputs = [tf.identity(y) for y in if_lost or ys]
        tapes.record_override(outputs, xs, kept.pull, kept.push)
        return outputs
    derivatives = operation.Derivatives(
        kept.pull, kept.push, kept.pull_of_graph, kept.vectorize, is_connected=kept.is_only_asked()
    )
    return operation.identity_with(ys, xs, derivatives, if_lost or _DROPPED.format(rule.name))


class _Kept:
    """A rule of outputs `ys` with respect to `xs`, as TensorFlow calls it."""

    def __init__(self, rule: Rule, ys: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        self._rule, self._ys, self._xs = rule, ys, xs
        is_graph = not tf.executing_eagerly() and not self.is_only_asked()
        self._reachable = Reachable(rule, ys) if is_graph else rule

    def is_only_asked(self) -> bool:
        """Whether it is only asked what is connected, and a guard of the rule's own tells the rest.

        Then all gradients count as connected.
        """
        return self._rule.is_guarded and ongoing.is_probe()

    def pull(self, *upstream: Gradient) -> Sequence[Gradient]:
        """The gradients, computed on the device of the outputs."""
        us = _dense(self._ys, upstream)
        if self.is_only_asked():
            return _connected(self._ys, self._xs, us)
        with ongoing.running(), devices.of(self._ys[0]):
            return list(self._rule.pull(*us))

    def pull_of_graph(self, *upstream: Gradient) -> Sequence[Gradient]:
        """The gradients for `tf.gradients`, and for that of a function, a branch or a loop.

        The latter is of all arguments, whether or not somebody asked for it, so it raises no
        errors. TensorFlow may transpose it.
        """
        if self.is_only_asked() or self._ys[0].graph is tf.compat.v1.get_default_graph():
            return self.pull(*upstream)
        if tapes.tapes_are_silenced():
            return tapes.in_thread(lambda: self._pull_elsewhere(upstream))
        return self._pull_elsewhere(upstream)

    def _pull_elsewhere(self, upstream: Sequence[Gradient]) -> list[Gradient]:
        with ongoing.running(for_graph=True), ongoing.not_raising(), devices.of(self._ys[0]):
            us = _dense(self._ys, upstream)
            gradients = list(self._reachable.pull(*us))
            if callable(self._rule.push) and not self._rule.transposes:
                return gradients
            return _transposable(self._reachable, gradients, us)

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """The tangents of the outputs, from those of `xs`."""
        if isinstance(self._rule.push, str):
            raise NotImplementedError(self._rule.push)
        with devices.of(self._ys[0]):
            try:
                return jvp_call.call(self._push_of_rule, tangents)
            except tf.errors.OperatorNotAllowedInGraphError as error:
                if not tf.executing_eagerly():
                    raise
                raise NotImplementedError(_UNTRACEABLE.format(self._rule.name)) from error

    def _push_of_rule(self, *tangents: Tangent) -> Sequence[Tangent]:
        with ongoing.running():  # in another thread
            if callable(self._rule.push):
                return self._rule.push(*tangents)
            return transposed(self._rule, self._ys, tangents)

    def vectorize(self, batch: pfor.Vectorized) -> list[Tensor]:
        """The outputs for all members of a batch, with derivatives again."""
        count, inputs = len(self._ys), batch.inputs[len(self._ys) :]
        if self._rule.batched is not None:
            outputs = self._rule.batched(inputs)
            is_stacked = any(is_stacked for _, is_stacked in inputs)
            return list(outputs if is_stacked else map(batch.stack, outputs))
        ys = [t if is_stacked else batch.stack(t) for t, is_stacked in batch.inputs[:count]]
        asked = self.is_only_asked()
        rule = self._rule if asked else mapped.of_batch(self._reachable, ys, inputs, batch)
        return with_derivatives(ys, [x for x, _ in inputs], rule, if_lost=ys)


_DROPPED = (
    "TensorFlow dropped the gradient of {0}: a tf.vectorized_map over a loop is differentiated in "
    "forward mode; or a loaded SavedModel is mapped by tf.vectorized_map, or was saved with "
    "experimental_custom_gradients=False. Call the map in a tf.function; or map with tf.map_fn, or "
    "save with experimental_custom_gradients=True."
)

_UNTRACEABLE = (
    "Forward mode traces the rule of {0} as tf.function does, and cannot trace it: it uses a "
    "tensor as a Python bool, or iterates over one. Use tf.cond, tf.where or tf.map_fn there."
)


def _connected(
    ys: Sequence[Tensor], xs: Sequence[Tensor], us: Sequence[Tensor | None]
) -> list[Gradient]:
    """Gradients that are connected to all that they may depend on, in a graph that never runs.

    Not to the values, which a host call may have computed: these keep their own derivatives.
    """
    of_values = {id(y): u for y, u in zip(ys, us, strict=True)}
    others = [x for x in xs if id(x) not in of_values]
    number = unknown.depending_on([*others, *present(us)])

    def connected(x: Tensor) -> Gradient:
        if id(x) in of_values or not structures.is_differentiable(x.dtype):
            return of_values.get(id(x))
        return tf.fill(tf.shape(x), tf.cast(number, x.dtype))

    return list(map(connected, xs))


def _dense(ys: Sequence[Tensor], upstream: Sequence[Gradient]) -> list[Tensor | None]:
    """Upstream gradients as tensors: behind `tf.gather` they are `tf.IndexedSlices`."""
    return [
        structures.dense(u) if structures.is_differentiable(y.dtype) else None
        for u, y in zip(upstream, ys, strict=True)
    ]


def _transposable(
    rule: Rule, gradients: Sequence[Gradient], upstream: Sequence[Tensor | None]
) -> list[Gradient]:
    """The gradients of a function as a whole, with an error if they are transposed and cannot be.

    Forward mode around a function transposes its gradient.

    Args:
        rule: The rule.
        gradients: What its pullback returned, in the graph being traced.
        upstream: The upstream gradients that they were computed from.
    """
    us, graph = present(upstream), tf.compat.v1.get_default_graph()
    if operation.is_storing():
        values = list(map(values_of, present(gradients)))
        if linear.are_linear(values, us, graph.get_operations()):
            return list(gradients)

    def transposable(i: int, g: Gradient) -> Gradient:
        part = values_of(g)
        (kept,) = with_derivatives([part], [part, *us], _Transposable(rule, i, upstream, graph))
        return with_values(g, kept)

    return [None if g is None else transposable(i, g) for i, g in enumerate(gradients)]


class _Transposable(Rule):
    """The identity of gradient `i` of a rule, whose own transpose is tested, in a graph."""

    is_reachable = True

    def __init__(self, rule: Rule, i: int, upstream: Sequence[Tensor | None], graph: Graph) -> None:
        self.name = rule.name
        self._rule, self._i, self._upstream, self._graph = rule, i, upstream, graph

    def pull(self, *upstream: Tensor | None) -> list[Gradient]:
        """The cotangent, and a zero, or an error, for each upstream gradient of the rule."""
        (z,), us = upstream, present(self._upstream)
        if isinstance(self._rule.push, str):
            fits, message = tf.constant(False), self._rule.push
        else:
            fits, message = self._fits(), NOT_TRANSPOSED
        zero = unknown.zero_if(fits, message.format(self.name), [z, *us])
        return [z, *(unknown.plus(tf.zeros_like(u), zero) for u in us)]

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """The tangent of the gradient."""
        return [tangents[0]]

    def _fits(self) -> Tensor:
        """Whether the gradient, which is in the graph, can be transposed."""
        # What the rule uses is only known in its graph, to which nothing may be added any more: as
        # long as that happens, TensorFlow differentiates it anew.
        traced = tapes.in_thread(lambda: tracing.Traced(self._tested, [], self._graph))
        with self._graph.as_default():
            captured = list(map(graphs.as_used, traced.captured))
        with tapes.not_recording():
            (fits,) = traced([], captured)
        return fits

    def _tested(self) -> list[Tensor]:
        def pull(us: Sequence[Tensor]) -> list[Gradient]:
            gradients = list(self._rule.pull(*spread(us, self._upstream)))
            # The size of the others tells what is rounding.
            first = [gradients.pop(self._i), *gradients]
            return [None if g is None else values_of(g) for g in first]

        with ongoing.not_raising():
            us = present(self._upstream)
            _, fits, _ = adjoint.transpose(pull, us, None, of_first=True)
        return [fits]


class WithTranspose(Changed):
    """A rule with a pushforward, which is also the derivative by upstream gradients.

    Around a function, and around `tf.vectorized_map`, forward mode is that derivative.
    """

    def __init__(self, rule: Rule, push: Pushforward, xs: Sequence[Tensor]) -> None:
        """A rule with respect to `xs`.

        Where the rule returns None, their gradient is zero, so that their tangents count.
        """
        super().__init__(rule)
        self.push, self._xs = push, xs

    def pull(self, *upstream: Tensor | None) -> list[Gradient]:
        """The gradients, with the derivatives of a linear function of upstream gradients."""
        us = present(upstream)
        found = self._filled(spread(list(map(tf.stop_gradient, us)), upstream))
        gradients = list(map(tf.convert_to_tensor, present(found)))  # not slices
        linear = InAddition(_Transpose(self, upstream, found), len(gradients))
        return spread(with_derivatives(gradients, [*gradients, *us], linear), found)

    def _filled(self, upstream: Sequence[Tensor | None]) -> list[Gradient]:
        return [
            tf.zeros_like(x) if g is None and structures.is_differentiable(x.dtype) else g
            for g, x in zip(self._rule.pull(*upstream), self._xs, strict=True)
        ]


class _Transpose(Rule):
    """The derivatives of the gradients `found` of a rule by its upstream gradients."""

    def __init__(
        self, rule: WithTranspose, upstream: Sequence[Tensor | None], found: Sequence[Gradient]
    ) -> None:
        self.name = rule.name
        self._rule, self._upstream, self._found = rule, upstream, found

    def pull(self, *upstream: Tensor | None) -> list[Gradient]:
        """Cotangents of the gradients are pushed forward, like tangents of the inputs."""
        assert callable(self._rule.push)
        moved = self._rule.push(*spread(upstream, self._found))
        return [t for t, u in zip(moved, self._upstream, strict=True) if u is not None]

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """Tangents of the upstream gradients are pulled back, like these."""
        return present(self._rule._filled(spread(tangents, self._upstream)))
