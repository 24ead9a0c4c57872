"""Tensors of the functional API, which have a shape and a dtype but no value yet."""

import dataclasses

import keras

from sgtrick._arguments import structures
from sgtrick._types import Structure
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._types import TensorLike


def any_symbolic(structure: Structure) -> bool:
    """Whether a leaf is a tensor of the functional API."""
    return any(isinstance(leaf, keras.KerasTensor) for _, leaf in structures.flatten(structure))


def _spec(value: TensorLike, name: str, *, dtype: str | None = None) -> keras.KerasTensor:
    if isinstance(value, keras.KerasTensor):
        return value
    tensor = KERAS.to_tensor(value, name, dtype=dtype)
    return keras.KerasTensor(tuple(tensor.shape), KERAS.dtype_of(tensor))


# Only the operations that are needed to check arguments.
SYMBOLIC = dataclasses.replace(
    KERAS,
    to_tensor=_spec,
    as_dtype=lambda t, dtype: keras.KerasTensor(t.shape, dtype),
    broadcast_to=lambda t, shape: keras.KerasTensor(shape, t.dtype),
)
