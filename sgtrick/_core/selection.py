"""The arguments of a call that a rule covers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._arguments.calls import Call
from sgtrick._arguments.structures import Leaf, numbers_of, with_numbers
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._arguments.variables import handle_of
from sgtrick._tensorflow import tapes
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Args, Structure, Tensor


class Selection:
    """The arguments of a call that a rule covers; all others keep their autodiff gradient.

    Attributes:
        call: The call.
        xs: The leaves of these arguments that have derivatives, as tensors.
        stopped_xs: The same, stopped.
        stopped: The call with the stopped leaves.
    """

    def __init__(
        self,
        call: Call,
        positions: Sequence[int],
        names: Sequence[str],
        differentiated: Callable[[object], bool] = structures.has_derivatives,
    ) -> None:
        """The arguments at some positions, in this order; `names` are those of all arguments."""
        self.call, self._positions, self._names = call, positions, names
        by_argument = [list(structures.flatten(value)) for value in call.values]
        starts = list(itertools.accumulate(map(len, by_argument), initial=0))
        self._leaves = [leaf for leaves in by_argument for _, leaf in leaves]
        self._places, self.xs = [], list[Tensor]()
        for k in positions:
            for i, (place, leaf) in enumerate(by_argument[k], starts[k]):
                if differentiated(leaf):
                    self._places.append(i)
                    name = names[k] + place
                    x = structures.to_tensor(numbers_of(leaf), name, beside=self._leaves)
                    self.xs.append(tapes.own_copy(x))
        self.stopped_xs = [tapes.unrecorded(x) for x in self.xs]
        self.stopped = self.at(self.stopped_xs)

    def others(self) -> "Selection":
        """The other arguments of the stopped call whose gradient may be requested."""
        rest = [k for k in range(len(self.call.values)) if k not in self._positions]
        return Selection(self.stopped, rest, self._names, structures.may_be_recorded)

    def at(self, xs: Sequence[Tensor], call: Call | None = None) -> Call:
        """This call, or another one, with other leaves instead of its own `xs`."""
        return self._replaced(self._leaves if call is None else call.leaves, xs)

    def _replaced(self, leaves: Sequence[Any], xs: Sequence[Tensor | None]) -> Call:
        leaves = list(leaves)
        for i, x in zip(self._places, xs, strict=True):
            leaves[i] = with_numbers(self._leaves[i], x)
        return self.call.with_leaves(leaves)

    @property
    def with_copies(self) -> Call:
        """The call with its own copies of tensors: the function may close over the same ones."""
        given = [self._leaves[i] for i in self._places]
        return self.at([x if tf.is_tensor(t) else t for x, t in zip(self.xs, given, strict=True)])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors and handles of variables among the arguments, and the copies of them."""
        leaves = list(map(numbers_of, self._selected()))
        given = [*leaves, *map(handle_of, leaves)]
        return [*(t for t in given if isinstance(t, tf.Tensor)), *self.xs]

    def read(self) -> Call:
        """The call with the current values of variables, which may be assigned later."""
        leaves = [
            here(structures.as_tensor(t)) if structures.is_dense(t) else t for t in self._leaves
        ]
        return self._replaced(leaves, self.xs)

    def primals(self, call: Call) -> Args:
        """These arguments, of a call that `at` returned."""
        return tuple(call.values[k] for k in self._positions)

    def tangents(self, ts: Sequence[Tensor]) -> Args:
        """Tangents in the structure of the arguments, with None where there is no derivative."""
        return self.primals(self._replaced([None] * len(self._leaves), ts))

    def check_numbers(self, name: str) -> None:
        """Checks that the arguments, unless they are empty, hold something numeric."""
        leaves = self._selected()
        if leaves and not any(map(structures.is_number, leaves)):
            raise TypeError(
                f"There is no derivative of {name} with respect to "
                f"{', '.join(self._names[k] for k in self._positions)}: "
                f"{', '.join(type(t).__name__ for t in leaves)}. Pass tensors, or structures of "
                "them that tf.nest knows, or select other arguments."
            )

    def _selected(self) -> list[Any]:
        return [leaf for _, leaf in structures.flatten(list(self.primals(self.call)))]

    def jacobians(
        self, gradients: Sequence[Structure], y: Tensor, batch_ndims: int | None
    ) -> list[Leaf | None]:
        """Returns for each of `xs` a checked `Leaf`, or None where it has no gradient."""
        found = []
        xs = iter(self.xs)
        for k, gradient in zip(self._positions, gradients, strict=True):
            name, by = self._names[k], f"the gradient with respect to {self._names[k]}"
            for path, x, gx in structures.pair(self.call.values[k], gradient, name, by):
                names = shapes.Names("the value", f"{by}{path}", f"{name}{path}")
                if structures.has_derivatives(x):
                    x = next(xs)
                    leaf = gx is not None and TENSORFLOW.leaf(path, x, gx, y, batch_ndims, names)
                    found.append(leaf or None)
                elif gx is not None:
                    raise TypeError(
                        f"{names.x} has no derivatives, but {names.gx} is not None. Return None "
                        f"there, or pass {names.x} as a tensor of a floating dtype."
                    )
        return found
