"""A function evaluated at a point under a tape, and its embedded derivatives there."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from sgtrick._check.leaves import Named, tape_gradients, unit_upstreams, wide
from sgtrick._check.refusals import gradients_unless_refused
from sgtrick._types import Array, Gradient


class Jacobian(NamedTuple):
    """The derivatives of all entries of the value.

    Attributes:
        leaves: For each leaf of the point, `[m]` and the shape of the leaf.
        connected: For each leaf, whether the tape returned a gradient.
        refusals: For each entry of the value, the message of the function that refused its
            derivatives, which are then NaN.
    """

    leaves: list[Array]
    connected: list[bool]
    refusals: list[str]


class Recorded:
    """A function at a point.

    Attributes:
        xs: The leaves of the point.
        ys: The outputs with their names.
    """

    def __init__(self, function: Callable[[Named], Named], inputs: Named) -> None:
        self._function, self._names = function, [name for name, _ in inputs]
        self.xs = [x for _, x in inputs]
        with tf.GradientTape(persistent=True) as self._tape:
            self._tape.watch(self.xs)
            self.ys = function(inputs)

    def jacobian(self) -> Jacobian:
        """The derivatives of all entries of the value."""
        pulled = [self.pulled(u) for _, u in unit_upstreams(self.ys)]
        columns = list(zip(*(gradients for gradients, _ in pulled), strict=True))
        return Jacobian(
            [
                np.stack([np.zeros(x.shape) if g is None else _array(g) for g in column])
                for x, column in zip(self.xs, columns, strict=True)
            ],
            [any(g is not None for g in column) for column in columns],
            [why for _, why in pulled],
        )

    def along(
        self, direction: Sequence[Array], upstream: Sequence[Array]
    ) -> tuple[Array, list[bool], str]:
        """The terms whose sum is the derivative of a projection of the value along a direction.

        Returns them for all entries of the point; for each leaf, whether the tape returned a
        gradient; and the message of a refusal.
        """
        gradients, refusal = self.pulled(upstream)
        parts = [
            (v * _array(g)).ravel()
            for v, g in zip(direction, gradients, strict=True)
            if g is not None
        ]
        terms = np.concatenate([np.zeros(1), *parts])
        return terms, [g is not None for g in gradients], refusal

    def pulled(self, upstream: Sequence[Array | None]) -> tuple[list[Gradient], str]:
        """The gradients, NaN where they are refused, and the message of the refusal."""

        def pull() -> list[Gradient]:
            return tape_gradients(self._tape, self.ys, self.xs, upstream)

        def again() -> list[Gradient]:
            with tf.GradientTape() as tape:
                tape.watch(self.xs)
                ys = self._function(list(zip(self._names, self.xs, strict=True)))
            return tape_gradients(tape, ys, self.xs, upstream)

        return gradients_unless_refused(pull, again, self.xs)


def _array(gradient: Gradient) -> Array:
    return wide(tf.convert_to_tensor(gradient))
