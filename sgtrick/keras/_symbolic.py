"""Arguments as Keras passes them: of its backend, or symbolic ones of the functional API."""

from typing import Any

import keras
from keras import ops

from sgtrick import _leaves


def any_symbolic(structure: Any) -> bool:
    """Whether a leaf is a tensor of the functional API, that has no value yet."""
    return any(isinstance(leaf, keras.KerasTensor) for _, leaf in _leaves.flatten(structure))


def spec(value: Any, name: str) -> keras.KerasTensor:
    """The shape and dtype of an argument, symbolic or not."""
    if isinstance(value, keras.KerasTensor):
        return value
    tensor = to_tensor(value, name)
    return keras.KerasTensor(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))


def to_tensor(value: Any, name: str, dtype: str | None = None) -> Any:
    """`ops.convert_to_tensor` whose errors name the argument."""
    try:
        return ops.convert_to_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _leaves.no_tensor(value, name, error) from error
