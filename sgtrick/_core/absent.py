"""Sequences of tensors in which None stands where there is no derivative.

Pullbacks and their likes take and return such sequences. What TensorFlow traces takes and returns
tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core.types import Gradient, Tensor


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are not None."""
    return [t for t in tensors if t is not None]


def spread(tensors: Sequence[Tensor], like: Sequence[Any]) -> list[Tensor | None]:
    """`tensors` in the places in which `like` holds something, and None in the others."""
    some = iter(tensors)
    spread = [None if place is None else next(some) for place in like]
    assert next(some, None) is None
    return spread


class Dense:
    """A function with None among its arguments and its results, as one of tensors alone."""

    def __init__(self, f: Callable[..., Sequence[Gradient]], like: Sequence[Any]) -> None:
        """None are those of the arguments of `f` that are None in `like`."""
        self._f, self._like = f, like
        self._there: Sequence[bool | None] = ()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Calls `f` on the arguments that are there, and returns the results that are."""
        results = self._f(*spread(tensors, self._like))
        self._there = [None if r is None else True for r in results]
        return [tf.convert_to_tensor(r) for r in results if r is not None]

    def restored(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """What the last call returned, or what was computed from that since, with None again."""
        return spread(results, self._there)
