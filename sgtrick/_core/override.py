"""The kept override: outputs whose derivatives are those of a pullback, however they were computed.

TensorFlow drops overrides in forward mode inside a graph and in `tf.vectorized_map`. Both can be
prevented: accumulators are given the JVP itself, and the operation comes with its own rule for
`tf.vectorized_map`, which overrides the batched outputs again, with the mapped pullback.

The pullback runs only when a gradient is requested. It may be anything: nonlinear, a host call, a
loop, stateful. If TensorFlow loses a derivative when differentiating the pullback in turn, this
raises: that is what `_guarded` adds.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence

import tensorflow as tf

from sgtrick._core import adjoint, apart, devices, losses, lost, loud, mapped, structures
from sgtrick._core._tensorflow import graphs, mapping, overrides, tapes, tracing
from sgtrick._core._tensorflow.autograph import unconverted
from sgtrick._core._tensorflow.graphs import here, operation
from sgtrick._core.absent import Dense, present
from sgtrick._core.rule import Rule
from sgtrick._core.transposition import not_transposed, transposed
from sgtrick._core.types import Gradient, Pullback, Pushforward, Tangent, Tensor


@unconverted
def keep(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    rule: Rule,
    natural: Sequence[Tensor] | None = None,
    *,
    in_graph: bool = True,
) -> list[Tensor]:
    """Returns `ys`, to the last bit, with the derivatives of a rule with respect to `xs`.

    Args:
        ys: Tensors. Nothing else that they depend on gets a gradient: to keep the derivatives of
            `ys` themselves, pass them among `xs` too.
        xs: Tensors.
        rule: The derivatives.
        natural: The same values, by operations whose own derivatives are right to first order, for
            transformations that drop overrides from a stored model. Without it, these raise.
        in_graph: Whether a graph keeps the override. If not, tapes and accumulators within it use
            the rule, and everything else uses `natural`.
    """
    ys, xs = list(ys), list(xs)
    if not any(structures.is_differentiable(x.dtype) for x in xs):
        return ys
    rule = rule._replace(sources=rule.sources or xs)
    if tf.executing_eagerly():
        if not tapes.somebody_records():
            return ys
        with tapes.not_recording():
            outputs = [tf.identity(y) for y in ys]
    else:
        # A tensor from outside is captured, and recorded as such, before recording is suspended.
        ys, xs = [here(y) for y in ys], [here(x) for x in xs]
        outputs = _outputs(ys, xs, rule, natural, in_graph)
    tapes.record_override(
        outputs,
        xs,
        lambda *upstream: _pull(rule, ys, xs, upstream, by_graph=False),
        lambda *tangents: _push(rule, ys, xs, tangents),
    )
    return outputs


def _outputs(
    ys: list[Tensor],
    xs: list[Tensor],
    rule: Rule,
    natural: Sequence[Tensor] | None,
    in_graph: bool,
) -> list[Tensor]:
    """The outputs in a graph, not recorded by any tape."""
    if not in_graph:
        with tapes.not_recording():
            return [tf.identity(y) for y in natural or ys]
    meaning = overrides.Override(
        lambda *upstream: _pull_for_graph(rule, ys, xs, upstream),
        lambda batch: _vectorized(rule, len(ys), batch),
    )
    dropped = _DROPPED.format(rule.name)
    natural = natural or [
        mapping.unconvertible(y, dropped) if structures.is_differentiable(y.dtype) else y
        for y in ys
    ]
    outputs = overrides.override(natural, xs, meaning)
    for output, y in zip(outputs, ys, strict=True):
        output.set_shape(y.shape)
    return outputs


_DROPPED = (
    "TensorFlow dropped the gradient of {0}: a loaded SavedModel is mapped by tf.vectorized_map, "
    "or was saved with experimental_custom_gradients=False. Map with tf.map_fn, or save with "
    "experimental_custom_gradients=True."
)


def _pull(
    rule: Rule,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    *,
    by_graph: bool,
) -> list[Gradient]:
    """Calls the pullback on the device of the outputs, with errors for derivatives it loses."""
    upstream = [
        _dense(u) if structures.is_differentiable(y.dtype) else None
        for u, y in zip(upstream, ys, strict=True)
    ]
    with devices.of(ys[0]):
        if tf.executing_eagerly() and not tapes.somebody_records():
            return list(rule.pull(*upstream))
        return _guarded(rule, xs, upstream, by_graph=by_graph)


def _dense(u: Gradient) -> Tensor | None:
    """An upstream gradient as a tensor: behind `tf.gather` it is `tf.IndexedSlices`."""
    if not isinstance(u, tf.IndexedSlices):
        return u
    if u.dense_shape is None:
        return tf.convert_to_tensor(u)
    return tf.math.unsorted_segment_sum(u.values, u.indices, u.dense_shape[0])


def _pull_for_graph(
    rule: Rule, ys: Sequence[Tensor], xs: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> list[Gradient]:
    """The same for the gradient of a function as a whole."""

    def pull() -> list[Gradient]:
        with loud.not_raising():
            return _pull(rule, ys, xs, upstream, by_graph=True)

    return tapes.apart(pull) if tapes.tapes_are_silenced() else pull()


def _push(
    rule: Rule, ys: Sequence[Tensor], xs: Sequence[Tensor], tangents: Sequence[Tangent]
) -> list[Tangent]:
    """The tangents of the outputs, with errors for derivatives that a JVP rule loses."""
    if isinstance(rule.push, str):
        raise NotImplementedError(rule.push)
    by_output, through = [[False] * len(rule.sources) for _ in ys], dict[Hashable, Tensor]()
    cut = [[False] * len(tangents) for _ in ys]
    around = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    moving = losses.are_moving(tangents)

    def notice(
        part: Gradient, at: Sequence[Tensor | None]
    ) -> Iterable[tuple[Sequence[bool], bool]]:
        """What is lost of each term: by which sources, and whether by its tensor among `at`."""
        found = losses.through_host(rule, part, at, around)
        through.update((graphs.identity_of(t), t) for t in found)
        if rule.lost is not None:
            return []
        are_cut = lost.are_cut([lost.values_of(part)], at)
        return zip(losses.by_terms(rule, part, at), are_cut, strict=True)

    def add(k: int, i: int, by_sources: Sequence[bool], is_cut: bool) -> None:
        """Adds what is lost of the term of output `k` with the tangent of input `i`."""
        if moving[i]:
            by_output[k] = list(map(operator.or_, by_output[k], by_sources))
        cut[k][i] |= is_cut

    def pull(*us: Tensor | None) -> Sequence[Gradient]:
        gradients = rule.pull(*us)
        # One by one: their sum would show what is stopped beside what is not.
        for i, gradient in enumerate(gradients):
            if gradient is not None and moving[i]:
                for k, found in enumerate(notice(gradient, us)):
                    add(k, i, *found)
        return gradients

    def push(*ts: Tangent) -> Sequence[Tangent]:
        if not callable(rule.push):  # not a message either, as seen above
            return transposed(rule._replace(pull=pull), ys, ts)
        pushed = rule.push(*ts)
        for k, tangent in enumerate(pushed):
            if tangent is not None:
                for i, found in enumerate(notice(tangent, ts)):
                    add(k, i, *found)
        return rule.finish(pushed, ts) if rule.finish else pushed

    def losing(k: int, tangent: Tensor) -> Tensor:
        by_inputs = [any(losses.is_lost(rule, i, k) for i, m in enumerate(moving) if m)] * len(xs)
        if any(by_output[k]):
            by_inputs = losses.by_inputs(xs, rule, by_output[k])
        points = [
            *map(here, itertools.compress(xs, by_inputs)),
            *map(_as_input, through.values()),
            *present(list(itertools.compress(tangents, cut[k]))),
        ]
        return _losing(rule.name, tangent, points) if points else tangent

    dense = Dense(push, tangents)
    with devices.of(ys[0]):
        if tf.executing_eagerly() and rule.again is not None:
            by_sources, found = losses.before(rule, ys)
            by_output = [by_sources for _ in ys]
            through.update((graphs.identity_of(t), t) for t in found)
        moved = dense.restored(apart.call(dense, present(tangents)))
        return [None if t is None else losing(k, t) for k, t in enumerate(moved)]


def _guarded(
    rule: Rule, xs: Sequence[Tensor], upstream: Sequence[Tensor | None], *, by_graph: bool
) -> list[Gradient]:
    """The gradients, whose own derivatives are those of the pullback or errors."""
    if callable(rule.push) and rule.lost is False:
        return list(rule.pull(*upstream))
    pulled = losses.recorded(rule, upstream)
    near = [here(x) for x in xs]

    def guarded(i: int, gradient: Tensor | tf.IndexedSlices) -> Gradient:
        through = []
        if pulled.tape is None:
            graph = tf.compat.v1.get_default_graph()
            through = losses.through_host(rule, gradient, pulled.us, graph)
        elif _must_be_traced(lost.values_of(gradient), [*pulled.at, *xs]):
            through = losses.by_host(rule, pulled, i)
        loses = losses.of(rule, pulled, i, xs)
        return _with_errors(
            rule, gradient, pulled.at, near, map(_as_input, through), loses, by_graph=by_graph
        )

    return [None if g is None else guarded(i, g) for i, g in enumerate(pulled.gradients)]


def _as_input(t: Tensor) -> Tensor:
    """A tensor, or the value of the variable with this handle, in the graph being traced."""
    return graphs.read(t) if t.dtype == tf.resource else here(t)


def _must_be_traced(part: Tensor, known: Sequence[Tensor]) -> bool:
    """Whether what tapes know of an eager gradient does not lead to errors where it is lost.

    Nobody may have recorded it, but only because the host computed it. And accumulators do not tell
    afterwards what else they know tangents of.
    """
    return tapes.is_pushed([part]) or not tapes.is_recorded([part, *known])


def _with_errors(
    rule: Rule,
    gradient: Tensor | tf.IndexedSlices,
    at: Sequence[Tensor],
    xs: Sequence[Tensor],
    through: Iterable[Tensor],
    loses: Callable[[], losses.Lost],
    *,
    by_graph: bool,
) -> Gradient:
    """A gradient, as output of an operation that adds errors.

    The operation passes derivatives on, and only adds errors: with respect to inputs by which the
    derivative of the gradient is lost, and to all that it gets `through` the host; with respect to
    the upstream gradients `at`, if it is cut off, or if the pullback cannot be transposed. Forward
    mode around a function transposes, and cannot be told from a second derivative.
    """
    part, through = lost.values_of(gradient), list(through)
    xs = [*xs, *through]
    at = [] if callable(rule.push) else at
    transposable = by_graph and at

    def pull(z: Tensor) -> list[Gradient]:
        by = loses()
        by_points = [*by.points, *[True] * len(through)]
        if any(map(tapes.is_differentiating, by.elsewhere)):
            unknown = loud.zero_if(tf.constant(False), lost.message(rule.name), [z, *xs])
            z += tf.cast(unknown, z.dtype)
        is_of_function = _is_of_function(part)
        with loud.not_raising() if is_of_function else contextlib.nullcontext():
            of = [z, *at, *xs]
            points = loud.failures(xs, lost.message(rule.name), of, by_points)
            if not transposable:
                us = loud.failures(at, lost.cut_message(rule.name), of, by.upstream)
        # Forward over forward mode differentiates the result of z, and so do double VJPs.
        if any(by_points) and (by_graph or not is_of_function):
            z = _losing(rule.name, z, list(itertools.compress(xs, by_points)))
        if not transposable:
            return [z, *us, *points]
        message = rule.push if isinstance(rule.push, str) else not_transposed(rule.name)
        fits = tf.constant(False)
        if not (any(by.upstream) or isinstance(rule.push, str)):
            found = tracing.gradients_in(part.graph, [part], at, [z])
            fits = adjoint.holds([part], [z], found, at)
        zero = loud.zero_if(fits, message, [z, *at, *xs])
        # In both, since a pullback without a derivative would also lose the error.
        moved = z + tf.cast(zero, z.dtype)
        return [moved, *(tf.zeros_like(u) + tf.cast(zero, u.dtype) for u in at), *points]

    def push(*tangents: Tangent) -> list[Tangent]:
        along, us = [tangents[0]], tangents[1 : -len(xs)]
        by = tapes.apart(loses)
        cut = present(list(itertools.compress(us, by.upstream)))
        if cut:
            along = loud.unless_moving(lost.cut_message(rule.name), along, cut, at)
        by_points = [*by.points, *[True] * len(through)]
        lost_ones = list(itertools.compress(xs, by_points))
        points = present(list(itertools.compress(tangents[-len(xs) :], by_points)))
        if points:
            along = loud.unless_moving(lost.message(rule.name), along, points, xs)
        # What is lost of the gradient is lost of its tangents, along the upstream gradients too.
        return [
            t if t is None or not lost_ones else _losing(rule.name, t, lost_ones) for t in along
        ]

    return lost.with_values(gradient, _pass_on(part, [*at, *xs], pull, push))


def _is_of_function(part: Tensor) -> bool:
    """Whether this traces the gradient of a whole function, namely the one with this tensor."""
    if tf.executing_eagerly() or operation(part) is None:  # as where a Jacobian is traced
        return False
    return part.graph is not tf.compat.v1.get_default_graph()


def _losing(name: str, part: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """The same tensor, with errors for its derivatives with respect to `xs`."""

    def pull(z: Tensor) -> list[Gradient]:
        # What is lost of the tensor is lost of what it is pulled back to.
        return [_losing(name, z, xs), *loud.failures(xs, lost.message(name), [z])]

    def push(along: Tangent, *points: Tangent) -> list[Tangent]:
        (moved,) = loud.unless_moving(lost.message(name), [along], present(points), xs)
        return [moved if moved is None else _losing(name, moved, xs)]

    return _pass_on(part, xs, pull, push)


def unknown_by(y: Tensor, xs: Sequence[Tensor], message: str) -> Tensor:
    """The same tensor, with an error with this message for its derivatives with respect to `xs`.

    Its other derivatives are passed on, with derivatives of their own.
    """
    if not xs:
        return y

    def pull(u: Tensor) -> list[Gradient]:
        with loud.not_raising() if _is_of_function(y) else contextlib.nullcontext():
            return [u, *loud.failures(xs, message, [u])]

    def push(along: Tangent, *points: Tangent) -> list[Tangent]:
        return loud.unless_moving(message, [along], present(points), xs)

    return _pass_on(y, xs, pull, push)


def _pass_on(part: Tensor, xs: Sequence[Tensor], pull: Pullback, push: Pushforward) -> Tensor:
    """The same tensor, with derivatives with respect to itself and to `xs`."""
    if tf.executing_eagerly():
        with tapes.not_recording():
            output = tf.identity(part)
        tapes.record_override([output], [part, *xs], pull, push)
        return output
    part, xs = here(part), [here(x) for x in xs]
    inputs = [part, *xs]
    rule = Rule("", pull, push, sources=inputs)
    meaning = overrides.Override(pull, lambda batch: _vectorized(rule, 1, batch))
    (output,) = overrides.override([part], inputs, meaning)
    tapes.record_override([output], inputs, pull, push)
    return output


def _vectorized(rule: Rule, count: int, batch: mapping.Vectorized) -> list[Tensor]:
    """The outputs for all members of a batch, as a kept override again."""
    ys, xs, rule = mapped.of_batch(rule, count, batch)
    return keep(ys, xs, rule, natural=ys)
