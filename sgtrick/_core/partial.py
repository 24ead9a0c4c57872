"""Values whose derivatives a rule gives by a point `x`, and TensorFlow by everything else.

Let `y = f(x, w)`: a rule covers `x`; `w` are other arguments, variables and tensors that `f` closes
over. The value is computed at a stopped point, and TensorFlow differentiates it with respect to `w`
as ever. The rule gives the gradient with respect to the point, as a function of everything::

    G(u, x, w) = (df/dx)' u

One thing is missing: the derivative by `x` of the gradient `(df/dw)' u` that TensorFlow computes at
the stopped point. But second derivatives are symmetric: for every direction `t` of `w`,

    d/dx <(df/dw)' u, t>  =  d/dx d/dw <f, u> [t]  =  dG/dw [t]

and the right-hand side only involves the rule. So to each gradient with respect to `w` a zero is
added, whose gradient with respect to `x` is `dG/dw [t]` for a cotangent `t`; and to each tangent
`df/dw [t]` one whose gradient with respect to `x` is the same, for a cotangent `u`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import loud
from sgtrick._core._tensorflow import graphs, tapes
from sgtrick._core._tensorflow.uses import Uses
from sgtrick._core.absent import present, spread
from sgtrick._core.guard import Check, ExplicitRule, guarded, message, unknown_by
from sgtrick._core.override import keep, pass_on
from sgtrick._core.rule import Rule
from sgtrick._core.transposition import Paired, paired, transpose, transposed
from sgtrick._core.types import Gradient, Pullback, Pushforward, Tangent, Tensor, Variable

# `G`: from upstream gradients, the point, and the other tensors that are passed explicitly.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class Others(NamedTuple):
    """`w`: what values depend on besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors, followed by variables, that the gradients may close over.
        is_all: Whether the values depend on nothing else.
    """

    passed: Sequence[Tensor]
    closed: Sequence[Tensor | Variable] = ()
    is_all: bool = True

    @classmethod
    def of(cls, passed: Sequence[Tensor], used: Uses) -> "Others":
        """What was passed to a function, and what else it used."""
        # The gradient of a table that is gathered from is sparse, and a zero would be dense.
        dense = [v for v in used.variables if not any(v is t for t in used.tables)]
        is_all = not (used.tables or used.has_lists or used.has_fixed)
        # As the gradients see it, which may be called in other graphs.
        return cls(passed, [*map(graphs.outside, used.tensors), *dense], is_all)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.passed or self.closed or not self.is_all)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, with the values of the variables."""
        return [*self.passed, *(tf.convert_to_tensor(graphs.as_used(c)) for c in self.closed)]


class ByPoint(NamedTuple):
    """The gradients of values with respect to their point.

    Attributes:
        name: The function's name in errors.
        gradients: `G`.
        xs: The point.
        others: What else the values depend on.
        check: Finds out what TensorFlow would lose of the gradients.
        stopped: How many of `xs` were stopped where the values were computed.
    """

    name: str
    gradients: PointGradients
    xs: Sequence[Tensor]
    others: Others
    check: Check
    stopped: int

    def along_others(
        self, us: Sequence[Tensor | None], tangents: Sequence[Tangent]
    ) -> list[Gradient]:
        """Returns `dG/dw [t]`: the derivative of the gradients along tangents of the others.

        Tapes only differentiate backwards, so this takes two: first `v -> (dG/dw)' v`, which is
        linear in `v`, so any `v` will do; then this with respect to `v`, for the cotangents `t`.
        It is tested at another `v`.
        """
        stopped = self.xs[: self.stopped]
        # A tensor that a graph has captured before is not recorded when it is used again, and equal
        # tensors have to be told apart.
        xs = [tf.identity(x) for x in self.xs]
        passed = [tf.identity(t) for t in self.others.passed]
        ws = [*passed, *(graphs.as_used(c) for c in self.others.closed)]
        with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
            tape.watch(ws)
            gradients = self.gradients(us, xs, passed)[: self.stopped]

        def pull(vs: Sequence[Tensor]) -> Paired:
            gs, of_gs = paired(gradients, vs)
            return paired(tape.gradient(gs, ws, of_gs), tangents)

        found, fits, (_, ts) = transpose(pull, stopped)
        # Linear in `v`, unless the gradients contain a rule that is not.
        zero = loud.zero_if(fits, _NOT_LINEAR.format(self.name), [*present(us), *ts])
        return [g + tf.cast(zero, g.dtype) for g in found]


def embed(
    name: str,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    others: Others,
    gradients: PointGradients,
    known: Callable[..., Sequence[Gradient]] | None = None,
    push: Pushforward | None = None,
    stopped: int | None = None,
    tangents: ExplicitRule | None = None,
) -> list[Tensor]:
    """Returns `ys`, with their own derivatives and those with respect to a point.

    Args:
        name: The function's name in errors.
        ys: The values at a stopped point.
        xs: The point.
        others: What else they depend on.
        gradients: `G`, for any arguments.
        known: The same for the arguments of this call, from upstream gradients alone.
        push: From tangents of the point to tangents of `ys`; None to transpose the gradients.
        stopped: How many of `xs` were stopped where `ys` were computed; None for all. The others
            have mixed derivatives already.
        tangents: `push` for any arguments, if it may pass tangents to the host.
    """
    xs = list(xs)

    def explicit(us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Gradient]:
        return gradients(us, inputs[: len(xs)], inputs[len(xs) :])

    def pull_to_point(*us: Tensor | None) -> Sequence[Gradient]:
        return known(*us) if known else gradients(us, xs, others.passed)

    check = Check(name, explicit, [*xs, *others.passed])
    of_tangents = tangents and Check(name, tangents, [*xs, *others.passed])
    inputs = [*xs, *others.tensors]
    rule = guarded(Rule(name, pull_to_point, push), check, ys, inputs, of_tangents)
    if not others:
        if tf.executing_eagerly():  # something may be recorded all the same
            return keep(ys, [*ys, *xs], beside(rule, len(ys)))
        return keep(ys, xs, rule)
    count = len(xs) if stopped is None else stopped
    point = ByPoint(name, gradients, xs, others, check, count)

    def pull(*us: Tensor | None) -> list[Gradient]:
        by_xs = rule.pull(*us)
        if tf.executing_eagerly() and not tapes.somebody_records():
            return [*us, *by_xs, *[None] * (len(inputs) - len(ys) - len(xs))]
        live = known_part(present(us))
        zeros = _zeros(point, others.tensors, live, lambda ts: (us, ts))
        return [*spread(live, us), *by_xs, *zeros]

    def pushed(*tangents: Tangent) -> list[Tangent]:
        # of_ys are the tangents along the others, which TensorFlow computed at the stopped point.
        of_ys, of_xs = tangents[: len(ys)], tangents[len(ys) : len(ys) + len(xs)]
        of_others = tangents[len(ys) + len(xs) :]
        assert callable(rule.push)
        moved = _plus(of_ys, rule.push(*of_xs))
        if not present(of_others):
            return moved
        live = known_part(present(moved))
        zeros = _zeros(point, live, present(of_others), lambda us: (spread(us, moved), of_others))
        return spread([t + z for t, z in zip(live, zeros, strict=True)], moved)

    def known_part(tensors: Sequence[Tensor]) -> list[Tensor]:
        """Upstream gradients or tangents; an error if what is unknown of them is asked for."""
        message = _ELSEWHERE.format(name)
        return [t if others.is_all else unknown_by(t, xs, message) for t in tensors]

    def guard(
        moved: Sequence[Tangent], tangents: Sequence[Tangent], inputs: Sequence[Tensor]
    ) -> list[Tangent]:
        assert rule.guard
        return rule.guard(moved, tangents[len(ys) :], inputs[len(ys) :])

    inputs = [*ys, *xs, *others.tensors]
    return keep(ys, inputs, Rule(name, pull, pushed, guard, transposes=rule.transposes))


def _zeros(
    point: ByPoint,
    likes: Sequence[Tensor],
    given: Sequence[Tensor],
    arguments: Callable[[Sequence[Tangent]], tuple[Sequence[Tensor | None], Sequence[Tangent]]],
) -> list[Tensor]:
    """Zeros like some tensors, whose gradients by the point are `dG/dw [t]`.

    Args:
        point: The point.
        likes: The tensors.
        given: What else the zeros depend on, besides the point and the others.
        arguments: From cotangents of the zeros to the arguments of `along_others`.
    """
    name, xs, others = point.name, point.xs, point.others
    closed = [c for c in others.closed if isinstance(c, tf.Tensor)]

    def pull(*zs: Tensor | None) -> list[Gradient]:
        us, tangents = arguments(zs)
        along = loud.unless_refused(
            lambda: point.along_others(us, tangents),
            xs[: point.stopped],
            present(zs),
            message(name),
        )
        by_xs: list[Gradient] = []
        for i, (x, g) in enumerate(zip(xs, along, strict=False)):
            why = point.check.lost(us, closed, i).by_inputs
            by_xs.append(loud.failure(x, why, present(zs)) if why else g)
        of = [*present(zs), *given, *others.tensors]
        rest = xs[point.stopped :]
        unknown = [_unknown(t, of, xs, beyond) for t in (*given, *others.tensors, *rest)]
        known = len(unknown) - len(rest)
        return [*unknown[:known], *by_xs, *unknown[known:]]

    def push(*tangents: Tangent) -> list[Tangent]:
        of_xs = [*[None] * (len(tangents) - len(xs)), *tangents[-len(xs) :]]
        moved = transposed(Rule(name, pull), zeros, of_xs)
        of = [*present(tangents), *given, *others.tensors]
        return [t if t is None else t + _unknown(t, of, xs, beyond) for t in moved]

    beyond = _BEYOND.format(name)
    zeros = [tf.zeros_like(t) for t in likes]
    if not zeros:
        return zeros
    return keep(zeros, [*given, *others.tensors, *xs], Rule(name, pull, push))


def _unknown(like: Tensor, of: Sequence[Tensor], xs: Sequence[Tensor], message: str) -> Tensor:
    """Zeros like a tensor: of their derivatives by `of`, and of these, that by `xs` is an error."""
    n = len(of)

    def derivatives(zero: Tensor, inputs: Sequence[Tensor]) -> tuple[Pullback, Pushforward]:
        of, xs = inputs[:n], inputs[n:]

        def pull(z: Tensor) -> list[Gradient]:
            zeros = [_unknown(t, [z, *of], xs, message) for t in of]
            return [None, *zeros, *loud.failures(xs, message, [z])]

        def push(_: Tangent, *tangents: Tangent) -> list[Tangent]:
            along = _unknown(zero, [*present(tangents), *of], xs, message)
            of_xs = present(tangents[n:])
            return loud.unless_moving(message, [along], of_xs, xs) if of_xs else [along]

        return pull, push

    return pass_on(tf.zeros_like(like), [*of, *xs], derivatives)


def beside(rule: Rule, count: int = 1) -> Rule:
    """The rule of `count` values that keep their own derivatives in addition to those of `rule`."""

    def pull(*upstream: Tensor) -> list[Gradient]:
        return [*upstream, *rule.pull(*upstream)]

    def push(*tangents: Tangent) -> list[Tangent]:
        assert callable(rule.push)
        return _plus(tangents[:count], rule.push(*tangents[count:]))

    return rule._replace(pull=pull, push=push)


def _plus(a: Sequence[Tangent], b: Sequence[Tangent]) -> list[Tangent]:
    return [q if p is None else p if q is None else p + q for p, q in zip(a, b, strict=True)]


_NOT_LINEAR = (
    "A mixed derivative of {0} is unknown: its gradient contains a custom gradient that is not "
    "linear in its upstream gradient, so it cannot be transposed. Differentiate with respect to "
    "the arguments first, or make it linear."
)

_ELSEWHERE = (
    "A mixed derivative of {0} is unknown: its derivative with respect to something that it closes "
    "over was differentiated with respect to its arguments. Pass what it closes over as an "
    "argument; or differentiate with respect to the arguments first."
)

_BEYOND = (
    "A mixed derivative of {0} of third or higher order is unknown: its derivative with respect to "
    "something that its rule does not cover was differentiated with respect to its arguments, and "
    "again. Differentiate with respect to the arguments first."
)
