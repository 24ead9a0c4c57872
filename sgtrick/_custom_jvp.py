"""Functions with a rule for Jacobian-vector products, by the protocol of `jax.custom_jvp`."""

from __future__ import annotations  # signatures that show the names of types

import functools
from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf

from sgtrick._arguments import calls, jvp_protocol, structures
from sgtrick._arguments.structures import present
from sgtrick._core import adjoint, unknown
from sgtrick._core.adjoint import paired
from sgtrick._core.point import Selection, ValueAtPoint
from sgtrick._core.rule import is_for_graph, transposed_now, transposing
from sgtrick._tensorflow import autograph, graphs
from sgtrick._types import (
    Argnums,
    Args,
    Decorated,
    Function,
    Gradient,
    Kwargs,
    Structure,
    Tangent,
    Tensor,
)


def custom_jvp(f: Function | None = None, *, nondiff_argnums: Argnums = ()) -> Decorated:
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
        f: The function, with outputs of any structure, in which None stands for nothing. On
            methods, `self` does not count as an argument, and the rule is a method too.
        nondiff_argnums: The arguments that have no derivatives: positions or parameter names. The
            rule gets them first, in the order in which `f` declares them. One is the `name` of
            TensorFlow's functions: `custom_jvp(tf.sin, nondiff_argnums="name")`. Keyword-only
            arguments are always among them, and the rule gets them by keyword.

    Returns:
        The function, with the decorator `defjvp` for its rule
        `jvp(*nondiff, primals, tangents) -> (primal_out, tangent_out)`. `primals` is a tuple of the
        other arguments, with keywords turned into positions and defaults filled in; `tangents` has
        the same structure, with None for leaves without derivatives (int, bool, string);
        `tangent_out` has the structure, shapes and dtypes of the output, with None where there is
        no derivative. A keyword-only argument is passed by keyword, if the rule can take it; it
        has to, unless the argument has its default. The value is always that of `f`: `primal_out`
        is None, or has to look like it, and its numbers are ignored. The rule is called
        only when a derivative is requested. Reverse mode transposes it, and tests the transpose at
        fixed pseudo-random tangents, for which it calls the rule twice, and once more if TensorFlow
        connects an argument to nothing. Higher derivatives are those of the rule, as TensorFlow
        differentiates it; in eager execution, they trace the rule.
        The rule may call the function itself, in a `tf.function`, branch or loop too; there, a
        derivative of the result is an error or NaN. Variables that `f` reads, and tensors that it
        closes over, keep their autodiff gradient; a derivative with respect to these that is
        differentiated with respect to the point is an error, and the other order is right.

    Raises:
        TypeError: `nondiff_argnums` holds neither ints nor names, the function is called before it
            has a rule or with nothing numeric among its arguments, or the rule cannot take a
            keyword-only argument, or does not return a pair, or tangents or a `primal_out` of the
            dtypes of the output.
        ValueError: `nondiff_argnums` does not name an argument, or the tangents or `primal_out` do
            not have the structure and shapes of the output.
        LookupError: In reverse mode, if the rule is not linear in the tangents or passes them to
            the host. For higher derivatives, if a gradient is connected to nothing with respect to
            which it could be differentiated, if a host call computes it, or if the rule cannot be
            traced. In graphs this is a `tf.errors.InvalidArgumentError` when the graph runs; around
            a `tf.function` and in XLA, the derivative is NaN.
    """
    calls.as_keys(nondiff_argnums, "nondiff_argnums")
    if f is None:
        return functools.partial(custom_jvp, nondiff_argnums=nondiff_argnums)
    return calls.as_form(f, lambda f: _custom_jvp(f, nondiff_argnums), "defjvp")


def _custom_jvp(function: calls.Callee, nondiff_argnums: Argnums) -> Function:
    name = function.name
    rule: calls.Callee | None = None

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Structure:
        if rule is None:
            raise TypeError(
                f"{name} has no JVP rule. Define one with the decorator @{name}.defjvp: a function "
                "jvp(primals, tangents) that returns (primal_out, tangent_out)."
            )
        nondiff, point = _point(function, nondiff_argnums, args, kwargs)
        f, jvp = converted(function.f), converted(rule.f)
        keywords = jvp_protocol.keywords_of(function, rule, point.call)
        at, graph = point.read(), tf.compat.v1.get_default_graph()
        # Methods of different objects are different functions.
        key = form, *map(id, at.values[: function.receivers(at.values)])
        called = ValueAtPoint.of(name, point, f)
        y = called.result
        if not point.xs:
            point.check_numbers(name)
            return y
        ys = jvp_protocol.outputs_of(y, name, point.call)
        like = structures.pack_present(y, ys)

        def tangents_at(call: calls.Call, ts: Sequence[Tensor]) -> list[Tangent]:
            before = [call.values[i] for i in nondiff if i < call.positional]
            named = {key: call.values[i] for key, i in keywords().items()}
            result = jvp(*before, point.primals(call), point.tangents(ts), **named)
            return jvp_protocol.tangents_of(result, like, name)

        def pulled(call: calls.Call, upstream: Sequence[Tensor | None]) -> list[Gradient]:
            # A rule may call its function: on primals, or on tangents where the function is linear.
            # Transposing the rule of that call too would recurse for ever.
            now, others = transposed_now(key), _without_derivatives(nondiff, at)
            if now.get(others) is graph:
                return _by_autodiff(point, f, upstream)
            if others in now or (now and is_for_graph()):
                # TensorFlow differentiates a function that the rule calls by primals, too.
                return unknown.failures(point.xs, _IN_FUNCTION.format(name), present(upstream))
            with transposing(key, others, tf.compat.v1.get_default_graph()):
                found, fits, of = adjoint.transpose(
                    lambda ts: tangents_at(call, ts), point.xs, upstream
                )
            if not of:
                return found
            known = unknown.known_if(fits, _NOT_LINEAR.format(name), found, point.xs, of)
            if tf.executing_eagerly() or ongoing.is_probe():
                return [None if g is None else k for g, k in zip(found, known, strict=True)]
            return list(known)  # a missing gradient could not carry the error

        def gradients(
            us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            return pulled(called.at(at, xs, passed), us)

        def tangents(ts: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tangent]:
            n = len(point.xs)
            return tangents_at(called.at(at, inputs[:n], inputs[n:]), ts)

        kept = called.embed(
            ys,
            gradients,
            known=lambda *upstream: pulled(at, upstream),
            push=lambda *ts: tangents_at(at, ts),
            tangents=tangents,
        )
        return structures.pack_present(like, kept)

    form = autograph.form(call)

    def defjvp(jvp: Function) -> Function:
        """Sets the rule; a decorator."""
        nonlocal rule
        rule = calls.Callee(jvp_protocol.rule_of(jvp))
        return jvp

    form.defjvp = defjvp  # type: ignore[attr-defined]
    return form


def _point(
    function: calls.Callee, nondiff_argnums: Argnums, args: Args, kwargs: Kwargs
) -> tuple[list[int], Selection]:
    """The positions of arguments without derivatives, and the others."""
    call = function.bind(args, kwargs)
    own, n = range(function.receivers(call.values)), call.positional
    stated = sorted(function.positions(nondiff_argnums, call, "nondiff_argnums"))
    nondiff = [*own, *(k for k in stated if k < n), *range(n, len(call.values))]
    others = [i for i in range(n) if i not in nondiff]
    return nondiff, Selection(call, others, function.names(call))


_NOT_LINEAR = (
    "Reverse mode transposes the JVP rule of {0} by differentiating it with respect to the "
    "tangents, and the result is not the transpose: the rule is not linear in the tangents, or "
    "passes them to the host. Make it linear, or give the host call its own gradient with one of "
    "sgtrick's functions."
)


def _without_derivatives(nondiff: Sequence[int], at: calls.Call) -> tuple[Hashable, ...]:
    """What tells calls with other `nondiff_argnums` apart: functions by identity."""
    leaves = [leaf for i in nondiff for _, leaf in at.flat[i]]
    return tuple(v if isinstance(v, (int, float, str)) else id(v) for v in leaves)


def _by_autodiff(
    point: Selection, f: Function, upstream: Sequence[Tensor | None]
) -> list[Gradient]:
    """The autodiff pullback of `f`, for the calls of `f` on tangents, in which it is linear."""
    xs = [tf.identity(x) for x in point.xs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(xs)
        ys = present(tf.nest.flatten(point.at(xs)(f)))
    ys, us = paired(ys, upstream)
    return list(tape.gradient(ys, xs, output_gradients=us))


_IN_FUNCTION = (
    "The JVP rule of {0} calls {0} in a tf.function, branch or loop, and the result of that call "
    "was differentiated. Call {0} outside of it, or compute the value without {0}."
)
