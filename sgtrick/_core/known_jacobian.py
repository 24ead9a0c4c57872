"""The rule of a value with a known Jacobian.

Multiplication by a Jacobian is linear and works in both modes. Only the derivative of the Jacobian
may be unknown: it is a Hessian or an error.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from sgtrick._arguments import value_form
from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import adjoint, unknown
from sgtrick._core.kept import with_derivatives
from sgtrick._core.rule import InAddition, Rule, Stated
from sgtrick._types import Gradient, Pullback, Pushforward, Tangent, Tensor


def of_jacobians(name: str, y: Tensor, jacobians: Callable[[], Sequence[Leaf | None]]) -> Rule:
    """The rule of a value `y` with these Jacobians."""

    def pull(upstream: Tensor) -> list[Gradient]:
        return [leaf and TENSORFLOW.transpose(leaf, upstream) for leaf in jacobians()]

    def push(*tangents: Tensor) -> list[Tangent]:
        return [TENSORFLOW.push(jacobians(), tangents, y)]

    return Stated(name, pull, push)


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
    """A Hessian as a linear map, for both modes: a `Rule`, for one."""

    @property
    def pull(self) -> Pullback:
        """From cotangents of the gradients to cotangents of the points: `z -> H' z`."""

    @property
    def push(self) -> Pushforward | str | None:
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
        rule = Stated(name, hessian.pull, hessian.push, is_of_caller=True)
        gxs = with_derivatives(gxs, [*gxs, *xs], InAddition(rule, len(gxs)))
    return [leaf._replace(gx=gx) for leaf, gx in zip(leaves, gxs, strict=True)]


_THIRD = (
    "{0} was asked for a third derivative, but only its value, gradient and Hessian are known. "
    "For derivatives of every order, use sgtrick.with_gradient or sgtrick.custom_jvp."
)


def _without_third(name: str, leaves: Sequence[Leaf]) -> Callable[[Tensor], Tensor]:
    """A function that makes derivatives of what it gets, by the points, errors."""
    xs, message = [leaf.x for leaf in leaves], _THIRD.format(name)
    return lambda t: unknown.refuse(t, xs, message)


class Blocks(value_form.Blocks):
    """Blocks, of which only the symmetric part matters, as in `1/2 <H z, z>`."""

    def __init__(self, name: str, *given: Any) -> None:
        super().__init__(TENSORFLOW, *given)
        self._name = name

    def pull(self, *z: Tensor) -> list[Gradient]:
        """From cotangents of the gradients to cotangents of the points."""
        pulled = []
        for leaf, column in zip(self._leaves, zip(*self._known(), strict=True), strict=True):
            blocks = [(block, z_i) for block, z_i in zip(column, z, strict=True) if block]
            terms = [TENSORFLOW.transpose(*block) for block in blocks]
            pulled.append(tf.add_n([tf.zeros_like(leaf.x), *terms]))
        return pulled

    def push(self, *tangents: Tensor) -> list[Tangent]:
        """From tangents of the points to tangents of the gradients."""
        return self.times(tangents, self._known())

    def _known(self) -> list[list[Leaf | None]]:
        """The symmetric part, whose own derivative is an error."""
        rows, refused = self.symmetric(), _without_third(self._name, self._leaves)
        return [[block and block._replace(gx=refused(block.gx)) for block in row] for row in rows]


class ByVector(value_form.ByVector):
    """A function for the product with a vector, called when the gradients are differentiated."""

    def __init__(self, name: str, fx: Tensor, *given: Any) -> None:
        super().__init__(TENSORFLOW, *given)
        self._name, self._fx = name, fx
        self._refused = _without_third(name, self._leaves)

    def push(self, *tangents: Tensor) -> list[Tangent]:
        """From tangents of the points to tangents of the gradients."""
        if self._is_symmetric():
            pairs = zip(self._leaves, tangents, strict=True)
            return self._product(*(tf.cast(t, leaf.gx.dtype) for leaf, t in pairs))
        return list(map(self._refused, self.times(tangents)))

    def pull(self, *z: Tensor) -> list[Gradient]:
        """From cotangents of the gradients to cotangents of the points."""
        xs = [leaf.x for leaf in self._leaves]
        if self._is_symmetric():
            pulled = self.push(*map(TENSORFLOW.conj, z))
            return [tf.cast(TENSORFLOW.conj(hz), x.dtype) for hz, x in zip(pulled, xs, strict=True)]
        return list(map(self._refused, self._summed(z)))

    def _product(self, *vs: Tensor) -> list[Tensor]:
        """The product with vectors, which is its own derivative along them in both modes."""
        rule = Stated(self._name, self._product, self._product)
        found = with_derivatives(self.times(vs), vs, rule)
        return list(map(self._refused, found))

    def _is_symmetric(self) -> bool:
        """Whether `H` is its own transpose: one for the whole range, and real for real points."""
        # A leaf that the batch shares has a range. Numbers are tensors if they are unknown.
        ndims, rank = [leaf.batch_ndims for leaf in self._leaves], self._fx.shape.rank
        is_one = all(isinstance(n, int) and n == rank for n in ndims)
        return is_one and all(
            leaf.gx.dtype.is_complex == leaf.x.dtype.is_complex for leaf in self._leaves
        )

    def _summed(self, z: Sequence[Tensor]) -> list[Tensor]:
        """The sum over the range of the products with cotangents."""
        xs = [leaf.x for leaf in self._leaves]
        found, fits, of = adjoint.transpose(self.times, xs, z)
        return unknown.known_if(fits, self.not_connected, found, xs, of)
