"""Helpers for the rules of primitives: mapped arguments and zero tangents."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching

Dims: TypeAlias = Sequence[int | None]  # the mapped axis of each argument, None if it has none


def instantiated(t: Array | SymbolicZero) -> Array:
    """A tangent as an array."""
    return jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t


def batch_size(args: Sequence[Array], dims: Dims) -> Any:
    """The size of the mapped axis: an int, or an expression in symbolic dimensions."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def in_front(args: Sequence[Array], dims: Dims, size: Any = None) -> list[Array]:
    """The arguments with their mapped axis in front; arguments without one are repeated."""
    size = batch_size(args, dims) if size is None else size
    return [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]
