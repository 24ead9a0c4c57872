"""Engines made of functions that another framework differentiates."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from sgtrick._core import calls, structures
from sgtrick._core.types import Args, Function, Structure
from sgtrick._host.engine import WrongUseError

Leaves = Sequence[Any]  # arrays of NumPy, or tensors of the framework
# The leaves to map over: for each batch dimension in order, for each group of leaves, the axis.
Dims = tuple[tuple[tuple[int | None, ...], ...], ...]


class Framework(Protocol):
    """What a framework must provide. Functions take groups of leaves: points, constants, vectors.

    `f(points, constants)` returns a scalar, or `(scalar, aux)`, for one batch member.
    """

    def gradient(self, f: Function, has_aux: bool, dims: Dims) -> Function:
        """The mapped function `(points, constants) -> (value or (value, aux), gradients)`."""
        ...

    def hessian_times(self, f: Function, dims: Dims) -> Function:
        """The mapped function `(points, constants, vs) -> Hessian times vs`."""
        ...

    def why_no_scalar(self, value: Structure) -> str | None:
        """Why the value that `f` returned is not a scalar; None if it is one."""
        ...

    def is_cut_off(self, f: Function, points: Leaves, constants: Leaves, k: int) -> bool:
        """Whether `f(points, constants)` reads point `k` but is not differentiable through it."""
        ...

    def advice(self, error: Exception) -> str | None:
        """What to do about an error that the function raises at every point; None if unknown."""
        ...


class _Split(NamedTuple):
    """The leaves of a call: points, which are differentiated, and constants, all others."""

    args: Args
    leaves: Leaves
    places: tuple[int, ...]  # of the points

    def groups(self) -> list[Leaves]:
        """Points and constants."""
        others = (leaf for k, leaf in enumerate(self.leaves) if k not in self.places)
        return [[self.leaves[k] for k in self.places], list(others)]

    def joined(self, points: Leaves, constants: Leaves) -> Structure:
        """The arguments with these leaves."""
        own, rest = dict(zip(self.places, points, strict=True)), iter(constants)
        flat = [own[k] if k in own else next(rest) for k in range(len(self.leaves))]
        return tf.nest.pack_sequence_as(self.args, flat)

    def packed(self, parts: Leaves) -> Structure:
        """One part for each point, in the structure that `from_numpy` expects of a gradient."""
        own = dict(zip(self.places, parts, strict=True))
        packed = tf.nest.pack_sequence_as(self.args, [own.get(k) for k in range(len(self.leaves))])
        return packed[0] if len(packed) == 1 else packed


class Derived:
    """The engine `(value, gradient)` and the `hessp` of a function of one batch member.

    Arguments that members share have batch dimensions of size 1, and are not mapped over.
    """

    def __init__(
        self,
        fn: Function,
        framework: Framework,
        event_ndims: int | Structure,
        has_aux: bool,
        name: str,
    ) -> None:
        self._fn, self._framework, self._has_aux = fn, framework, has_aux
        self._event_ndims, self._name = event_ndims, name
        self._transformed: dict[Any, Function] = {}

    def evaluate(self, *args: Structure) -> Structure:
        """The value (or value and aux) and the gradients of a batch."""
        split = _split(args)
        if not split.places:
            raise WrongUseError(
                f"{self._name} has no argument of a floating dtype, so it has no gradient. Pass an "
                "argument as a float, or call the function itself."
            )
        groups, dims = self._mapped(split, split.groups())
        value, gradients = self._run("gradient", split, groups, dims)
        for k, gradient in zip(split.places, gradients, strict=True):
            if gradient.size and not gradient.any():
                self._check_connection(split, groups, dims, k)
        return value, split.packed(gradients)

    def hessian_times(self, *args_and_v: Structure) -> Structure:
        """The Hessian of each member of a batch times `v`."""
        *args, v = args_and_v
        split = _split(tuple(args))
        vs = [leaf for leaf in tf.nest.flatten(v) if leaf is not None]
        groups, dims = self._mapped(split, [*split.groups(), vs])
        return split.packed(self._run("hessian_times", split, groups, dims))

    def _mapped(self, split: _Split, groups: Sequence[Leaves]) -> tuple[Sequence[Leaves], Dims]:
        """The leaves without their batch dimensions of size 1, and the dimensions to map over."""
        ndims = _Split(split.args, self._by_leaf(split.args), split.places).groups()
        fronts = [
            [leaf.shape[: leaf.ndim - n] for leaf, n in zip(group, own, strict=True)]
            for group, own in zip(groups, [*ndims, ndims[0]], strict=False)
        ]
        batch = np.broadcast_shapes(*(front for group in fronts for front in group))
        dims = tuple(
            tuple(tuple(0 if front[k] == size else None for front in group) for group in fronts)
            for k, size in enumerate(batch)
        )
        squeezed = [
            tuple(
                leaf.squeeze(tuple(k for k, size in enumerate(batch) if front[k] != size))
                for leaf, front in zip(group, own, strict=True)
            )
            for group, own in zip(groups, fronts, strict=True)
        ]
        return squeezed, dims

    def _by_leaf(self, args: Args) -> list[int]:
        """`event_ndims`, one for each leaf."""
        stated = self._event_ndims
        by_argument = stated if isinstance(stated, (tuple, list)) else [stated] * len(args)
        return [
            n
            for arg, ndims in zip(args, by_argument, strict=False)  # defaults may be omitted
            for n in (
                tf.nest.flatten(ndims)
                if tf.nest.is_nested(ndims)
                else [ndims] * len(tf.nest.flatten(arg))
            )
        ]

    def _run(self, what: str, split: _Split, groups: Sequence[Leaves], dims: Dims) -> Structure:
        """Calls the transformed function, which is made once for each structure of arguments."""
        key = what, split.places, dims, repr(tf.nest.map_structure(lambda _: 0, split.args))
        if key not in self._transformed:
            like = split._replace(leaves=[None] * len(split.leaves))  # keeps no arrays
            like = like._replace(args=tf.nest.map_structure(lambda _: None, split.args))
            if what == "gradient":
                f = self._function(like, self._has_aux)
                self._transformed[key] = self._framework.gradient(f, self._has_aux, dims)
            else:
                f = self._function(like, has_aux=False)
                self._transformed[key] = self._framework.hessian_times(f, dims)
        return self._advised(self._transformed[key], *groups)

    def _advised(self, f: Function, *args: Leaves) -> Structure:
        """`f(*args)`, with advice added to the framework's errors."""
        try:
            return f(*args)
        except WrongUseError:
            raise
        except Exception as error:
            advice = self._framework.advice(error)
            if advice is None:
                raise
            said = f"{type(error).__name__}: {error}"
            raise WrongUseError(f"{self._name} {advice}\n{said}") from error

    def _function(self, split: _Split, has_aux: bool) -> Function:
        """The user's function as one of `(points, constants)`, with its result checked."""

        def f(points: Leaves, constants: Leaves) -> Structure:
            returned = self._fn(*split.joined(points, constants))
            if structures.is_pair(returned) != self._has_aux:
                wanted = "(value, aux)" if self._has_aux else "only the value"
                raise WrongUseError(
                    f"{self._name} must return {wanted}, got {type(returned).__name__}. The "
                    "gradient is computed by autodiff: use from_numpy for a function that returns "
                    "its gradient, and has_aux=True for one that returns (value, aux)."
                )
            value = returned[0] if self._has_aux else returned
            why = self._framework.why_no_scalar(value)
            if why is not None:
                raise WrongUseError(f"{self._name} must return a scalar, {why}")
            return (value, returned[1]) if has_aux else value

        return f

    def _check_connection(
        self, split: _Split, groups: Sequence[Leaves], dims: Dims, place: int
    ) -> None:
        """Raises if a gradient is zero because the value was detached from the point."""
        first = [list(group) for group in groups]
        for level in dims:
            for group, own in zip(first, level, strict=True):
                group[:] = [a if d is None else a[0, ...] for a, d in zip(group, own, strict=True)]
        points, constants = first
        k = split.places.index(place)
        f = self._function(split, self._has_aux)
        if self._framework.is_cut_off(f, points, constants, k):
            raise WrongUseError(
                f"{self._name} uses {self._path(split.args, place)}, but its value is cut off from "
                "it, so that the gradient would be zero. The usual causes are .item(), float(), "
                ".detach(), .numpy(), torch.no_grad(), torch.tensor(...) of a tensor, and casts to "
                "integers. Remove them. If the argument is a constant, pass it as integers; if the "
                "derivative really is zero, add 0 * x.sum() to the value."
            )

    def _path(self, args: Args, place: int) -> str:
        """The name of a leaf, such as "p['loc']"."""
        signature = calls.signature_of(self._fn)
        names = list(signature.parameters) if signature else []
        named = [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]
        paths = [
            path
            for name, arg in zip(named, args, strict=True)
            for path, _ in structures.flatten(arg, name)
        ]
        return paths[place]


def _split(args: Args) -> _Split:
    leaves = tf.nest.flatten(args)
    return _Split(args, leaves, tuple(k for k, leaf in enumerate(leaves) if leaf.dtype.kind == "f"))
