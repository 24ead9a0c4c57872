"""Functions with a rule for Jacobian-vector products, by the protocol of `jax.custom_jvp`."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from sgtrick._core import adjoint, ancestry, calls, embedding, lost, loud, mixed, shapes, structures
from sgtrick._core._tensorflow import autograph
from sgtrick._core.closures import Closure
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.types import (
    Args,
    Decorated,
    Function,
    Gradient,
    Kwargs,
    Structure,
    Tangent,
    Tape,
    Tensor,
)


def custom_jvp(
    f: Function | None = None, *, nondiff_argnums: int | Sequence[int] = ()
) -> Decorated:
    """Gives a function a rule for Jacobian-vector products, by the protocol of `jax.custom_jvp`.

    The rule is linear in the tangents, so it serves both forward and reverse mode.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> @sgtrick.custom_jvp
        ... def log1pexp(x):
        ...     return tf.where(x > 50, x, tf.math.log(1 + tf.exp(x)))
        >>> @log1pexp.defjvp
        ... def _(primals, tangents):
        ...     (x,), (t,) = primals, tangents
        ...     return log1pexp(x), tf.sigmoid(x) * t
        >>> x = tf.constant([0.0, 100.0])
        >>> with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        ...     y = log1pexp(x)
        >>> accumulator.jvp(y).numpy()
        array([0.5, 1. ], dtype=float32)

    Args:
        f: The function, with positional arguments and outputs of any structure. On methods, `self`
            does not count as an argument, and the rule is a method too.
        nondiff_argnums: Positions of arguments that have no derivatives. The rule gets them first.

    Returns:
        The function, with the decorator `defjvp` for its rule
        `jvp(*nondiff, primals, tangents) -> (primal_out, tangent_out)`. `primals` is a tuple of the
        other arguments, with keywords turned into positions and defaults filled in; `tangents` has
        the same structure, with None for leaves without derivatives (int, bool, string);
        `tangent_out` has the structure, shapes and dtypes of the output, with None where there is
        no derivative. The value is always that of `f`; `primal_out` is ignored. The rule is called
        only when a derivative is requested. Reverse mode transposes it, and tests the transpose at
        fixed pseudo-random tangents. Higher derivatives are obtained by differentiating the rule.
        Variables that `f` reads keep their autodiff gradient.

    Raises:
        TypeError: `nondiff_argnums` does not hold ints, the function is called before it has a rule
            or with keyword-only arguments, or the rule does not return a pair, or tangents of the
            dtypes of the output.
        ValueError: A position has no argument, or the tangents do not have the structure and shapes
            of the output.
        LookupError: When TensorFlow cannot compute a derivative from the rule: in reverse mode, if
            the rule is not linear in the tangents or passes them to the host; for higher
            derivatives, if the rule, or a part of it, is not connected to the primals. In graphs
            this is a `tf.errors.InvalidArgumentError` when the graph runs; around a `tf.function`
            and in XLA, the derivative is NaN.
    """
    positions: Sequence[Any] = (
        nondiff_argnums if isinstance(nondiff_argnums, (list, tuple)) else (nondiff_argnums,)
    )
    if not all(shapes.is_int(i) for i in positions):
        raise TypeError(f"nondiff_argnums must be an int or ints (positions), got {positions!r}.")
    if f is None:
        return functools.partial(custom_jvp, nondiff_argnums=positions)
    return calls.as_form(f, lambda f: _custom_jvp(f, positions), "defjvp")


def _custom_jvp(function: calls.Callee, nondiff_argnums: Sequence[int]) -> Function:
    name = function.name
    rule: Function | None = None

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Structure:
        if rule is None:
            raise TypeError(
                f"{name} has no JVP rule. Define one with the decorator @{name}.defjvp: a function "
                "jvp(primals, tangents) that returns (primal_out, tangent_out)."
            )
        nondiff, point = _point(function, nondiff_argnums, args, kwargs)
        f, jvp = converted(function.f), converted(rule)
        others = point.others()
        closure = Closure(lambda: others.own(f), others.xs)
        y = closure.result
        if not point.xs:
            return y
        outputs = [
            (path, structures.to_tensor(y_i, path))
            for path, y_i in structures.flatten(y, f"{name}(...)")
        ]
        ys, at = [y_i for _, y_i in outputs], point.read()
        # If the values have no derivatives of their own, TensorFlow would still differentiate all
        # of f, and some of its operations may have no gradient.
        is_live = tf.executing_eagerly() or any(
            ancestry.has_sources(y_i, point.stopped_xs, closure.before) for y_i in ys
        )
        made_of = closure.others(ys, point) if is_live else None

        def tangents_at(call: calls.Call, ts: Sequence[Tensor]) -> list[Tangent]:
            before = [call.args[i] for i in nondiff]
            result = jvp(*before, point.primals(call), point.tangents(ts))
            return [
                None if t is None else _checked(t, y_i, path)
                for (path, y_i), t in zip(outputs, _tangents(result, y, name), strict=True)
            ]

        def pulled(call: calls.Call, upstream: Sequence[Tensor]) -> list[Gradient]:
            if _is_transposing(form, nondiff, at):
                return _natural(point, f, upstream)
            ts = [adjoint.probe(x) for x in point.xs]
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(ts)
                moved = tangents_at(call, ts)
            pairs = [
                (t, u)
                for t, u in zip(moved, upstream, strict=True)
                if t is not None and u is not None
            ]
            lt, us = [t for t, _ in pairs], [u for _, u in pairs]
            with _transposing(form, nondiff, at):
                found = tape.gradient(lt, ts, output_gradients=us) if lt else [None] * len(ts)
                is_cut = _are_cut(tape, us, lt, ts)
            fits, message = adjoint.holds(us, lt, found, ts), _NOT_LINEAR.format(name)
            zero = loud.zero_if(fits, message, [*us, *lt])
            if us and (any(is_cut) or not tf.executing_eagerly()):
                # A missing gradient could not carry the error.
                found = [
                    tf.zeros_like(t) if g is None else g for g, t in zip(found, ts, strict=True)
                ]
            found = [None if g is None else g + tf.cast(zero, g.dtype) for g in found]
            return [
                embedding.refused(name, [g], us, message)[0] if c else g
                for g, c in zip(found, is_cut, strict=True)
            ]

        def gradients(
            us: Sequence[Tensor], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            return pulled(others.on(point.on(at, xs), passed), us)

        def pull(*upstream: Tensor) -> list[Gradient]:
            return pulled(at, upstream)

        def push(*tangents: Tensor) -> list[Tangent]:
            return tangents_at(at, tangents)

        derivative = Rule(name, pull, push, sources=point.xs)
        if made_of is not None:
            kept = mixed.keep_own(mixed.ByPoint(name, gradients, point.xs, made_of), ys, derivative)
        elif is_live:
            kept = keep(ys, [*ys, *point.xs], embedding.beside(derivative, len(ys)))
        else:
            kept = keep(ys, point.xs, derivative)
        return tf.nest.pack_sequence_as(y, kept)

    form = autograph.form(call)

    def defjvp(jvp: Function) -> Function:
        """Sets the rule; a decorator."""
        nonlocal rule
        inside = calls.unbound(jvp)
        if not callable(inside):
            raise TypeError(f"jvp must be a function, got {type(jvp).__name__}.")
        rule = inside
        return jvp

    form.defjvp = defjvp  # type: ignore[attr-defined]
    return form


def _point(
    function: calls.Callee, nondiff_argnums: Sequence[int], args: Args, kwargs: Kwargs
) -> tuple[list[int], calls.Selection]:
    """The positions of arguments without derivatives, and the others."""
    name, call = function.name, function.bind(args, kwargs)
    if call.kwargs:
        raise TypeError(
            f"{name} has the keyword-only arguments {list(call.kwargs)}, which JVP rules do not "
            "support. Make them positional."
        )
    own = function.own(call.args)
    count = len(call.args) - own
    for i in nondiff_argnums:
        if not -count <= i < count:
            raise ValueError(
                f"nondiff_argnums contains {i}, but the call of {name} has {count} positional "
                "arguments."
            )
    nondiff = [*range(own), *sorted(own + i % count for i in nondiff_argnums)]
    argnums = [i for i in range(count) if own + i not in nondiff]
    return nondiff, function.select(argnums, call.args, {})


_NOT_LINEAR = (
    "Reverse mode transposes the JVP rule of {0} by differentiating it with respect to the "
    "tangents, and the result is not the transpose: the rule is not linear in the tangents, or "
    "passes them to the host. Make it linear, or give the host call its own gradient with one of "
    "sgtrick's functions."
)


# The functions whose rules are being transposed. A linear function's rule may call the function on
# the tangents; transposing the rule of that call too would recurse for ever.
_NOW: ContextVar[frozenset[tuple[Function | int, ...]]] = ContextVar("_NOW", default=frozenset())


def _key(form: Function, nondiff: Sequence[int], at: calls.Call) -> tuple[Function | int, ...]:
    own = [id(at.args[i]) for i in nondiff if i == 0]
    return form, *own


def _is_transposing(form: Function, nondiff: Sequence[int], at: calls.Call) -> bool:
    return _key(form, nondiff, at) in _NOW.get()


@contextmanager
def _transposing(form: Function, nondiff: Sequence[int], at: calls.Call) -> Iterator[None]:
    token = _NOW.set(_NOW.get() | {_key(form, nondiff, at)})
    try:
        yield
    finally:
        _NOW.reset(token)


def _are_cut(
    tape: Tape, us: Sequence[Tensor], lt: Sequence[Tensor], ts: Sequence[Tensor]
) -> list[bool]:
    """Which parts of the transpose lack what the test at upstream gradients `us` does not show.

    The test says nothing where they are zero, as where only the derivative with respect to them is
    wanted.
    """
    if not tf.executing_eagerly():
        return lost.are_cut(lt, ts)
    fits = True
    if us and loud.are_zero(us):
        ws = list(map(adjoint.probe, us))
        fits = adjoint.holds(ws, lt, tape.gradient(lt, ts, output_gradients=ws), ts)
    return [not fits] * len(ts)


def _natural(point: calls.Selection, f: Function, upstream: Sequence[Tensor]) -> list[Gradient]:
    """The autodiff pullback of `f`, for the calls of `f` on tangents, in which it is linear."""
    xs = [tf.identity(x) for x in point.xs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(xs)
        ys = tf.nest.flatten(point.at(xs)(f))
    pairs = [(y, u) for y, u in zip(ys, upstream, strict=True) if u is not None]
    found = tape.gradient([y for y, _ in pairs], xs, output_gradients=[u for _, u in pairs])
    return list(found)


def _tangents(result: Structure, y: Tensor, name: str) -> list[Tangent]:
    """The leaves of `tangent_out`."""
    if not structures.is_pair(result):
        raise TypeError(
            f"jvp of {name} must return (primal_out, tangent_out), got {type(result).__name__}."
        )
    return [t for _, _, t in structures.pair(y, result[1], f"{name}(...)", "tangent_out")]


def _checked(tangent: Tensor, y: Tensor, path: str) -> Tensor:
    """A tangent, checked to have the dtype and shape of its output."""
    tangent, y = structures.to_tensor(tangent, f"the tangent of {path}"), tf.convert_to_tensor(y)
    if tangent.dtype != y.dtype or not structures.is_differentiable(y.dtype):
        raise TypeError(
            f"The tangent of {path} has dtype {tangent.dtype.name}, the output {y.dtype.name}. "
            "The two must be equal, and floating or complex. For an output without a derivative, "
            "return None."
        )
    return structures.shaped_like(tangent, y, f"The tangent of {path}", "the output")
