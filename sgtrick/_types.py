"""The types in signatures.

TensorFlow ships no annotations, so its types are `Any` to type checkers, and their names are for
readers. All other types are checked, and so is where None is allowed.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Tensor: TypeAlias = tf.Tensor  # eager or symbolic
Variable: TypeAlias = tf.Variable
Graph: TypeAlias = tf.Graph
Operation: TypeAlias = tf.Operation
ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction
Tape: TypeAlias = tf.GradientTape
DType: TypeAlias = tf.DType
Spec: TypeAlias = tf.TensorSpec

Array: TypeAlias = npt.NDArray[Any]
TensorLike: TypeAlias = Tensor | Variable | Array | np.generic | bool | int | float | complex

# What tf.nest accepts: a leaf, or a list, tuple, named tuple or dict of structures. Only tf.nest
# looks inside, so a more precise type would not help.
Structure: TypeAlias = Any

# None where there is no derivative; IndexedSlices for a table that is gathered from.
Gradient: TypeAlias = Tensor | tf.IndexedSlices | None
Tangent: TypeAlias = Tensor | None

# From one upstream gradient for each output to one gradient for each input.
Pullback: TypeAlias = Callable[..., Sequence[Gradient]]
# From one tangent for each input to one tangent for each output.
Pushforward: TypeAlias = Callable[..., Sequence[Tangent]]

# What users pass, with any arguments.
Function: TypeAlias = Callable[..., Any]
# What decorators return: a function with attributes of its own, such as `defjvp` or `calls`, which
# type checkers must let pass; or a decorator, if they were called with options alone.
Decorated: TypeAlias = Any
# The arguments of functions, and the options of decorators.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Argnums: TypeAlias = int | str | Sequence[int | str]
Device: TypeAlias = str | tf.DeviceSpec | Sequence[str | tf.DeviceSpec] | None
DTypeLike: TypeAlias = str | DType | np.dtype[Any] | type

# A number of dimensions: a tensor if it depends on a rank that is unknown while tracing.
Ndims: TypeAlias = int | Tensor
