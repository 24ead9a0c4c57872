"""Sequences of tensors with None where there is no derivative.

Pullbacks and pushforwards take and return such sequences. Functions that TensorFlow traces take and
return only tensors.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._types import Gradient, Tensor


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors that are not None."""
    return [t for t in tensors if t is not None]


def spread(tensors: Sequence[Tensor], like: Sequence[object]) -> list[Tensor | None]:
    """`tensors` at the positions where `like` is not None, and None at the others."""
    some = iter(tensors)
    spread = [None if place is None else next(some) for place in like]
    assert next(some, None) is None
    return spread


class TensorsOnly:
    """A function with None among its arguments and results, as a function of tensors only."""

    def __init__(self, f: Callable[..., Sequence[Gradient]], like: Sequence[object]) -> None:
        """The arguments of `f` that are None in `like` are always None."""
        self._f, self._like = f, like
        self._there: Sequence[bool | None] = ()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Calls `f`, and returns the results that are not None."""
        results = self._f(*spread(tensors, self._like))
        self._there = [None if r is None else True for r in results]
        return [tf.convert_to_tensor(r) for r in results if r is not None]

    def restored(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        """Results of the last call, or tensors computed from them, with None put back."""
        return spread(results, self._there)
