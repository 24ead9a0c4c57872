"""Tensors with names as one vector of their entries; sizes and rounding of these."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._types import Array, Tensor

Named = list[tuple[str, Any]]  # leaves with their paths
OfLeaves = Callable[[Sequence[Tensor]], Named]


def concatenate(tensors: Sequence[Tensor]) -> Array:
    """All entries in one float64 vector."""
    # By way of numpy(): NumPy itself does not convert a single bfloat16.
    arrays = [np.asarray(t.numpy()).astype(np.float64) for t in tensors]
    return np.concatenate([a.ravel() for a in arrays])


def split(vector: Array, likes: Sequence[Tensor]) -> list[Tensor]:
    """The entries as tensors with the shapes and dtypes of others."""
    ends = np.cumsum([like.shape.num_elements() for like in likes])
    parts = zip(np.split(vector, ends[:-1]), likes, strict=True)
    return [tf.constant(np.reshape(part, like.shape), like.dtype) for part, like in parts]


def sizes_of_leaves(tensors: Sequence[Tensor]) -> Array:
    """For every entry the size of the largest in its leaf, or 1 if all are zero."""
    arrays = [np.abs(concatenate([t])) for t in tensors]
    return np.concatenate([np.full(a.size, a.max(initial=0.0) or 1.0) for a in arrays])


def sizes_of_entries(tensors: Sequence[Tensor]) -> Array:
    """The size of every entry; that of its leaf if it is zero."""
    sizes = np.abs(concatenate(tensors))
    return np.where(sizes == 0, sizes_of_leaves(tensors), sizes)


def unit_vectors(n: int) -> Iterator[Array]:
    """The rows of the identity matrix, one at a time."""
    for i in range(n):
        row = np.zeros(n)
        row[i] = 1.0
        yield row


def repeated(numbers: Sequence[Any], tensors: Sequence[Tensor]) -> Array:
    """One number for each tensor, repeated for its entries."""
    return np.repeat(numbers, [t.shape.num_elements() for t in tensors])


def names_of_entries(named: Named) -> list[str]:
    """The name of every entry: with an index such as `[1, 0]`, but of a number none."""
    return [
        name + (str(list(index)) if index else "")
        for name, tensor in named
        for index in np.ndindex(*tensor.shape)
    ]


def unit_roundoff(tensor: Tensor) -> float:
    """The distance from 1 to the next number of the tensor's dtype."""
    return float(np.spacing(np.ones((), tensor.dtype.as_numpy_dtype)))


def least_normal(tensor: Tensor) -> float:
    """The size below which TensorFlow's kernels take numbers of the tensor's dtype for zero.

    It is the smallest normal number, or for float16, which they compute in float32, the smallest
    number of all.
    """
    dtype = tensor.dtype.as_numpy_dtype
    computed = np.float64 if tensor.dtype == tf.float64 else np.float32
    return max(float(np.spacing(np.zeros((), dtype))), float(np.finfo(computed).tiny))
