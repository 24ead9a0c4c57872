"""The types that signatures name.

TensorFlow ships no annotations. So what is its own is `Any` to type checkers, and its name is for
readers; the rest, and where None may stand, is checked.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Tensor: TypeAlias = tf.Tensor  # eager, or of a graph
Variable: TypeAlias = tf.Variable
Graph: TypeAlias = tf.Graph
Operation: TypeAlias = tf.Operation
Tape: TypeAlias = tf.GradientTape
DType: TypeAlias = tf.DType
Spec: TypeAlias = tf.TensorSpec

Array: TypeAlias = npt.NDArray[Any]
TensorLike: TypeAlias = Tensor | Variable | Array | np.generic | bool | int | float | complex

# What tf.nest takes: a leaf, or lists, tuples, named tuples and dicts of structures. Only
# tf.nest looks into one, so that no type says more.
Structure: TypeAlias = Any

# None where there is no derivative. With respect to a table that is gathered from, slices.
Gradient: TypeAlias = Tensor | tf.IndexedSlices | None
Tangent: TypeAlias = Tensor | None

# From one upstream gradient for each output to one gradient for each input.
Pullback: TypeAlias = Callable[..., Sequence[Gradient]]
# From one tangent for each input to one tangent for each output.
Pushforward: TypeAlias = Callable[..., Sequence[Tangent]]

# What users pass: of any arguments.
Function: TypeAlias = Callable[..., Any]
# What functions take, and what is read of their decorators' options.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Argnums: TypeAlias = int | str | Sequence[int | str]
Device: TypeAlias = str | tf.DeviceSpec | Sequence[str | tf.DeviceSpec] | None
DTypeLike: TypeAlias = str | DType | np.dtype[Any] | type

# A number of dimensions: a tensor where it depends on a rank that is not known while tracing.
Ndims: TypeAlias = int | Tensor
