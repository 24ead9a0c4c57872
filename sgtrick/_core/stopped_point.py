"""A call whose value is computed at a stopped point, and is given the derivatives of a rule."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.calls import Call
from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import known_jacobian
from sgtrick._core.beside import BesideAutodiff, Others
from sgtrick._core.covered import CoveredArguments
from sgtrick._core.guarded import Check, ExplicitRule, Guarded
from sgtrick._core.kept import with_derivatives
from sgtrick._core.rule import InAddition, Stated
from sgtrick._tensorflow import uses
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import Function, Gradient, Pushforward, Structure, Tensor

# `G`: from upstream gradients, the point, and the other tensors that are passed explicitly.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class ValueAtPoint(NamedTuple):
    """A call whose value was computed at a stopped point.

    Attributes:
        name: The function's name in errors.
        covered: The arguments that the gradients are with respect to, the point.
        passed: The other arguments.
        result: What the function returned.
        used: What else this depends on.
        others: All that it depends on besides the point.
    """

    name: str
    covered: CoveredArguments
    passed: CoveredArguments
    result: Structure
    used: Uses
    others: Others

    @classmethod
    def of(cls, name: str, covered: CoveredArguments, f: Function) -> "ValueAtPoint":
        """Calls a function."""
        passed = covered.others()

        def read(leaf: object) -> object:
            """A variable that is returned counts as used."""
            is_variable = structures.is_dense(leaf) and not isinstance(leaf, tf.Tensor)
            return structures.as_tensor(leaf) if is_variable else leaf

        result, used = uses.call(
            lambda: structures.map_leaves(read, passed.with_copies(f)),
            [*passed.xs, *covered.stopped_xs],
        )
        return cls(name, covered, passed, result, used, Others.of(passed.xs, used))

    def with_xs(self, call: Call, xs: Sequence[Tensor], passed: Sequence[Tensor]) -> Call:
        """A call at another point and with other tensors as the other arguments."""
        return self.passed.with_xs(passed, self.covered.with_xs(xs, call))

    def attach_rule(
        self,
        ys: Sequence[Tensor],
        gradients: PointGradients,
        known: Callable[..., Sequence[Gradient]] | None = None,
        push: Pushforward | None = None,
        tangents: ExplicitRule | None = None,
    ) -> list[Tensor]:
        """Returns `ys`, with their own derivatives and those with respect to a point.

        Args:
            ys: Values at the stopped point.
            gradients: `G`, for any arguments.
            known: The same for the arguments of this call, from upstream gradients alone.
            push: From tangents of the point to tangents of `ys`; None to transpose the gradients.
            tangents: `push` for any arguments, if the gradients are its transpose.
        """
        name, xs, others = self.name, self.covered.xs, self.others

        def explicit(us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Gradient]:
            return gradients(us, inputs[: len(xs)], inputs[len(xs) :])

        def pull_to_point(*us: Tensor | None) -> Sequence[Gradient]:
            return known(*us) if known else gradients(us, xs, others.passed)

        is_jvp = tangents is not None
        check = Check(
            name, tangents or explicit, xs if is_jvp else ys, [*xs, *others.passed], is_jvp=is_jvp
        )
        inputs = [*xs, *others.tensors]
        rule = Guarded(Stated(name, pull_to_point, push), check, ys, [*inputs, *others.of_host])
        if others:
            return with_derivatives(ys, [*ys, *inputs], BesideAutodiff(rule, ys, xs, others))
        # Something may be recorded all the same, or a check may ask what the host got.
        if tf.executing_eagerly() or others.of_host:
            return with_derivatives(ys, [*ys, *xs], InAddition(rule, len(ys)))
        return with_derivatives(ys, xs, rule)

    def attach_jacobians(
        self,
        y: Tensor,
        frozen: Call,
        evaluated: Callable[[Call], list[Leaf | None]],
        known: Callable[[], list[Leaf | None]] | None = None,
    ) -> Tensor:
        """The value with its gradients; everything else that it depends on keeps autodiff.

        Args:
            y: The value.
            frozen: The call, with the values that variables had when it was made.
            evaluated: Returns the Jacobians of any call.
            known: Returns those that this call computed with the value, if it did.
        """
        if not self.covered.xs:
            return y
        rule = known_jacobian.of_jacobians(self.name, y, known or (lambda: evaluated(frozen)))
        assert callable(rule.push)

        def gradients(
            us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            leaves = evaluated(self.with_xs(frozen, xs, passed))
            return [leaf and TENSORFLOW.transpose(leaf, us[0]) for leaf in leaves]

        (kept,) = self.attach_rule([y], gradients, known=rule.pull, push=rule.push)
        return kept
