"""A value with a Jacobian: the kept override of the forms that know the Jacobian itself.

Multiplication by a Jacobian is linear and works in both modes. Only the derivative of the Jacobian
may be unknown: it is a Hessian or an error.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import unknown
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule, in_addition
from sgtrick._types import Gradient, Tangent, Tensor


def of_jacobians(name: str, y: Tensor, jacobians: Callable[[], Sequence[Leaf | None]]) -> Rule:
    """The rule of a value `y` with these Jacobians."""

    def pull(upstream: Tensor) -> list[Gradient]:
        return [leaf and TENSORFLOW.transpose(leaf, upstream) for leaf in jacobians()]

    def push(*tangents: Tensor) -> list[Tangent]:
        return [TENSORFLOW.push(jacobians(), tangents, y)]

    return Rule(name, pull, push)


def embed_constant(
    name: str, y: Tensor, leaves: Sequence[Leaf], hessian: "Hessian | str"
) -> Tensor:
    """Returns `y` with gradients that were computed with it, and have no derivative of their own.

    Args:
        name: The function's name in errors.
        y: The value.
        leaves: The points with their gradients.
        hessian: See `differentiable`.
    """
    rule = of_jacobians(name, y, lambda: differentiable(name, leaves, hessian))
    return keep([y], [leaf.x for leaf in leaves], rule)[0]


def auxiliary(
    name: str, result: Tensor, inputs: Sequence[Tensor], has_lists: bool = False
) -> Tensor:
    """A result beside the value, of which no derivatives are known: taking one is an error.

    Args:
        name: The function's name in errors.
        result: The result.
        inputs: The tensors that it depends on.
        has_lists: Whether it may depend on lists of tensors, too.
    """
    # The result's own operations lead to what is in a list, and nothing else does.
    by = [*inputs, result] if has_lists else inputs
    message = _AUXILIARY.format(name)
    return unknown.refuse(tf.stop_gradient(result), by, message, is_used=False)


_AUXILIARY = (
    "A result beside the value of {0} (aux) was differentiated, but {0} only gives the gradient of "
    "the value. If it counts as a constant, use tf.stop_gradient of it. If not, compute it in "
    "another function."
)


class Hessian(Protocol):
    """A Hessian as a linear map, for both modes."""

    def pull(self, *z: Tensor) -> list[Gradient]:
        """From cotangents of the gradients to cotangents of the points: `z -> H' z`."""

    def push(self, *tangents: Tensor) -> list[Tangent]:
        """From tangents of the points to tangents of the gradients: `t -> H t`."""


def differentiable(
    name: str, leaves: Sequence[Leaf], hessian: "Hessian | str | None"
) -> list[Leaf]:
    """Points with gradients that were computed elsewhere, and with a Hessian as their derivative.

    Or with the message of the error if it is unknown, or with nothing in addition to their own.
    """
    gxs, xs = [leaf.gx for leaf in leaves], [leaf.x for leaf in leaves]
    if isinstance(hessian, str):
        gxs = [unknown.refuse(gx, xs, hessian) for gx in gxs]
    elif hessian is not None:
        rule = Rule(name, hessian.pull, hessian.push)
        gxs = keep(gxs, [*gxs, *xs], in_addition(rule, len(gxs)))
    return [leaf._replace(gx=gx) for leaf, gx in zip(leaves, gxs, strict=True)]
