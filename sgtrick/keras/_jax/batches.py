"""Helpers for the rules of primitives: mapped arguments and zero tangents."""

from typing import Any

from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching


def instantiated(t: Any) -> Any:
    """A tangent as an array."""
    return jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t


def batch_size(args: Any, dims: Any) -> Any:
    """The size of the mapped axis: an int, or an expression in symbolic dimensions."""
    return next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)


def in_front(args: Any, dims: Any, size: Any = None) -> list[Any]:
    """The arguments with their mapped axis in front; arguments without one are repeated."""
    size = batch_size(args, dims) if size is None else size
    return [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]
