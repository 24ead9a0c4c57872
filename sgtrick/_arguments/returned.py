"""What the functions of forms return, checked."""

from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import calls, structures
from sgtrick._types import Argnums, Structure, Tensor


def checked_value(y: Structure, name: str, call: calls.Call) -> Tensor:
    """The value that the function `name` returned, checked to be one tensor with derivatives."""
    if tf.nest.is_nested(y):  # converting would stack a list
        raise TypeError(
            f"{name} must return one tensor, got a {structures.kind_of(y)}. For several outputs "
            "use sgtrick.custom_jvp or sgtrick.custom_vjp."
        )
    y = structures.to_tensor(y, f"the result of {name}", beside=call.leaves)
    if not structures.is_differentiable(y.dtype):
        raise TypeError(
            f"{name} returned dtype {y.dtype.name}, which has no derivatives. Cast it to a "
            "floating dtype."
        )
    return y


def as_tuple(gradients: Structure, argnums: Argnums, name: str) -> Sequence[Structure]:
    """The gradients as a tuple, one for each of `argnums`."""
    if gradients is None:
        raise ValueError(
            f"{name} returned None instead of a gradient: did you forget to return it? Arguments "
            "without a gradient are left out of argnums."
        )
    if not structures.is_sequence(argnums):
        return (gradients,)
    if not (structures.is_sequence(gradients) and len(gradients) == len(argnums)):
        raise ValueError(
            f"{name} must return a tuple of {len(argnums)} gradients, one for each of "
            f"argnums={argnums!r}, got {structures.kind_of(gradients)}."
        )
    return list(gradients)


def pair_of(result: Structure, what: str) -> tuple[Structure, Structure]:
    """The result of a function, checked to be a pair; `what` is the start of the error."""
    if not structures.is_pair(result):
        raise TypeError(f"{what}, got {structures.kind_of(result)}.")
    first, second = result
    return first, second
