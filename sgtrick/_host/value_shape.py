"""The shape of the value of an engine, as its user states it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._types import Structure


class ValueShape:
    """The structure of the value of one batch member, and the shapes of its leaves.

    Attributes:
        like: The structure, with None as its leaves.
        paths: The names of its leaves after "value", such as "['u']".
        shapes: The shapes of its leaves; None for a dimension that is only known when run.
    """

    def __init__(self, stated: Structure) -> None:
        """See `value_shape` of `from_numpy`.

        Raises:
            TypeError: It is neither a shape nor a structure of shapes.
        """
        structure = _with_leaves(stated, "value_shape")
        leaves = list(structures.flatten(structure))
        self.like = tf.nest.map_structure(lambda _: None, structure)
        self.paths = [path for path, _ in leaves]
        self.shapes: list[shapes.Shape] = [tuple(shape.as_list()) for _, shape in leaves]

    @property
    def is_number(self) -> bool:
        """Whether the value is one number."""
        return self.like is None and self.shapes == [()]

    @property
    def is_known(self) -> bool:
        """Whether all dimensions are known."""
        return all(None not in shape for shape in self.shapes)

    @property
    def least(self) -> list[tuple[int, ...]]:
        """The shapes, with zero for unknown dimensions."""
        return [tuple(n or 0 for n in shape) for shape in self.shapes]

    def pack(self, leaves: Sequence[Any]) -> Structure:
        """A value with these leaves."""
        return tf.nest.pack_sequence_as(self.like, leaves)


def _with_leaves(stated: Structure, path: str) -> Structure:
    """The structure with `tf.TensorShape`s as its leaves, since a tuple would be a structure."""
    if isinstance(stated, tf.TensorShape):  # as a framework found it
        return stated
    if isinstance(stated, (tuple, list)) and all(
        n is None or ((shapes.is_int(n) or isinstance(n, np.integer)) and n >= 0) for n in stated
    ):
        return tf.TensorShape(stated)
    if isinstance(stated, Mapping) and stated:
        return {key: _with_leaves(child, f"{path}[{key!r}]") for key, child in stated.items()}
    if isinstance(stated, (tuple, list)):
        make = getattr(stated, "_make", type(stated))
        return make(_with_leaves(child, f"{path}[{i}]") for i, child in enumerate(stated))
    raise TypeError(
        f"{path} must be a tuple of ints, such as (3,), or a dict or tuple of such tuples, got "
        f"{stated!r}. The batch is not part of it."
    )
