"""Values whose derivatives a rule gives by a point `x`, and TensorFlow by everything else.

Let `y = f(x, w)`: a rule covers `x`; `w` are other arguments, variables and tensors that `f` closes
over. The value is computed at a stopped point, and TensorFlow differentiates it with respect to `w`
as ever. The rule gives the gradient with respect to the point, as a function of everything::

    G(u, x, w) = (df/dx)' u

So the outputs are the values at the stopped point, whose own derivatives are passed on, overridden
with the rule. One thing is missing, which `mixed` adds: what TensorFlow computes at the stopped
point does not depend on the point.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._arguments.nones import present, spread
from sgtrick._core import mixed
from sgtrick._core.guard import Check, ExplicitRule, guarded, unknown_by
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule, in_addition, plus
from sgtrick._tensorflow import tapes
from sgtrick._types import Gradient, Pushforward, Tangent, Tensor


def embed(
    name: str,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    others: mixed.Uncovered,
    gradients: mixed.PointGradients,
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
    count = len(xs) if stopped is None else stopped
    point = mixed.ByPoint(name, gradients, xs, others, check, count)

    def pull(*us: Tensor | None) -> list[Gradient]:
        by_xs = rule.pull(*us)
        if tf.executing_eagerly() and not tapes.somebody_records():
            return [*us, *by_xs, *[None] * (len(covered_and_not) - len(xs))]
        live = known_part(present(us))
        zeros = mixed.zeros(point, others.tensors, live, lambda ts: (us, ts))
        return [*spread(live, us), *by_xs, *zeros]

    def pushed(*tangents: Tangent) -> list[Tangent]:
        # of_ys are the tangents along the others, which TensorFlow computed at the stopped point.
        of_ys, of_xs = tangents[: len(ys)], tangents[len(ys) : len(ys) + len(xs)]
        of_others = tangents[len(ys) + len(xs) :]
        assert callable(rule.push)
        moved = plus(of_ys, rule.push(*of_xs))
        if not present(of_others):
            return moved
        live = known_part(present(moved))
        zeros = mixed.zeros(
            point, live, present(of_others), lambda us: (spread(us, moved), of_others)
        )
        return spread([t + z for t, z in zip(live, zeros, strict=True)], moved)

    def known_part(tensors: Sequence[Tensor]) -> list[Tensor]:
        """Upstream gradients or tangents; an error if what is unknown of them is asked for."""
        message = _ELSEWHERE.format(name)
        return [t if others.is_complete else unknown_by(t, xs, message) for t in tensors]

    rule_of_all = Rule(name, pull, pushed, transposes=rule.transposes)
    return keep(ys, [*ys, *covered_and_not], rule_of_all)


_ELSEWHERE = (
    "A mixed derivative of {0} is unknown: its derivative with respect to something that it closes "
    "over was differentiated with respect to its arguments. Pass what it closes over as an "
    "argument; or differentiate with respect to the arguments first."
)
