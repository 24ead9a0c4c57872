"""Sequences of tensors with None where there is no derivative.

Pullbacks and pushforwards take and return such sequences.
"""

from collections.abc import Sequence

from sgtrick._types import Tensor


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors that are not None."""
    return [t for t in tensors if t is not None]


def spread(tensors: Sequence[Tensor], like: Sequence[object]) -> list[Tensor | None]:
    """`tensors` at the positions where `like` is not None, and None at the others."""
    some = iter(tensors)
    spread = [None if place is None else next(some) for place in like]
    assert next(some, None) is None
    return spread
