"""Functions with a rule for Jacobian-vector products, by the protocol of `jax.custom_jvp`."""

from __future__ import annotations  # signatures that show the names of types

import contextlib
import functools
from collections.abc import Hashable, Sequence

import tensorflow as tf

from sgtrick._arguments import calls, jvp_protocol, structures
from sgtrick._arguments.structures import present
from sgtrick._core import adjoint, unknown
from sgtrick._core.adjoint import paired
from sgtrick._core.covered import CoveredArguments
from sgtrick._core.stopped_point import ValueAtPoint
from sgtrick._tensorflow import autograph, ongoing
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
    return calls.as_form(f, lambda f: _CustomJvp(f, nondiff_argnums).form, "defjvp")


class _CustomJvp:
    """A function, its JVP rule, and which arguments have no derivatives."""

    def __init__(self, function: calls.Callee, nondiff_argnums: Argnums) -> None:
        self.function, self.nondiff_argnums = function, nondiff_argnums
        self._rule: calls.Callee | None = None
        self.form = autograph.form(self.__call__)
        self.form.defjvp = self.defjvp  # type: ignore[attr-defined]

    def __call__(self, converted: autograph.Converted, args: Args, kwargs: Kwargs) -> Structure:
        """The value of a call, whose derivatives are those of the rule."""
        name = self.function.name
        if self._rule is None:
            raise TypeError(
                f"{name} has no JVP rule. Define one with the decorator @{name}.defjvp: a function "
                "jvp(primals, tangents) that returns (primal_out, tangent_out)."
            )
        return _Evaluation(self, self._rule, converted, args, kwargs).value()

    def defjvp(self, jvp: Function) -> Function:
        """Sets the rule; a decorator."""
        self._rule = calls.Callee(jvp_protocol.rule_of(jvp))
        return jvp


class _Evaluation:
    """The function at a stopped point, and its rule and the transpose of that at any point."""

    def __init__(
        self,
        form: _CustomJvp,
        rule: calls.Callee,
        converted: autograph.Converted,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        function, self._name = form.function, form.function.name
        call = function.bind(args, kwargs)
        receivers, n = function.receivers(call.values), call.positional
        stated = sorted(function.positions(form.nondiff_argnums, call, "nondiff_argnums"))
        by_position = [*range(receivers), *(k for k in stated if k < n)]
        others = [i for i in range(n) if i not in by_position]
        self._nondiff = [*by_position, *range(n, len(call.values))]
        self._covered = CoveredArguments(call, others, function.names(call))
        self._f, self._jvp = converted(function.f), converted(rule.f)
        self._keywords = jvp_protocol.keywords_of(function, rule, call)
        self._frozen, self._graph = self._covered.read(), tf.compat.v1.get_default_graph()
        # Methods of different objects are different functions.
        self._key = form, *map(id, self._frozen.values[:receivers])
        self._at_point = ValueAtPoint.of(self._name, self._covered, self._f)

    def value(self) -> Structure:
        """The value, with the derivatives of the rule."""
        y = self._at_point.result
        if not self._covered.xs:
            self._covered.check_numbers(self._name)
            return y
        ys = jvp_protocol.outputs_of(y, self._name, self._covered.call)
        self._like = structures.pack_present(y, ys)
        # A call in the function's own rule is seldom differentiated.
        is_in_rule = bool(ongoing.transposed_now(self._key))
        with ongoing.not_tracing_pullbacks() if is_in_rule else contextlib.nullcontext():
            kept = self._at_point.attach_rule(
                ys,
                self.pull_from,
                known=lambda *us: self._pull(self._frozen, us),
                push=lambda *ts: self._push(self._frozen, ts),
                tangents=self.push_from,
            )
        return structures.pack_present(self._like, kept)

    def push_from(self, ts: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tangent]:
        """The tangents of the outputs, at another point and with other arguments beside it."""
        n = len(self._covered.xs)
        return self._push(self._at_point.with_xs(self._frozen, inputs[:n], inputs[n:]), ts)

    def pull_from(
        self, us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
    ) -> list[Gradient]:
        """The gradients at another point and with other arguments beside it."""
        return self._pull(self._at_point.with_xs(self._frozen, xs, passed), us)

    def _push(self, call: calls.Call, ts: Sequence[Tensor]) -> list[Tangent]:
        """What the rule returns for the arguments of a call."""
        before = [call.values[i] for i in self._nondiff if i < call.positional]
        named = {key: call.values[i] for key, i in self._keywords().items()}
        primals, tangents = self._covered.primals(call), self._covered.tangents(ts)
        result = self._jvp(*before, primals, tangents, **named)
        return jvp_protocol.tangents_of(result, self._like, self._name)

    def _pull(self, call: calls.Call, upstream: Sequence[Tensor | None]) -> list[Gradient]:
        """The transpose of what the rule returns for the arguments of a call."""
        # A rule may call its function: on primals, or on tangents where the function is linear.
        # Transposing the rule of that call too would recurse for ever.
        now, others, xs = (
            ongoing.transposed_now(self._key),
            self._without_derivatives(),
            self._covered.xs,
        )
        if now.get(others) is self._graph:
            return self._pull_by_autodiff(upstream)
        if others in now or (now and ongoing.is_for_graph()):
            # TensorFlow differentiates a function that the rule calls by primals, too.
            return unknown.gradients(xs, _IN_FUNCTION.format(self._name), present(upstream))
        with ongoing.transposing(self._key, others, tf.compat.v1.get_default_graph()):
            found, fits, of = adjoint.transpose(lambda ts: self._push(call, ts), xs, upstream)
        if not of:
            return found
        known = unknown.known_if(fits, _NOT_LINEAR.format(self._name), found, xs, of)
        if tf.executing_eagerly() or ongoing.is_probe():
            return [None if g is None else k for g, k in zip(found, known, strict=True)]
        return list(known)  # a missing gradient could not carry the error

    def _pull_by_autodiff(self, upstream: Sequence[Tensor | None]) -> list[Gradient]:
        """The pullback of the function itself, for its calls on tangents, in which it is linear."""
        xs = [tf.identity(x) for x in self._covered.xs]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(xs)
            ys = present(tf.nest.flatten(self._covered.with_xs(xs)(self._f)))
        ys, us = paired(ys, upstream)
        return list(tape.gradient(ys, xs, output_gradients=us))

    def _without_derivatives(self) -> tuple[Hashable, ...]:
        """What tells calls with other `nondiff_argnums` apart: functions by identity."""
        leaves = [leaf for i in self._nondiff for _, leaf in self._frozen.flat[i]]
        return tuple(v if isinstance(v, (int, float, str)) else id(v) for v in leaves)


_NOT_LINEAR = (
    "Reverse mode transposes the JVP rule of {0} by differentiating it with respect to the "
    "tangents, and the result is not the transpose: the rule is not linear in the tangents, or "
    "passes them to the host. Make it linear, or give the host call its own gradient with one of "
    "sgtrick's functions."
)


_IN_FUNCTION = (
    "The JVP rule of {0} calls {0} in a tf.function, branch or loop, and the result of that call "
    "was differentiated. Call {0} outside of it, or compute the value without {0}."
)
