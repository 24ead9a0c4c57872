"""Packing and unpacking of structures, in Python code that torch.compile can trace."""

from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._types import Structure
from sgtrick.keras._types import Tensor


def leaves(structure: Structure) -> list[Tensor]:
    """The leaves in the order of `tf.nest.flatten`."""
    return [leaf for _, leaf in structures.flatten(structure)]


def pack(structure: Structure, leaves: Sequence[Tensor]) -> Structure:
    """`structure` with its leaves replaced by `leaves`."""
    return _packed(structure, iter(leaves))


def _packed(structure: Structure, rest: Iterator[Tensor]) -> Structure:
    if isinstance(structure, Mapping):
        packed = {key: _packed(structure[key], rest) for key in sorted(structure)}
        return {key: packed[key] for key in structure}
    if isinstance(structure, (list, tuple)):
        children = [_packed(child, rest) for child in structure]
        named = hasattr(structure, "_fields")
        return type(structure)(*children) if named else type(structure)(children)
    if structures.is_sequence(structure) or structures.is_object(structure):
        flat, like = tf.nest.flatten(structure), structures.copied(structure)
        return tf.nest.pack_sequence_as(like, [next(rest) for _ in flat])
    return next(rest)
