"""Values whose derivatives a rule gives by a point `x`, and TensorFlow by everything else.

Let `y = f(x, w)`: a rule covers `x`; `w` are other arguments, variables and tensors that `f` closes
over. The value is computed at a stopped point, and TensorFlow differentiates it with respect to `w`
as ever. The rule gives the gradient with respect to the point, as a function of everything::

    G(u, x, w) = (df/dx)' u

So the outputs are the values at the stopped point, whose own derivatives are passed on, overridden
with the rule. What TensorFlow computes at the stopped point does not depend on the point. So to
each first derivative by `w` a zero is added, whose derivative by `x` is an error.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments.nones import present, spread
from sgtrick._core.guard import Check, ExplicitRule, guarded
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule, in_addition, plus
from sgtrick._core.unknown import refuse
from sgtrick._tensorflow import tapes
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import Gradient, Pushforward, Tangent, Tensor

# `G`: from upstream gradients, the point, and the other tensors that are passed explicitly.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class Uncovered(NamedTuple):
    """`w`: what values depend on besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors that the values depend on besides, and the values of variables.
        has_lists: Whether they depend on a list of tensors, too.
        of_host: Tensors that only calls of the host got. The values have no derivatives by them.
    """

    passed: Sequence[Tensor]
    closed: Sequence[Tensor] = ()
    has_lists: bool = False
    of_host: Sequence[Tensor] = ()

    @classmethod
    def of(cls, passed: Sequence[Tensor], used: Uses) -> "Uncovered":
        """What was passed to a function, and what else it used."""
        # Of a table that is gathered from, the rows: its gradient is sparse, and a zero like the
        # table would be dense.
        tables = set(map(id, used.tables))
        dense = [tf.convert_to_tensor(v) for v in used.variables if id(v) not in tables]
        fixed = list(map(tapes.value_of, used.fixed))
        closed = [*used.tensors, *dense, *fixed, *used.rows]
        return cls(passed, closed, used.has_lists, used.of_host)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.passed or self.closed or self.has_lists)

    @property
    def tensors(self) -> list[Tensor]:
        """All that are known."""
        return [*self.passed, *self.closed]


def embed(
    name: str,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    others: Uncovered,
    gradients: PointGradients,
    known: Callable[..., Sequence[Gradient]] | None = None,
    push: Pushforward | None = None,
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
        tangents: `push` for any arguments, if the gradients are its transpose.
    """
    xs = list(xs)

    def explicit(us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Gradient]:
        return gradients(us, inputs[: len(xs)], inputs[len(xs) :])

    def pull_to_point(*us: Tensor | None) -> Sequence[Gradient]:
        return known(*us) if known else gradients(us, xs, others.passed)

    is_jvp = tangents is not None
    check = Check(
        name, tangents or explicit, xs if is_jvp else ys, [*xs, *others.passed], is_jvp=is_jvp
    )
    covered_and_not = [*xs, *others.tensors]
    rule = guarded(Rule(name, pull_to_point, push), check, ys, [*covered_and_not, *others.of_host])
    if not others:
        if tf.executing_eagerly():  # something may be recorded all the same
            return keep(ys, [*ys, *xs], in_addition(rule, len(ys)))
        return keep(ys, xs, rule)
    message = _MIXED.format(name)

    def pull(*us: Tensor | None) -> list[Gradient]:
        by_xs = rule.pull(*us)
        if tf.executing_eagerly() and not tapes.somebody_records():
            return [*us, *by_xs, *[None] * len(others.tensors)]
        live = known_part(present(us))
        return [*spread(live, us), *by_xs, *refused_zeros(others.tensors, live)]

    def pushed(*tangents: Tangent) -> list[Tangent]:
        n, m = len(ys), len(ys) + len(xs)
        # of_ys are the tangents along the others, which TensorFlow computed at the stopped point.
        of_ys, of_xs, of_others = tangents[:n], tangents[n:m], present(tangents[m:])
        assert callable(rule.push)
        moved = plus(of_ys, rule.push(*of_xs))
        if not of_others:
            return moved
        live = known_part(present(moved))
        zeros = refused_zeros(live, of_others)
        return spread([t + z for t, z in zip(live, zeros, strict=True)], moved)

    def refused_zeros(likes: Sequence[Tensor], along: Sequence[Tensor]) -> list[Tensor]:
        """Zeros, to be added to derivatives by the others, which are linear in some tensors."""
        known = [*others.tensors, *along]
        why = [*[message] * len(xs), *[None] * len(known)]
        return [refuse(tf.zeros_like(t), [*xs, *known], lambda: why, len(along)) for t in likes]

    def known_part(tensors: Sequence[Tensor]) -> list[Tensor]:
        """Upstream gradients or tangents; an error if what is unknown of them is asked for."""
        # There is no zero like a list of tensors.
        return [refuse(t, xs, message) if others.has_lists else t for t in tensors]

    rule_of_all = rule._replace(pull=pull, push=pushed)
    return keep(ys, [*ys, *covered_and_not], rule_of_all)


_MIXED = (
    "A mixed derivative of {0} is unknown: its derivative with respect to something that its rule "
    "does not cover (another argument, or what it closes over) was differentiated with respect to "
    "the arguments that the rule covers. Let the rule cover both: pass the former as an argument "
    "that is among argnums. Or differentiate with respect to the covered arguments first."
)
