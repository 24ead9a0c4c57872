"""What `custom_vjp` requires of a function and its rule, shared with `sgtrick.keras`."""

from collections.abc import Sequence
from typing import Any

from sgtrick._core import calls, shapes, structures
from sgtrick._core.types import Args, Function, Gradient, Kwargs, Structure, Tensor


def value_and_rule(f: Function, returned: Structure, rule: str) -> tuple[Structure, Function]:
    """Returns the result of `f`, checked to be a pair; `rule` is what its second part is called."""
    if not (structures.is_pair(returned) and callable(returned[1])):
        raise TypeError(
            f"{calls.name_of(f)} must return (y, {rule}), the value and a function from the "
            "upstream gradient to the gradients of the arguments, got "
            f"{structures.kind_of(returned)}."
        )
    y, pull = returned
    return y, pull


def gradients_of(
    primals: Sequence[Tensor], returned: Structure, paths: Sequence[str], rule: str
) -> list[tuple[Gradient, str]]:
    """Returns `(gradient, path)` for each primal that is not None, from what `rule` returned."""
    gradients = [leaf for _, leaf in structures.flatten(returned)]
    omitted = primals[len(gradients) :]
    if len(gradients) > len(primals) or any(x is not None for x in omitted):
        raise ValueError(
            f"{rule} returned {len(gradients)} gradients, expected {len(primals)}, one for each "
            f"of: {', '.join(paths)}."
        )
    # Not strict: at the end, arguments without a gradient may be left out.
    return [
        (g, path) for g, x, path in zip(gradients, primals, paths, strict=False) if x is not None
    ]


def check_shape(
    shape: shapes.Shape | None, expected: shapes.Shape | None, path: str, rule: str
) -> None:
    """Checks that a gradient that `rule` returned may have the shape of its argument."""
    if shape is not None and expected is not None and not shapes.compatible(shape, expected):
        raise ValueError(
            f"{rule} returned a gradient of shape {shapes.show(shape)} for {path}, expected "
            f"{shapes.show(expected)}."
        )


def leaves_of(args: Args, kwargs: Kwargs) -> list[tuple[str, Any]]:
    """`(path, leaf)` of all arguments; keywords in the given order, which `tf.nest` would sort."""
    leaves = [*structures.flatten(args, "argument ")]
    for name, value in kwargs.items():
        leaves += structures.flatten(value, f"argument [{name!r}]")
    return leaves
