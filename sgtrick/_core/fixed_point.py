"""Calls whose value is computed at a fixed point, and the gradients that they get there."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import ancestry, calls, embedding, lost, mixed, structures
from sgtrick._core._tensorflow import graphs
from sgtrick._core.closures import Closure
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.structures import Leaf
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Argnums, Args, Gradient, Kwargs, Structure, Tensor


class ValueAtPoint(NamedTuple):
    """A call whose value was computed at a fixed point.

    Attributes:
        name: The function's name in errors.
        point: The arguments that the gradients are with respect to.
        others: The other arguments.
        closure: The call itself.
    """

    name: str
    point: calls.Selection
    others: calls.Selection
    closure: Closure

    def embed(
        self,
        y: Tensor,
        at: calls.Call,
        known: Callable[[], list[Leaf | None]] | None,
        evaluated: Callable[[calls.Call], list[Leaf | None]],
    ) -> Tensor:
        """The value with its gradients; everything else that it depends on keeps autodiff.

        Args:
            y: The value.
            at: The call, with the values that variables had when it was made.
            known: Returns the gradients that this call computed with the value, if it did.
            evaluated: Returns the gradients of any call.
        """
        xs = self.point.xs
        if not xs:
            return y
        rule = embedding.of_jacobians(self.name, y, lambda: evaluated(at))
        if known is not None:
            rule = embedding.of_jacobians(self.name, y, known)._replace(again=rule.pull)
        rule = rule._replace(sources=xs)

        def gradients(
            us: Sequence[Tensor], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            leaves = evaluated(self.at(at, xs, passed))
            return [leaf and TENSORFLOW.transpose(leaf, us[0]) for leaf in leaves]

        return self._kept(y, rule, gradients)

    def auxiliary(
        self, result: Tensor, at: calls.Call, evaluated: Callable[[calls.Call], Tensor]
    ) -> Tensor:
        """A result beside the value: its derivative with respect to the point is an error.

        Args:
            result: The result.
            at: As in `embed`.
            evaluated: Returns the result of any call.
        """
        xs = self.point.xs

        @functools.cache
        def depends() -> list[bool]:
            traced = lost.Traced(self.point.stopped_xs, [result])
            if graphs.operation(result) is None:
                found = lost.traced(lambda *xs: [evaluated(self.point.on(at, xs))], xs)
                if found is None:
                    return [True] * len(xs)
                traced = found
            cuts = graphs.HOST_CALLS
            return [bool(p) for p in ancestry.paths(traced.outputs[0], traced.inputs, cuts=cuts)]

        def gradients(
            us: Sequence[Tensor], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> Sequence[Gradient]:
            again = evaluated(self.at(at, xs, passed))  # what is unknown varies with all of it
            return embedding.auxiliary(self.name, again, xs, depends).pull(us[0])

        if graphs.operation(result) is not None and not any(depends()):
            return result
        return self._kept(result, embedding.auxiliary(self.name, result, xs, depends), gradients)

    def _kept(self, y: Tensor, rule: Rule, gradients: mixed.PointGradients) -> Tensor:
        """A result with a rule for the point; what else it depends on keeps autodiff."""
        xs = self.point.xs
        if not tf.executing_eagerly() and not ancestry.has_sources(
            y, self.point.stopped_xs, self.closure.before
        ):
            # Otherwise TensorFlow would differentiate all of f, to no purpose.
            return keep([y], xs, rule)[0]
        others = self.closure.others([y], self.point)
        if others is None:
            return keep([y], [y, *xs], embedding.beside(rule))[0]
        return mixed.keep_own(mixed.ByPoint(self.name, gradients, xs, others), [y], rule)[0]

    def at(self, call: calls.Call, xs: Sequence[Tensor], passed: Sequence[Tensor]) -> calls.Call:
        """A call at another point and with other tensors as the other arguments."""
        return self.others.on(self.point.on(call, xs), passed)


def select(f: calls.Callee, argnums: Argnums, args: Args, kwargs: Kwargs) -> calls.Selection:
    """The arguments that `argnums` selects, checked to be numeric."""
    point = f.select(argnums, args, kwargs)
    if not point.xs:
        point.check_numbers(f.name)
    return point


def check_function(f: object, name: str) -> None:
    """Checks that the argument called `name` can be called, perhaps as a method."""
    if not callable(f) and not hasattr(f, "__get__"):
        raise TypeError(f"{name} must be a function, got {type(f).__name__}.")


def checked_value(y: Structure, name: str) -> Tensor:
    """The value that the function `name` returned, checked to be one tensor with derivatives."""
    if isinstance(y, (tuple, list)):  # converting would stack it
        raise TypeError(
            f"{name} must return one tensor, got a {structures.kind_of(y)}. For several outputs "
            "use sgtrick.custom_jvp or sgtrick.custom_vjp."
        )
    y = structures.to_tensor(y, f"the result of {name}")
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
