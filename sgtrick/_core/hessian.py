"""Hessians as callers pass them: blocks, or a function for the product with a vector.

A Hessian is only known at one point, so its own derivative is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick._arguments import value_form
from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import adjoint, unknown
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Gradient, Pullback, Pushforward, Tangent, Tensor

_THIRD = (
    "{0} was asked for a third derivative, but only its value, gradient and Hessian are known. "
    "For derivatives of every order, use sgtrick.with_gradient or sgtrick.custom_jvp."
)


def symmetric(
    name: str,
    times: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
    at: Sequence[Tensor],
    xs: Sequence[Tensor],
) -> "Symmetric":
    """A Hessian, given by a function for its product with a vector that is never differentiated.

    Args:
        name: The function's name in errors.
        times: Maps `at` and one tensor like each of `xs` to one tensor like each of `xs`.
        at: Tensors that tell `times` the point.
        xs: The points.
    """

    def product(at: Sequence[Tensor], xs: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Tensor]:
        at, xs = [here(t) for t in at], [here(x) for x in xs]

        def again(*vs: Tensor) -> list[Tensor]:
            return product(at, xs, vs)

        found = keep(times(at, vs), vs, Rule(name, again, again))
        return [unknown.refuse(hv, xs, _THIRD.format(name)) for hv in found]

    def at_the_point(*vs: Tensor) -> list[Tensor]:
        return product(at, xs, vs)

    return Symmetric(at_the_point, at_the_point)


class Symmetric(NamedTuple):
    """The same function for both modes."""

    pull: Pullback
    push: Pushforward


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
        rows = self.symmetric()
        return [
            [block and block._replace(gx=self._refused(block.gx)) for block in row] for row in rows
        ]

    def _refused(self, t: Tensor) -> Tensor:
        return unknown.refuse(t, [leaf.x for leaf in self._leaves], _THIRD.format(self._name))


class Product(value_form.Product):
    """A function for the product with a vector, called when the gradients are differentiated."""

    def __init__(self, name: str, fx: Tensor, *given: Any) -> None:
        super().__init__(TENSORFLOW, *given)
        self._name, self._fx = name, fx

    def push(self, *tangents: Tensor) -> list[Tangent]:
        """From tangents of the points to tangents of the gradients."""
        xs = [leaf.x for leaf in self._leaves]
        if self._is_symmetric():
            pairs = zip(self._leaves, tangents, strict=True)
            vs = [tf.cast(t, leaf.gx.dtype) for leaf, t in pairs]
            return list(symmetric(self._name, lambda _, vs: self.times(vs), (), xs).push(*vs))
        return list(map(self._refused, self.times(tangents)))

    def pull(self, *z: Tensor) -> list[Gradient]:
        """From cotangents of the gradients to cotangents of the points."""
        xs = [leaf.x for leaf in self._leaves]
        if self._is_symmetric():
            pulled = self.push(*map(TENSORFLOW.conj, z))
            return [tf.cast(TENSORFLOW.conj(hz), x.dtype) for hz, x in zip(pulled, xs, strict=True)]
        return list(map(self._refused, self._summed(z)))

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

    def _refused(self, t: Tensor) -> Tensor:
        return unknown.refuse(t, [leaf.x for leaf in self._leaves], _THIRD.format(self._name))
