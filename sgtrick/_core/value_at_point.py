"""Calls whose value is computed at a fixed point, and the gradients that they get there."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgtrick._arguments import calls, structures
from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import embedding, partial
from sgtrick._core.selection import Selection
from sgtrick._tensorflow import uses
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import Argnums, Args, Function, Gradient, Kwargs, Structure, Tensor


class ValueAtPoint(NamedTuple):
    """A call whose value was computed at a stopped point.

    Attributes:
        name: The function's name in errors.
        point: The arguments that the gradients are with respect to.
        passed: The other arguments.
        result: What the function returned.
        used: What else this depends on.
        others: All that it depends on besides the point.
    """

    name: str
    point: Selection
    passed: Selection
    result: Structure
    used: Uses
    others: partial.Uncovered

    @classmethod
    def of(cls, name: str, point: Selection, f: Function) -> "ValueAtPoint":
        """Calls a function."""
        passed = point.others()
        result, used = uses.call(lambda: passed.with_copies(f), [*passed.xs, *point.stopped_xs])
        return cls(name, point, passed, result, used, partial.Uncovered.of(passed.xs, used))

    def at(self, call: calls.Call, xs: Sequence[Tensor], passed: Sequence[Tensor]) -> calls.Call:
        """A call at another point and with other tensors as the other arguments."""
        return self.passed.at(passed, self.point.at(xs, call))

    def embed(
        self,
        y: Tensor,
        at: calls.Call,
        evaluated: Callable[[calls.Call], list[Leaf | None]],
        known: Callable[[], list[Leaf | None]] | None = None,
    ) -> Tensor:
        """The value with its gradients; everything else that it depends on keeps autodiff.

        Args:
            y: The value.
            at: The call, with the values that variables had when it was made.
            evaluated: Returns the Jacobians of any call.
            known: Returns those that this call computed with the value, if it did.
        """
        xs = self.point.xs
        if not xs:
            return y
        rule = embedding.of_jacobians(self.name, y, known or (lambda: evaluated(at)))
        assert callable(rule.push)

        def gradients(
            us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            leaves = evaluated(self.at(at, xs, passed))
            return [leaf and TENSORFLOW.transpose(leaf, us[0]) for leaf in leaves]

        (kept,) = partial.embed(
            self.name, [y], xs, self.others, gradients, known=rule.pull, push=rule.push
        )
        return kept


def select(f: calls.Callee, argnums: Argnums, args: Args, kwargs: Kwargs) -> Selection:
    """The arguments that `argnums` selects, checked to be numeric."""
    call = f.bind(args, kwargs)
    point = Selection(call, f.positions(argnums, call), f.names(call))
    if not point.xs:
        point.check_numbers(f.name)
    return point


def checked_value(y: Structure, name: str, call: calls.Call) -> Tensor:
    """The value that the function `name` returned, checked to be one tensor with derivatives."""
    if isinstance(y, (tuple, list, dict)):  # converting would stack a list
        raise TypeError(
            f"{name} must return one tensor, got a {structures.kind_of(y)}. For several outputs "
            "use sgtrick.custom_jvp or sgtrick.custom_vjp."
        )
    y = structures.to_tensor(y, f"the result of {name}", beside=call.leaves)
    if not structures.is_differentiable(y.dtype):
        raise TypeError(
            f"{name} returned dtype {y.dtype.name}, which has no derivatives. Cast it to a "
            "floating dtype."
        )
    return y


def as_tuple(gradients: Structure, argnums: Argnums, name: str) -> Sequence[Structure]:
    """The gradients as a tuple, one for each of `argnums`."""
    if not isinstance(argnums, (list, tuple)):
        return (gradients,)
    if not (isinstance(gradients, (list, tuple)) and len(gradients) == len(argnums)):
        raise ValueError(
            f"{name} must return a tuple of {len(argnums)} gradients, one for each of "
            f"argnums={argnums!r}, got {structures.kind_of(gradients)}."
        )
    return gradients


def pair_of(result: Structure, what: str) -> tuple[Structure, Structure]:
    """The result of a function, checked to be a pair; `what` is the start of the error."""
    if not structures.is_pair(result):
        raise TypeError(f"{what}, got {structures.kind_of(result)}.")
    first, second = result
    return first, second
