"""What `custom_jvp` and `custom_vjp` require of a JVP rule."""

from sgtrick._arguments import calls, structures
from sgtrick._types import Function, Structure, Tangent, Tensor


def rule_of(jvp: Function) -> Function:
    """The function that `defjvp` was given, without the class or static method around it."""
    inside = calls.unbound(jvp)
    if not callable(inside):
        raise TypeError(f"jvp must be a function, got {type(jvp).__name__}.")
    return inside


def outputs_of(y: Structure, name: str, call: calls.Call) -> list[Tensor]:
    """The leaves of the value of a call, as tensors."""
    return [
        structures.to_tensor(leaf, path, beside=call.leaves)
        for path, leaf in structures.flatten(y, f"{name}(...)")
    ]


def tangents_of(result: Structure, y: Structure, name: str) -> list[Tangent]:
    """The tangents of the leaves of `y`, from what the rule returned.

    Args:
        result: The pair `(primal_out, tangent_out)`.
        y: The value, of tensors.
        name: The name of the function in errors.

    Raises:
        TypeError: It is no pair, or a tangent has another dtype than its output.
        ValueError: `tangent_out` has another structure or other shapes than `y`.
    """
    if not structures.is_pair(result):
        raise TypeError(
            f"jvp of {name} must return (primal_out, tangent_out), got {type(result).__name__}."
        )
    pairs = structures.pair(y, result[1], f"{name}(...)", "tangent_out")
    return [
        None if t is None else _checked(t, leaf, f"{name}(...){path}") for path, leaf, t in pairs
    ]


def _checked(tangent: Tensor, y: Tensor, path: str) -> Tensor:
    """A tangent, checked to have the dtype and shape of its output."""
    is_number = type(tangent) in (int, float, complex)  # which has no dtype of its own
    dtype = y.dtype if is_number else None
    tangent = structures.to_tensor(tangent, f"the tangent of {path}", dtype=dtype)
    if tangent.dtype != y.dtype or not structures.is_differentiable(y.dtype):
        raise TypeError(
            f"The tangent of {path} has dtype {tangent.dtype.name}, the output {y.dtype.name}. "
            "The two must be equal, and floating or complex. For an output without a derivative, "
            "return None."
        )
    return structures.shaped_like(tangent, y, f"The tangent of {path}", "the output")
