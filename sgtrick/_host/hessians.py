"""The Hessian of an engine times a vector, from the whole Hessian that `hess` returns."""

import math
from collections.abc import Sequence

import numpy as np

from sgtrick._host.contract import CallSpec, Parts, Shape
from sgtrick._types import Array, Structure

Blocks = dict[tuple[int, int], Array | None]  # by two leaves


def product(
    spec: CallSpec,
    hessian: Structure,
    batch: Shape,
    events: Sequence[Shape],
    vs: Sequence[Array],
) -> Parts:
    """The products of a Hessian with `vs`, one for each leaf that has derivatives.

    Raises:
        TypeError: The Hessian is something other than real numbers.
        ValueError: Its shape or structure is wrong, or it is not symmetric.
    """
    rows, places = _rows(spec, hessian), spec.places
    blocks = {(i, j): _block(spec, rows[i][j], batch, events, i, j) for i in places for j in places}
    blocks = _symmetric(spec, blocks)
    # Flattened to [batch..., columns, 1].
    columns = {
        j: np.broadcast_to(v, batch + events[j]).reshape((*batch, -1, 1))
        for j, v in zip(places, vs, strict=True)
    }
    return [
        np.broadcast_to(
            sum(_product(blocks[i, j], columns[j]) for j in places),
            (*batch, math.prod(events[i]), 1),
        ).reshape(batch + events[i])
        for i in places
    ]


def _rows(spec: CallSpec, hessian: Structure) -> list[Sequence[Structure]]:
    """The blocks, by two leaves, of the structure of structures that `jax.hessian` returns."""
    if hessian is None:
        raise TypeError(f"hess of {spec.name} must return the Hessian, got None.")
    return [
        [None] * len(spec.paths) if row is None else spec.split(row, f"the Hessian row {path}")
        for row, path in zip(spec.split(hessian, "the Hessian"), spec.paths, strict=True)
    ]


def _block(
    spec: CallSpec, block: Structure, batch: Shape, events: Sequence[Shape], i: int, j: int
) -> Array | None:
    """A checked block as matrices `[batch..., rows, columns]`; None if it is unknown."""
    if block is None:
        return None
    h = spec.checked(block, batch + events[i] + events[j], "the Hessian", _by(spec, i, j))
    # Not of unsigned integers, whose differences would wrap around.
    return h.astype(np.float64).reshape((*batch, math.prod(events[i]), math.prod(events[j])))


def _symmetric(spec: CallSpec, blocks: Blocks) -> Blocks:
    """The symmetric part, which is the same for both modes of differentiation.

    Raises:
        ValueError: It differs from the blocks by more than rounding explains.
    """
    known = [np.abs(h) for h in blocks.values() if h is not None]
    sizes = [np.fmax.reduce(h, (-2, -1), initial=0.0) for h in known]
    means = dict(blocks)
    for (i, j), h in blocks.items():
        other = blocks[j, i]
        if h is None or other is None:
            continue
        mirrored = np.swapaxes(other, -1, -2)
        with np.errstate(invalid="ignore"):  # entries may be infinite
            off = np.abs(h - mirrored) > _ROUNDING * np.max(sizes, 0)[..., None, None]
            means[i, j] = (h + mirrored) / 2
        if np.any(off):
            raise ValueError(
                f"the Hessian of {spec.name} with respect to {_by(spec, i, j)} must be "
                f"symmetric, got {h[off][0]:.8g} and, with rows and columns exchanged, "
                f"{mirrored[off][0]:.8g}. Return all of it, not one triangle."
            )
    return means


def _by(spec: CallSpec, i: int, j: int) -> str:
    return " and ".join(spec.paths[k] for k in (i, j))


# Relative to the largest entry: solvers are not exact, and float16 has three digits.
_ROUNDING = 1e-3


def _product(h: Array | None, v: Array) -> Array:
    """`H_ij v_j`, NaN where the block is unknown and `v_j` is not zero."""
    return np.where(v == 0, 0.0, np.nan).sum(-2, keepdims=True) if h is None else h @ v
