"""What an engine is given and must return: the contract of host calls, and its errors."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sgtrick._core import shapes, structures
from sgtrick._core.types import Array, DTypeLike, Structure
from sgtrick._host.contract import CallSpec, Parts, Shape, copy, show


class Reply(Protocol):
    """What is requested of an engine, and what it must return: arrays, here called parts.

    A call evaluates one member or, if vectorized, a batch; arrays then have the batch shape in
    front.
    """

    name: str
    has_aux: bool
    paths: Sequence[str]
    event_ndims: Sequence[int]

    def incoming(self, arrays: Sequence[Array | bytes], dtype: DTypeLike) -> list[Array]:
        """Copies of the leaves for the engine."""
        ...

    def arguments(self, leaves: Sequence[Array]) -> Sequence[Structure]:
        """The arguments of the engine."""
        ...

    def shapes(self, batch: Shape, events: Sequence[Shape]) -> list[Shape]:
        """The shapes of the parts, except aux, whose shape only the engine knows."""
        ...

    def parts(
        self, returned: Structure, batch: Shape, events: Sequence[Shape], leaves: Sequence[Array]
    ) -> Parts:
        """The checked parts of what an engine returned for `leaves`; None for unknown ones."""
        ...

    def instead(self, value: float, batch: Shape, events: Sequence[Shape]) -> Parts:
        """The parts for a failed call, with `value` in place of the engine's value."""
        ...

    def outgoing(self, parts: Parts) -> list[Array]:
        """Copies for TensorFlow, in its dtypes; engines may return the same buffer each time."""
        ...


class ValueAndGradient:
    """The reply `(value, gradient)` or `((value, aux), gradient)`."""

    def __init__(self, spec: CallSpec) -> None:
        self._spec, self.name, self.has_aux = spec, spec.name, spec.has_aux
        self.paths, self.event_ndims = spec.paths, spec.event_ndims

    def incoming(self, arrays: Sequence[Array | bytes], dtype: DTypeLike) -> list[Array]:
        """Copies of the leaves for the engine."""
        return self._spec.incoming(arrays, dtype)

    def arguments(self, leaves: Sequence[Array]) -> Sequence[Structure]:
        """The arguments of the engine."""
        return self._spec.pack(leaves)

    def shapes(self, batch: Shape, events: Sequence[Shape]) -> list[Shape]:
        """The shapes of the value, the gradients, and whether the engine failed."""
        failed = [batch] * self._spec.tells_failures
        return [batch, *(batch + events[k] for k in self._spec.places), *failed]

    def parts(
        self, returned: Structure, batch: Shape, events: Sequence[Shape], leaves: Sequence[Array]
    ) -> Parts:
        """The value, the gradients of leaves that have derivatives, no failure, and aux if any.

        Raises:
            TypeError: The engine did not return `(value, gradient)`, or `((value, aux), gradient)`,
                of real numbers.
            ValueError: The shape or structure is wrong.
        """
        del leaves
        spec, name = self._spec, self.name
        if not structures.is_pair(returned) or (returned[1] is None and spec.has_derivatives):
            raise TypeError(
                f"{name} must return {self._wanted()}, got {show(returned)}, a value without a "
                "gradient. Return both; or pass a function for the gradient as grad=; or write the "
                "function in PyTorch or JAX, and let from_torch or from_jax compute its gradient."
            )
        value, gradient = returned
        aux = []
        if spec.has_aux:
            if not structures.is_pair(value):
                raise TypeError(
                    f"{name} must return {self._wanted()}, got {show(value)} in place of "
                    "(value, aux). Return both, or remove has_aux=True."
                )
            value, aux = value[0], [np.array(spec.checked(value[1], None, "aux"))]
            if aux[0].shape[: len(batch)] != batch:
                raise ValueError(
                    f"aux of {name} must have the batch shape {shapes.show(batch)} in front, "
                    f"got {shapes.show(aux[0].shape)}."
                )
        value = spec.checked(value, batch, "the value", events=events)
        failed = [np.zeros(batch)] * spec.tells_failures
        return [value, *spec.gradients(gradient, batch, events), *failed, *aux]

    def _wanted(self) -> str:
        return "((value, aux), gradient)" if self.has_aux else "(value, gradient)"

    def instead(self, value: float, batch: Shape, events: Sequence[Shape]) -> Parts:
        """The parts for a failed call: `value`, zero gradients, the failure, and NaN for aux."""
        parts = [np.zeros(shape) for shape in self.shapes(batch, events)]
        parts[0][...] = value
        if self._spec.tells_failures:
            parts[-1][...] = True
        return [*parts, np.full(batch, np.nan)] if self._spec.has_aux else parts

    def outgoing(self, parts: Parts) -> list[Array]:
        """Copies for TensorFlow, in its dtypes."""
        return list(map(copy, parts, self._spec.outputs))


class Results:
    """The parts of several replies, each in one array.

    `ones` is the number of leading dimensions of size 1 in each reply.
    """

    def __init__(self, reply: Reply, batch: Shape, events: Sequence[Shape], ones: int) -> None:
        self._ones = ones
        self._name, self._has_aux, self._batch = reply.name, reply.has_aux, batch
        # float64 holds results of any dtype until all have arrived.
        self._columns = [np.empty(shape) for shape in reply.shapes(batch, events)]
        self._auxes: Parts = []
        self._failed: list[Shape] = []
        self._unknown: set[int] = set()

    def put(self, i: Shape, parts: Parts, *, failed: bool = False) -> None:
        """Stores the parts of member `i`; members arrive in order."""
        if self._ones:
            parts = [p if p is None else p.reshape(p.shape[self._ones :]) for p in parts]
        for k, column in enumerate(self._columns):
            part = parts[k]
            if part is None:
                self._unknown.add(k)
                part = np.nan
            column[i] = part
        if self._has_aux:
            self._auxes.append(parts[-1])
        if failed:
            self._failed.append(i)

    def nonfinite(self) -> int:
        """The number of members that did not fail but have a known part that is not finite."""
        known = [None if k in self._unknown else c for k, c in enumerate(self._columns)]
        return count_nonfinite(known, self._batch, self._failed)

    def joined(self) -> Parts:
        """The joined arrays."""
        return [*self._columns, self._stacked_auxes()] if self._has_aux else self._columns

    def _stacked_auxes(self) -> Array:
        """All aux stacked; a single NaN, as of a failed call, is broadcast to the common shape."""
        seen = {aux.shape for aux in self._auxes if aux.shape or not np.isnan(aux)}
        if len(seen) > 1:
            raise ValueError(
                f"aux of {self._name} must have the same shape for all members of a batch, "
                f"got {' and '.join(map(shapes.show, sorted(seen)))}."
            )
        shape = seen.pop() if seen else ()
        auxes = [np.broadcast_to(aux, shape) for aux in self._auxes]
        return np.reshape(auxes, self._batch + shape)


def count_nonfinite(parts: Sequence[Array | None], batch: Shape, but: Sequence[Shape] = ()) -> int:
    """The number of batch members for which a known part is not finite.

    Args:
        parts: Arrays; None for unknown ones.
        batch: The batch shape.
        but: Members that are not counted.
    """
    bad: Array | None = None
    for part in parts:
        if part is not None:
            finite = np.isfinite(part)
            if np.count_nonzero(finite) < finite.size:
                bad = np.zeros(batch, bool) if bad is None else bad
                bad |= ~finite.reshape((*batch, -1)).all(-1)
    if bad is None:
        return 0
    for i in but:
        bad[i] = False
    return int(np.count_nonzero(bad))


def split_shapes(leaves: Sequence[Array], event_ndims: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """The batch shape to which the leaves broadcast, and their shapes without batch."""
    fronts, events = [], []
    for a, n in zip(leaves, event_ndims, strict=True):
        front = a.ndim - n
        fronts.append(a.shape[:front])
        events.append(a.shape[front:])
    if not fronts or all(shape == fronts[0] for shape in fronts[1:]):
        return fronts[0] if fronts else (), events
    return np.broadcast_shapes(*fronts), events
