"""Mixed second derivatives: first by what a rule does not cover, then by the point.

In the terms of `partial`, TensorFlow computes the gradient `(df/dw)' u` at a stopped point, so its
derivative by `x` is missing. But second derivatives are symmetric: for every direction `t` of `w`,

    d/dx <(df/dw)' u, t>  =  d/dx d/dw <f, u> [t]  =  dG/dw [t]

and the right-hand side only involves the rule. So to each gradient with respect to `w` a zero is
added, whose gradient with respect to `x` is `dG/dw [t]` for a cotangent `t`; and to each tangent
`df/dw [t]` one whose gradient with respect to `x` is the same, for a cotangent `u`.

These zeros know their first derivatives by `x` only. What else could be missed is of third order,
such as `d/dx` of `d2f/dw2`, and is an error.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments.nones import present
from sgtrick._core import adjoint, unknown
from sgtrick._core.adjoint import paired
from sgtrick._core.guard import Check, message
from sgtrick._core.override import keep, pass_on
from sgtrick._core.rule import Rule
from sgtrick._core.transposition import transposed
from sgtrick._tensorflow import graphs
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import Gradient, Pullback, Pushforward, Tangent, Tensor, Variable

# `G`: from upstream gradients, the point, and the other tensors that are passed explicitly.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class Uncovered(NamedTuple):
    """`w`: what values depend on besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors, followed by variables, that the gradients may close over.
        is_complete: Whether the values depend on nothing else.
        of_host: Tensors that only calls of the host got. The values have no derivatives by them.
    """

    passed: Sequence[Tensor]
    closed: Sequence[Tensor | Variable] = ()
    is_complete: bool = True
    of_host: Sequence[Tensor] = ()

    @classmethod
    def of(cls, passed: Sequence[Tensor], used: Uses) -> "Uncovered":
        """What was passed to a function, and what else it used."""
        # The gradient of a table that is gathered from is sparse, and a zero would be dense.
        dense = [v for v in used.variables if not any(v is t for t in used.tables)]
        is_complete = not (used.tables or used.has_lists or used.has_fixed)
        # As the gradients see it, which may be called in other graphs.
        closed = [*map(graphs.outside, used.tensors), *dense]
        return cls(passed, closed, is_complete, used.of_host)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.passed or self.closed or not self.is_complete)

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
    others: Uncovered
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

        def pull(vs: Sequence[Tensor]) -> list[Gradient]:
            gs, of_gs = paired(gradients, vs)
            return list(tape.gradient(gs, ws, of_gs))

        found, fits, of = adjoint.transpose(pull, stopped, tangents)
        # Linear in `v`, unless the gradients contain a rule that is not.
        of = [*present(us), *of]
        return [*unknown.known_if(fits, _NOT_LINEAR.format(self.name), found, stopped, of)]


def zeros(
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
        along = unknown.unless_refused(
            lambda: point.along_others(us, tangents),
            xs[: point.stopped],
            present(zs),
            message(name),
        )
        by_xs: list[Gradient] = []
        for i, (x, g) in enumerate(zip(xs[: point.stopped], along, strict=True)):
            why = point.check.missing(closed, i).by_inputs
            by_xs.append(unknown.failure(x, why, present(zs)) if why else g)
        of = [*given, *others.tensors]
        rest = xs[point.stopped :]
        likes = (*given, *others.tensors, *rest)
        zeros = [_without_third(t, present(zs), of, xs, beyond) for t in likes]
        count = len(zeros) - len(rest)
        return [*zeros[:count], *by_xs, *zeros[count:]]

    def push(*tangents: Tangent) -> list[Tangent]:
        of_others = len(tangents) - len(xs)
        of_xs = [*[None] * of_others, *tangents[of_others:]]
        moved = transposed(Rule(name, pull), zeros, of_xs)
        moving, of = present(tangents), [*given, *others.tensors]
        return [t if t is None else t + _without_third(t, moving, of, xs, beyond) for t in moved]

    beyond = _BEYOND.format(name)
    zeros = [tf.zeros_like(t) for t in likes]
    if not zeros:
        return zeros
    return keep(zeros, [*given, *others.tensors, *xs], Rule(name, pull, push))


def _without_third(
    like: Tensor, zs: Sequence[Tensor], of: Sequence[Tensor], xs: Sequence[Tensor], message: str
) -> Tensor:
    """Zeros like a tensor, whose derivatives by `zs` and `of` are zeros, and by `xs` an error.

    They stand where a derivative by `of` is zero. The derivative of that by `xs` is one of third
    order, which is not known. It is linear in `zs`, so where these are zero, so is it.
    """
    n, m = len(zs), len(zs) + len(of)

    def derivatives(zero: Tensor, inputs: Sequence[Tensor]) -> tuple[Pullback, Pushforward]:
        zs, of, xs = inputs[:n], inputs[n:m], inputs[m:]

        def pull(z: Tensor) -> list[Gradient]:
            zeros = [_without_third(t, [z], [*zs, *of], xs, message) for t in (*zs, *of)]
            known = unknown.are_zero(zs)
            z = tf.where(known, tf.zeros_like(z), z)
            return [None, *zeros, *unknown.failures(xs, message, [z])]

        def push(_: Tangent, *tangents: Tangent) -> list[Tangent]:
            along = _without_third(zero, present(tangents), [*zs, *of], xs, message)
            of_xs = present(tangents[m:])
            return unknown.unless_moving(message, [along], of_xs, xs) if of_xs else [along]

        return pull, push

    return pass_on(tf.zeros_like(like), [*zs, *of, *xs], derivatives)


_NOT_LINEAR = (
    "A mixed derivative of {0} is unknown: its gradient contains a custom gradient that is not "
    "linear in its upstream gradient, so it cannot be transposed. Differentiate with respect to "
    "the arguments first, or make it linear."
)

_BEYOND = (
    "A mixed derivative of {0} of third or higher order is unknown: its derivative with respect to "
    "something that its rule does not cover was differentiated with respect to its arguments, and "
    "again. Differentiate with respect to the arguments first."
)
