"""The arguments of a call that a rule covers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from sgtrick._arguments import calls, shapes, structures
from sgtrick._arguments.calls import Call
from sgtrick._arguments.structures import Leaf, handle_of, numbers_of, with_numbers
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._tensorflow import tapes
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Argnums, Args, Kwargs, Structure, Tensor

T = TypeVar("T")


class CoveredArguments:
    """The arguments of a call that a rule covers; all others keep their autodiff gradient.

    Attributes:
        call: The call.
        xs: The leaves of these arguments that have derivatives, as tensors.
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
        self._places = list[tuple[int, int]]()  # the number of the argument, and that of the leaf
        self.xs = list[Tensor]()
        self._structures = dict[int, Structure]()  # as they were; None cannot be built again
        leaves = call.leaves
        for k in positions:
            for i, (place, leaf) in enumerate(call.flat[k]):
                if differentiated(leaf):
                    self._places.append((k, i))
                    name = names[k] + place
                    x = structures.to_tensor(numbers_of(leaf), name, beside=leaves)
                    self.xs.append(tapes.own_copy(x))
                else:
                    structures.check_supported(leaf, names[k] + place)
            if not call.is_leaf(k):
                self._structures[k] = structures.copied(call.values[k])
                if self._structures[k] is None and any(k == j for j, _ in self._places):
                    raise structures.no_structure(call.values[k], names[k])

    @functools.cached_property
    def stopped_xs(self) -> list[Tensor]:
        """`xs`, stopped."""
        return list(map(tapes.unrecorded, self.xs))

    @property
    def stopped(self) -> Call:
        """The call with the stopped leaves."""
        return self.with_xs(self.stopped_xs)

    def others(self) -> "CoveredArguments":
        """The other arguments of the stopped call whose gradient may be requested.

        Tensors in an object that cannot be built of others stay there, as if it were closed over.
        """
        call = self.stopped
        rest = [
            k
            for k in range(len(call.values))
            if k not in self._positions
            and (call.is_leaf(k) or structures.copied(call.values[k]) is not None)
        ]
        return CoveredArguments(call, rest, self._names, structures.may_be_recorded)

    def with_xs(self, xs: Sequence[Tensor], call: Call | None = None) -> Call:
        """This call, or another one, with other leaves instead of its own `xs`."""
        call = call or self.call
        replaced = dict[int, list[Any]]()
        for (k, i), x in zip(self._places, xs, strict=True):
            leaf = self.call.flat[k][i][1]
            x = with_numbers(leaf, x)
            if x is not call.flat[k][i][1]:
                replaced.setdefault(k, [leaf for _, leaf in call.flat[k]])[i] = x
        return call.with_arguments({k: self._packed(k, new) for k, new in replaced.items()})

    def _packed(self, k: int, leaves: Sequence[Any]) -> Structure:
        """An argument with other leaves."""
        if k not in self._structures:
            return leaves[0]
        like = self._structures[k]
        return None if like is None else tf.nest.pack_sequence_as(like, leaves)

    @property
    def with_copies(self) -> Call:
        """The call with its own copies of tensors: the function may close over the same ones."""
        given = [self.call.flat[k][i][1] for k, i in self._places]
        copies = zip(self.xs, given, strict=True)
        # What is a variable for the caller is one for the function, which may assign it. But in
        # functions, accumulators lose variables that branches and loops read.
        return self.with_xs(
            [x if isinstance(t, tf.Tensor) or tapes.is_pushed([x]) else t for x, t in copies]
        )

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors and handles of variables among the arguments, and the copies of them."""
        leaves = list(map(numbers_of, self._selected()))
        given = [*leaves, *map(handle_of, leaves)]
        return [*(t for t in given if isinstance(t, tf.Tensor)), *self.xs]

    def read(self) -> Call:
        """The call with the current values of variables, which may be assigned later."""
        own, replaced = set(self._places), dict[int, Structure]()
        for k, (value, argument) in enumerate(zip(self.call.values, self.call.flat, strict=True)):
            leaves = [leaf for _, leaf in argument]
            read = [
                here(structures.as_tensor(t)) if (k, i) not in own and structures.is_dense(t) else t
                for i, t in enumerate(leaves)
            ]
            if all(t is leaf for t, leaf in zip(read, leaves, strict=True)):
                continue
            if self.call.is_leaf(k):
                replaced[k] = read[0]
            elif (like := structures.copied(value)) is not None:
                replaced[k] = tf.nest.pack_sequence_as(like, read)
        return self.with_xs(self.xs, self.call.with_arguments(replaced))

    def primals(self, call: Call) -> Args:
        """These arguments, of a call that `with_xs` returned."""
        return tuple(call.values[k] for k in self._positions)

    def by_leaf(self, ts: Sequence[T]) -> list[list[T | None]]:
        """What belongs to `xs`, for each leaf of each argument; None for all other leaves."""
        found = dict(zip(self._places, ts, strict=True))
        flat = self.call.flat
        return [[found.get((k, i)) for i in range(len(flat[k]))] for k in self._positions]

    def tangents(self, ts: Sequence[Tensor]) -> Args:
        """Tangents in the structure of the arguments, with None where there is no derivative.

        What nobody can differentiate by, numbers and arrays, has zeros.
        """
        found = []
        for k, of_argument in zip(self._positions, self.by_leaf(ts), strict=True):
            leaves = [leaf for _, leaf in self.call.flat[k]]
            moving = [self._tangent(*pair) for pair in zip(leaves, of_argument, strict=True)]
            found.append(self._packed(k, moving))
        return tuple(found)

    def _tangent(self, leaf: Any, t: Tensor | None) -> Structure:
        if t is not None:
            return with_numbers(leaf, t)
        if structures.holds_tensors(leaf) or not structures.has_derivatives(leaf):
            return None
        return tf.zeros_like(structures.to_tensor(leaf, "a tangent", beside=self.call.leaves))

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
        return [leaf for k in self._positions for _, leaf in self.call.flat[k]]

    def jacobians(
        self, gradients: Sequence[Structure], y: Tensor, batch_ndims: int | None
    ) -> list[Leaf | None]:
        """Returns for each of `xs` a checked `Leaf`, or None where it has no gradient."""
        found = []
        xs = iter(self.xs)
        for k, gradient in zip(self._positions, gradients, strict=True):
            name, by = self._names[k], f"the gradient with respect to {self._names[k]}"
            argument = self._structures.get(k, self.call.values[k])
            for path, x, gx in structures.pair(argument, gradient, name, by):
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


def select(f: calls.Callee, argnums: Argnums, args: Args, kwargs: Kwargs) -> CoveredArguments:
    """The arguments that `argnums` selects, checked to be numeric."""
    call = f.bind(args, kwargs)
    covered = CoveredArguments(call, f.positions(argnums, call), f.names(call))
    if not covered.xs:
        covered.check_numbers(f.name)
    return covered
