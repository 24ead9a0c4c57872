"""The Hessian of an engine times a vector, from `hessp` or `hess` (SciPy's names)."""

from collections.abc import Sequence

import numpy as np

from sgtrick._core.types import Array, DTypeLike, Structure
from sgtrick._host.contract import CallSpec, Parts, Shape, copy


class HessianTimes:
    """The reply `H v` of a function `hessp(*arrays, v)`, or `H` of a function `hess(*arrays)`.

    The leaves of a call are those of the arguments, followed by those of `v`, one for each argument
    leaf that has derivatives.
    """

    has_aux = False

    def __init__(self, spec: CallSpec, *, whole: bool) -> None:
        self._spec, self._whole, self.name = spec, whole, spec.name
        self.paths: Sequence[str] = [
            *spec.paths,
            *(f"v of {spec.paths[k]}" for k in spec.places),
        ]
        own = (spec.event_ndims[k] for k in spec.places)
        self.event_ndims: Sequence[int] = [*spec.event_ndims, *own]

    def incoming(self, arrays: Sequence[Array | bytes], dtype: DTypeLike) -> list[Array]:
        """Copies of the leaves for the engine."""
        n = len(self._spec.paths)
        leaves = self._spec.incoming(arrays[:n], dtype)
        return [*leaves, *(copy(v, dtype) for v in arrays[n:])]

    def arguments(self, leaves: Sequence[Array]) -> Sequence[Structure]:
        """The arguments of `hess` or `hessp`; `v` has the structure of the engine's arguments."""
        n = len(self._spec.paths)
        arguments = self._spec.pack(leaves[:n])
        if self._whole:
            return arguments
        flat: Parts = [None] * n
        for k, v in zip(self._spec.places, leaves[n:], strict=True):
            flat[k] = v
        packed = self._spec.pack(flat)
        return [*arguments, packed[0] if len(packed) == 1 else tuple(packed)]

    def shapes(self, batch: Shape, events: Sequence[Shape]) -> list[Shape]:
        """The shapes of the products, one for each leaf that has derivatives."""
        return [batch + events[k] for k in self._spec.places]

    def parts(
        self, returned: Structure, batch: Shape, events: Sequence[Shape], leaves: Sequence[Array]
    ) -> Parts:
        """The products, one for each leaf that has derivatives; None for unknown ones.

        Raises:
            TypeError: The engine returned something other than real numbers.
            ValueError: The shape or structure is wrong.
        """
        n = len(self._spec.paths)
        events = events[:n]
        if not self._whole:
            if returned is None:
                raise TypeError(
                    f"hessp of {self.name} must return the Hessian times v, in the structure of "
                    "the arguments, got None."
                )
            return self._spec.gradients(returned, batch, events, "the Hessian times v")
        rows = self._rows(returned)
        vs = dict(zip(self._spec.places, leaves[n:], strict=True))
        return [
            sum(self._product(rows[i][j], batch, events, i, j, vs[j]) for j in self._spec.places)
            for i in self._spec.places
        ]

    def instead(self, value: float, batch: Shape, events: Sequence[Shape]) -> Parts:
        """NaN for a failed call, because the value may be valid there and have a slope."""
        del value
        return [np.full(shape, np.nan) for shape in self.shapes(batch, events)]

    def outgoing(self, parts: Parts) -> list[Array]:
        """Copies for TensorFlow, in its dtypes."""
        return list(map(copy, parts, self._spec.gradient_dtypes))

    def _rows(self, hessian: Structure) -> list[Sequence[Structure]]:
        """The blocks, by two leaves, of the structure of structures that `jax.hessian` returns."""
        spec, n = self._spec, len(self._spec.paths)
        if hessian is None:
            raise TypeError(f"hess of {self.name} must return the Hessian, got None.")
        rows = spec.split(hessian, "the Hessian")
        return [
            [None] * n if row is None else spec.split(row, f"the Hessian row {path}")
            for row, path in zip(rows, spec.paths, strict=True)
        ]

    def _product(
        self, block: Structure, batch: Shape, events: Sequence[Shape], i: int, j: int, v: Array
    ) -> Array:
        """`H_ij v_j`, NaN where the block is unknown and `v_j` is not zero."""
        by = " and ".join(self._spec.paths[k] for k in (i, j))
        shape = batch + events[i] + events[j]
        domain = events[j]
        # Flatten to [batch..., rows, columns].
        v = np.broadcast_to(v, batch + domain).reshape((*batch, 1, -1))
        if block is None:
            unknown = np.where(v == 0, 0.0, np.nan).sum(-1)
            return np.broadcast_to(
                unknown.reshape(batch + (1,) * len(events[i])), batch + events[i]
            )
        h = self._spec.checked(block, shape, "the Hessian", by)
        rows = h.reshape((*batch, int(np.prod(events[i])), int(np.prod(domain))))
        return (rows @ np.swapaxes(v, -1, -2)).reshape(batch + events[i])
