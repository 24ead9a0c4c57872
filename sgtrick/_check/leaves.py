"""Leaves with their names: their entries, gradients, directions and rounding."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._types import Array, Gradient, Tape, Tensor

Named = list[tuple[str, Any]]  # leaves with their paths
OfLeaves = Callable[[Named], Named]


def array(tensor: Tensor) -> Array:
    """A tensor or array as an array: NumPy itself does not convert a single bfloat16."""
    return np.asarray(tensor.numpy() if tf.is_tensor(tensor) else tensor)


def wide(tensor: Tensor) -> Array:
    """A tensor or array as a float64 array."""
    return array(tensor).astype(np.float64)


def tape_gradients(
    tape: Tape, ys: Named, xs: Sequence[Tensor], upstream: Sequence[Array | None]
) -> list[Gradient]:
    """The gradients of the `ys` whose upstream is not None."""
    used = [(y, u) for (_, y), u in zip(ys, upstream, strict=True) if u is not None]
    upstreams = [tf.constant(u, y.dtype) for y, u in used]
    return list(tape.gradient([y for y, _ in used], xs, upstreams))


def unit_upstreams(ys: Named) -> Iterator[tuple[str, list[Any]]]:
    """Yields the name of every entry of the value, and the upstream that selects it."""
    for name, leaf, index in entries_of(ys):
        upstream: list[Any] = [None] * len(ys)
        upstream[leaf] = np.zeros(ys[leaf][1].shape)
        upstream[leaf][index] = 1.0
        yield name, upstream


def entries_of(named: Named) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yields the name of every entry, the number of its leaf, and its index in the leaf."""
    for leaf, (name, tensor) in enumerate(named):
        for index in np.ndindex(*tensor.shape):
            yield name + show_index(index), leaf, index


def show_index(index: tuple[int, ...]) -> str:
    """An index as names of entries end: `[1, 0]`, nothing for a number."""
    return str(list(index)) if index else ""


def random_signs(random: np.random.Generator, named: Named) -> list[Array]:
    """Random signs, 1 or -1, for every entry."""
    return [random.choice([-1.0, 1.0], size=tuple(tensor.shape)) for _, tensor in named]


def concatenate(named: Named) -> Array:
    """All entries in one vector."""
    return np.concatenate([wide(tensor).ravel() for _, tensor in named])


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
