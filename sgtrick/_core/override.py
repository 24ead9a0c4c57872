"""The kept override: outputs whose derivatives are what a pullback returns, whatever they were.

TensorFlow drops overrides in forward mode inside a graph and in `tf.vectorized_map`. Both can be
told otherwise: an accumulator is given the JVP itself, and the operation brings its own rule for
`tf.vectorized_map`, by which the batched outputs are overridden again, with the mapped pullback.

The pullback runs when a gradient is asked for, and not before. It may be anything: not linear, a
host call, a loop, stateful. A derivative that TensorFlow loses in it when it is differentiated in
its turn raises: that is what `_guarded` adds.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick._core import _tensorflow, adjoint, ancestry, devices, loud, structures
from sgtrick._core._tensorflow import Pullback, here, unconverted


class Rule(NamedTuple):
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: What errors call the function.
        pull: From one upstream gradient for each output, None for those without derivatives, to one
            gradient or None for each input.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error for forward mode; or None, where forward mode transposes `pull`, with a test.
        sources: What the gradients may depend on: the inputs, unless stated otherwise.
        tape: A persistent tape that has recorded what `pull` uses of the forward pass, in eager.
        lost: Says for each gradient whether TensorFlow cannot differentiate it with respect to the
            sources, where that is known beforehand.
    """

    name: str
    pull: Pullback
    push: Callable[..., Sequence[Any]] | str | None = None
    sources: Sequence[Any] | None = None
    tape: Any = None
    lost: Sequence[bool] | None = None


@unconverted
def keep(
    ys: Sequence[Any],
    xs: Sequence[Any],
    rule: Rule,
    natural: Sequence[Any] | None = None,
    *,
    in_graph: bool = True,
) -> list[Any]:
    """Returns `ys`, to the last bit, with the derivatives of a rule with respect to `xs`.

    Args:
        ys: Tensors. What else they depend on gets nothing: to keep a derivative of `ys`
            themselves, they have to be among `xs` too.
        xs: Tensors.
        rule: The derivatives.
        natural: The same values by operations whose own derivatives are right to first order, for
            transformations that drop overrides from a stored model. Otherwise these raise.
        in_graph: Whether a graph keeps the override. Otherwise tapes and accumulators within it
            take the rule, and `natural` serves for all else.
    """
    ys, xs = list(ys), list(xs)
    if not any(structures.is_differentiable(x.dtype) for x in xs):
        return ys
    if tf.executing_eagerly():
        if not _tensorflow.somebody_records():
            return ys
        with _tensorflow.not_recording():
            outputs = [tf.identity(y) for y in ys]
    else:
        # A tensor from outside is captured, and recorded as such, before recording is suspended.
        ys, xs = [here(y) for y in ys], [here(x) for x in xs]
        sources = xs if rule.sources is None else [*xs, *rule.sources]
        rule = rule._replace(sources=sources)
        outputs = _outputs(ys, xs, rule, natural, in_graph)
    _tensorflow.record_override(
        outputs,
        xs,
        lambda *upstream: _pull(rule, ys, xs, upstream, by_graph=False),
        lambda *tangents: _push(rule, ys, xs, tangents),
    )
    return outputs


def _outputs(
    ys: list[Any], xs: list[Any], rule: Rule, natural: Sequence[Any] | None, in_graph: bool
) -> list[Any]:
    """The outputs of a graph, which no tape has seen."""
    if not in_graph:
        with _tensorflow.not_recording():
            return [tf.identity(y) for y in natural or ys]
    meaning = _tensorflow.Override(
        lambda *upstream: _pull_for_graph(rule, ys, xs, upstream),
        lambda batch: _vectorized(rule, len(ys), batch),
    )
    dropped = _DROPPED.format(rule.name)
    natural = natural or [
        _tensorflow.unconvertible(y, dropped) if structures.is_differentiable(y.dtype) else y
        for y in ys
    ]
    outputs = _tensorflow.override(natural, xs, meaning)
    for output, y in zip(outputs, ys, strict=True):
        output.set_shape(y.shape)
    return outputs


_DROPPED = (
    "TensorFlow dropped the gradient of {0}: a loaded SavedModel is mapped by tf.vectorized_map, "
    "or was stored with experimental_custom_gradients=False. Map with tf.map_fn, or store with "
    "experimental_custom_gradients=True."
)


def _pull(
    rule: Rule, ys: Sequence[Any], xs: Sequence[Any], upstream: Sequence[Any], *, by_graph: bool
) -> list[Any]:
    """Calls the pullback on the device of the outputs, with errors for what gets lost in it."""
    upstream = [
        u if structures.is_differentiable(y.dtype) else None
        for u, y in zip(upstream, ys, strict=True)
    ]
    with devices.of(ys[0]):
        if tf.executing_eagerly() and not _tensorflow.somebody_records():
            return list(rule.pull(*upstream))
        return _guarded(rule, xs, upstream, by_graph=by_graph)


def _pull_for_graph(
    rule: Rule, ys: Sequence[Any], xs: Sequence[Any], upstream: Sequence[Any]
) -> list[Any]:
    """The same for the gradient of a function as a whole."""

    def pull() -> list[Any]:
        with loud.not_raising():
            return _pull(rule, ys, xs, upstream, by_graph=True)

    return _tensorflow.apart(pull) if _tensorflow.tapes_are_silenced() else pull()


def _push(rule: Rule, ys: Sequence[Any], xs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The tangents of the outputs, with errors for what gets lost in a rule for them."""
    if isinstance(rule.push, str):
        raise NotImplementedError(rule.push)
    push = rule.push or (lambda *ts: _transposed(rule, ys, ts))
    places: list[int] = []
    sources = xs if rule.sources is None else rule.sources
    is_lost = False

    def known(*some: Any) -> list[Any]:
        nonlocal is_lost
        given = iter(some)
        pushed = push(*(None if t is None else next(given) for t in tangents))
        places[:] = [i for i, t in enumerate(pushed) if t is not None]
        if rule.lost is None:
            is_lost = any(
                _is_lost(pushed[i], sources, some)
                and not ancestry.is_connected_by(rule.tape, pushed[i], sources)
                for i in places
            )
        return [pushed[i] for i in places]

    ts = [t for t in tangents if t is not None]
    with devices.of(ys[0]):
        moved = list(_tensorflow.call_apart(known, ts))
        if is_lost:
            moved = _losing(rule.name, moved, [here(x) for x in xs])
        found = dict(zip(places, moved, strict=True))
    return [found.get(i) for i in range(len(ys))]


def _transposed(rule: Rule, ys: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The transpose of the pullback at `tangents`, which fails where it is not that."""
    us = [adjoint.probe(y) if structures.is_differentiable(y.dtype) else None for y in ys]
    at = [u for u in us if u is not None]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(at)
        gradients = rule.pull(*us)
        pairs = [
            (tf.convert_to_tensor(g), t)
            for g, t in zip(gradients, tangents, strict=True)
            if g is not None and t is not None
        ]
    gs, ts = [g for g, _ in pairs], [tf.cast(t, g.dtype) for g, t in pairs]
    found = tape.gradient(gs, at, output_gradients=ts) if gs else [None] * len(at)
    fits = adjoint.holds(gs, ts, found, at)
    if gs:  # a rule that clips may be linear where it is tested
        larger = rule.pull(*(None if u is None else _MANY * u for u in us))
        ls = [tf.convert_to_tensor(g) for g in larger if g is not None]
        fits &= adjoint.is_multiple(ls, gs, _MANY)
    zero = loud.insist(fits, _NOT_TRANSPOSED.format(rule.name))
    pushed = iter(found)
    return [None if u is None else _plus(next(pushed), zero, u) for u in us]


_MANY = 1024  # a power of two, so that nothing is rounded


def _plus(tangent: Any, zero: Any, like: Any) -> Any:
    tangent = tf.zeros_like(like) if tangent is None else tangent
    return tangent + tf.cast(zero, tangent.dtype)


_NOT_TRANSPOSED = (
    "Forward mode transposes the gradient function of {0}, by differentiating it with respect to "
    "the upstream gradient, and what came out is not the transpose: a part of it is a host call, "
    "stopped, or not linear in the upstream gradient. Use sgtrick.custom_jvp, whose rule is for "
    "forward mode; or reverse mode (tf.GradientTape)."
)


def _guarded(
    rule: Rule, xs: Sequence[Any], upstream: Sequence[Any], *, by_graph: bool
) -> list[Any]:
    """The gradients, whose own derivatives are those of the pullback, or errors.

    An operation around the gradients passes derivatives on and adds nothing, but for errors:
    with respect to the sources, where a gradient is not connected to any of them; with respect to
    the upstream gradient, where the pullback cannot be transposed. TensorFlow transposes in forward
    mode around a function, which cannot be told from a second derivative.
    """
    if callable(rule.push) and rule.lost is not None and not any(rule.lost):
        return list(rule.pull(*upstream))
    sources = xs if rule.sources is None else rule.sources
    us = [None if u is None else tf.identity(u) for u in upstream]
    at = [u for u in us if u is not None]
    if tf.executing_eagerly():
        tape = rule.tape or tf.GradientTape(persistent=True, watch_accessed_variables=False)
        with tape:
            tape.watch(sources)
            tape.watch(at)
            gradients = list(rule.pull(*us))
    else:
        gradients = list(rule.pull(*us))
    places = [i for i, g in enumerate(gradients) if g is not None]
    parts = [_values(gradients[i]) for i in places]
    if not parts:
        return gradients
    xs = [here(x) for x in xs]
    known = None
    if rule.lost is not None:
        known = any(rule.lost)
    elif not tf.executing_eagerly():
        known = any(_is_lost(part, sources, at) for part in parts)

    def is_lost() -> bool:
        if known is not None:
            return known
        with loud.not_raising():  # it is not the caller who asks
            return any(
                all(d is None for d in tape.gradient(part, sources))
                and not _is_constant(rule, us, i)
                for i, part in zip(places, parts, strict=True)
                if all(part is not u for u in at)
            )

    transposable = by_graph and not callable(rule.push)

    def again(*z: Any) -> list[Any]:
        points: list[Any] = [None] * len(xs)
        if is_lost():
            with loud.not_raising() if _is_of_function(parts) else contextlib.nullcontext():
                points = _failures(lost(rule.name), xs, z)
            if by_graph:  # forward mode over forward mode differentiates what z becomes
                z = tuple(_losing(rule.name, list(z), xs))
        if not transposable:
            return [*z, *points]
        if isinstance(rule.push, str):
            zero = loud.insist(tf.constant(False), rule.push)
        else:
            found = _tensorflow.gradients_in(parts[0].graph, parts, at, z)
            fits = adjoint.holds(parts, z, found, at)
            zero = loud.insist(fits, _NOT_TRANSPOSED.format(rule.name))
        # Both ways, for a pullback that has no derivative would lose the error, too.
        moved = [z_i + tf.cast(zero, z_i.dtype) for z_i in z]
        return [*moved, *(tf.zeros_like(u) + tf.cast(zero, u.dtype) for u in at), *points]

    def along(*tangents: Any) -> list[Any]:
        z, points = tangents[: len(parts)], tangents[-len(xs) :]
        if _tensorflow.apart(is_lost):
            return _insisting(rule.name, z, points)
        return list(z)

    guarded = _pass_on(parts, [*at, *xs] if transposable else xs, again, along)
    for i, part in zip(places, guarded, strict=True):
        gradients[i] = _like(gradients[i], part)
    return gradients


def _is_of_function(parts: Sequence[Any]) -> bool:
    """Whether the gradient of the function that holds these tensors is made, as a whole."""
    if tf.executing_eagerly():
        return False
    return parts[0].graph is not tf.compat.v1.get_default_graph()


def _failures(message: str, xs: Sequence[Any], through: Sequence[Any]) -> list[Any]:
    """An error for who differentiates with respect to one of `xs`."""
    return [
        loud.failure(x, message, through) if structures.is_differentiable(x.dtype) else None
        for x in xs
    ]


def _losing(name: str, parts: list[Any], xs: Sequence[Any]) -> list[Any]:
    """`parts`, with errors for their derivatives with respect to `xs`."""

    def again(*z: Any) -> list[Any]:
        return [*z, *_failures(lost(name), xs, z)]

    def along(*tangents: Any) -> list[Any]:
        return _insisting(name, tangents[: len(parts)], tangents[len(parts) :])

    return _pass_on(parts, xs, again, along)


def _insisting(name: str, along: Sequence[Any], points: Sequence[Any]) -> list[Any]:
    """Tangents, or an error where the points have some."""
    zero = loud.insist_on_zeros([t for t in points if t is not None], lost(name))
    return [None if t is None else t + tf.cast(zero, t.dtype) for t in along]


def _pass_on(parts: list[Any], xs: Sequence[Any], pull: Pullback, push: Pullback) -> list[Any]:
    """`parts`, with derivatives with respect to themselves and to `xs`."""
    if tf.executing_eagerly():
        with _tensorflow.not_recording():
            outputs = [tf.identity(part) for part in parts]
        _tensorflow.record_override(outputs, [*parts, *xs], pull, push)
        return outputs
    parts, xs = [here(p) for p in parts], [here(x) for x in xs]
    inputs = [*parts, *xs]
    rule = Rule("", pull, push, inputs)
    meaning = _tensorflow.Override(pull, lambda batch: _vectorized(rule, len(parts), batch))
    outputs = _tensorflow.override(parts, inputs, meaning)
    _tensorflow.record_override(outputs, inputs, pull, push)
    return outputs


def lost(name: str) -> str:
    """What is said where a gradient cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, and TensorFlow sees no connection from "
        "the gradient to the point: it was computed by a host call or by NumPy, was stopped, or "
        "does not depend on the point. If it is a constant, add 0 * x to it, which says so. "
        "Otherwise make it of TensorFlow's operations, or give the call its own gradient by one of "
        "sgtrick's forms."
    )


def _is_lost(gradient: Any, sources: Sequence[Any], us: Sequence[Any]) -> bool:
    """Whether a gradient in a graph cannot be differentiated, and is not made of `us` alone."""
    connected = ancestry.is_connected(gradient, sources, us)
    return not connected and not ancestry.is_made_of(gradient, us)


def _is_constant(rule: Rule, us: Sequence[Any], place: int) -> bool:
    """Whether a gradient is made of the upstream gradient alone, as that of a linear function."""
    at = [u for u in us if u is not None]

    def gradient(*upstream: Any) -> Any:
        some = iter(upstream)
        return _values(rule.pull(*(None if u is None else next(some) for u in us))[place])

    specs = [tf.TensorSpec(u.shape, u.dtype) for u in at]
    try:
        graph = _tensorflow.trace(gradient, specs).graph
    except Exception:  # what cannot be traced looks at numbers
        return False
    return ancestry.is_made_of(graph.outputs[0], graph.inputs[: len(at)])


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _like(gradient: Any, part: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part


def _vectorized(rule: Rule, count: int, batch: _tensorflow.Vectorized) -> list[Any]:
    """The batched outputs, with the mapped pullback.

    What the pullback uses of the forward pass is found by tracing it, and then taken from the
    batch as well.
    """
    live = [structures.is_differentiable(y.dtype) for y in batch.outputs[:count]]
    places: list[int] = []
    missing = [False] * (len(batch.inputs) - count)

    def pull_member(*us: Any) -> list[Any]:
        some = iter(us)
        gradients = rule.pull(*(next(some) if is_live else None for is_live in live))
        places[:] = [i for i, g in enumerate(gradients) if g is not None]
        for i in places:
            g = _values(gradients[i])
            missing[i] = _is_lost(g, rule.sources or (), us)
        return [tf.convert_to_tensor(gradients[i]) for i in places]

    specs = [
        tf.TensorSpec(y.shape, y.dtype)
        for y, is_live in zip(batch.outputs, live, strict=False)
        if is_live
    ]
    with loud.not_raising():
        member = _tensorflow.Traced(pull_member, specs, batch.graph)
    ys = [t if is_stacked else batch.stack(t) for t, is_stacked in batch.inputs[:count]]
    xs = batch.inputs[count:]
    try:
        captured = [batch.convert(t) for t in member.captured]
    except _tensorflow.OutOfReachError:
        return _out_of_reach(rule.name, ys, [x for x, _ in xs])

    def pull(*upstream: Any) -> list[Any]:
        def one(arguments: Any) -> Any:
            us, stacked = arguments
            some = iter(stacked)
            return member(us, [next(some) if is_stacked else t for t, is_stacked in captured])

        us = [u for u, is_live in zip(upstream, live, strict=True) if is_live]
        with loud.not_raising():
            mapped = tf.vectorized_map(one, (us, [t for t, is_stacked in captured if is_stacked]))
        gradients: list[Any] = [None] * len(xs)
        for i, g in zip(places, mapped, strict=True):
            x, is_stacked = xs[i]
            gradients[i] = g if is_stacked else tf.reduce_sum(g, 0)
            gradients[i].set_shape(x.shape)
        return gradients

    push = rule.push if isinstance(rule.push, str) else None
    of_batch = Rule(rule.name, pull, push, lost=missing)
    return keep(ys, [x for x, _ in xs], of_batch, natural=ys)


def _out_of_reach(name: str, ys: list[Any], xs: list[Any]) -> list[Any]:
    """The batched outputs, and an error for who differentiates them."""
    message = (
        f"tf.vectorized_map over a function whose gradient function calls {name}, of which the "
        "gradient function uses a tensor that the first one computed and did not pass. Pass it as "
        "an argument, or map with tf.map_fn."
    )

    def pull(*upstream: Any) -> list[Any]:
        return _failures(message, xs, [u for u in upstream if u is not None])

    return keep(ys, xs, Rule(name, pull, message, lost=[False] * len(xs)), natural=ys)
