"""What `custom_jvp` and `custom_vjp` require of a JVP rule."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sgtrick._arguments import calls, shapes, structures
from sgtrick._types import Function, Structure, Tangent, Tensor


def rule_of(jvp: Function) -> Function:
    """The function that `defjvp` was given, without the class or static method around it."""
    inside = calls.unbound(jvp)
    if not callable(inside):
        raise TypeError(f"jvp must be a function, got {type(jvp).__name__}.")
    return inside


def keywords_of(
    function: calls.Callee, rule: calls.Callee, call: calls.Call
) -> Callable[[], dict[str, int]]:
    """What a JVP rule is given by keyword: names, and where their values are in a call.

    It is given the function's arguments by keyword that it can take. Whoever asks gets an error if
    it cannot take one that does not have its default.
    """
    given = dict(zip(call.keywords, range(call.positional, len(call.values)), strict=True))
    defaulted = function.defaulted(call) if given else set()

    def keywords() -> dict[str, int]:
        taken = {key: i for key, i in given.items() if rule.takes_keyword(key)}
        for key in given:
            if key not in taken and key not in defaulted:
                raise TypeError(
                    f"The JVP rule of {function.name} cannot take the keyword-only argument "
                    f"{key!r}, which does not have its default. Give the rule a parameter of this "
                    f"name: jvp(primals, tangents, *, {key})."
                )
        return taken

    return keywords


def outputs_of(y: Structure, name: str, call: calls.Call) -> list[Tensor]:
    """The leaves of the value of a call that are not None, as tensors."""
    if y is None:
        raise TypeError(f"{name} returned None instead of a value: did you forget to return it?")
    return [
        structures.to_tensor(leaf, path, beside=call.leaves)
        for path, leaf in structures.flatten(y, f"{name}(...)")
        if leaf is not None
    ]


def tangents_of(result: Structure, y: Structure, name: str) -> list[Tangent]:
    """The tangents of the tensors in `y`, from what the rule returned.

    Args:
        result: The pair `(primal_out, tangent_out)`.
        y: The value, of tensors and None.
        name: The name of the function in errors.

    Raises:
        TypeError: It is no pair, or a part of it has another dtype than its output.
        ValueError: A part of it has another structure or other shapes than `y`.
    """
    if not structures.is_pair(result):
        raise TypeError(
            f"jvp of {name} must return (primal_out, tangent_out), got {type(result).__name__}."
        )
    primal, tangent = result
    what = f"{name}(...)"
    if primal is not None:
        for path, leaf, p in structures.pair(y, primal, what, "primal_out"):
            _check_primal(p, leaf, f"{what}{path}")
    found = list[Tangent]()
    for path, leaf, t in structures.pair(y, tangent, what, "tangent_out"):
        if leaf is not None:
            found.append(None if t is None else _checked(t, leaf, f"{what}{path}"))
        elif t is not None:
            raise TypeError(f"{what}{path} is None, but it has a tangent. Return None there.")
    return found


def _check_primal(primal: Any, y: Tensor | None, path: str) -> None:
    """Checks that what a rule returned as the value looks like the value; None says nothing."""
    if primal is None:
        return
    is_number = type(primal) in (int, float, complex)  # which has no dtype of its own
    came, expected = (_dtype_of(y if is_number else primal), _dtype_of(y))
    if came != expected or y is None:
        raise TypeError(
            f"primal_out has dtype {came} for {path}, the value {expected}. The two must be equal; "
            "or return None as primal_out, since the value is known."
        )
    shape = tf.TensorShape(getattr(primal, "shape", ()))
    known = None if shape.rank is None else tuple(shape.as_list())
    shapes.check_equal(known, structures.static_shape(y), f"primal_out for {path}", "the value")


def _dtype_of(t: Any) -> str:
    dtype = getattr(t, "dtype", None)
    return f"none, {type(t).__name__}" if dtype is None else str(tf.as_dtype(dtype).name)


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
