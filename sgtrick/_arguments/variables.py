"""The variables that a function reads, and their gradients."""

from collections.abc import Sequence
from typing import Any

from sgtrick._arguments import shapes, structures
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._types import Gradient, Structure, Tensor, Variable


def besides(variables: Sequence[Variable], passed: Sequence[Any]) -> list[Variable]:
    """The variables that were not passed. Keras layers wrap variables, and cast what they read."""
    handles = [handle_of(a) for a in passed]
    known = {id(t) for t in (*passed, *handles) if t is not None}
    return [v for v in variables if id(v) not in known and id(handle_of(v)) not in known]


def handle_of(variable: object) -> Tensor | None:
    """The handle of a variable; None of anything else."""
    variable = getattr(variable, "_value", variable)
    try:
        return getattr(variable, "handle", None)
    except ValueError:  # a variable of many replicas, read outside of them
        return None


def pull_variables(
    jacobians: Structure,
    variables: list[Variable],
    reads: list[Tensor],
    y: Tensor,
    upstream: Tensor,
    name: str,
) -> list[Gradient]:
    """Returns the gradient of each variable, from the Jacobians that a gradient function returned.

    Args:
        jacobians: Of `y` with respect to each of them.
        variables: The variables that the function read.
        reads: Their values.
        y: The value of the function.
        upstream: The gradient with respect to `y`.
        name: The function's name in errors.
    """
    names = [v.name for v in variables]
    what = f"grad of {name} must return a gradient for each of the variables"
    if not isinstance(jacobians, (list, tuple)) or len(jacobians) != len(names):
        raise ValueError(
            f"{what} {names}, in a list in this order, got {structures.kind_of(jacobians)}."
        )
    missing = [v for v, g in zip(names, jacobians, strict=True) if g is None]
    if missing:
        raise ValueError(f"{what}, but returned None for {missing}. If it is zero, return zeros.")
    return [
        _pull_one(g, x, y, upstream, v) for g, x, v in zip(jacobians, reads, names, strict=True)
    ]


def _pull_one(gx: Tensor, x: Tensor, y: Tensor, upstream: Tensor, variable: str) -> Gradient:
    what = f"the gradient with respect to the variable {variable}"
    names = shapes.Names("the value", what, f"the variable {variable}")
    return TENSORFLOW.transpose(TENSORFLOW.leaf("", x, gx, y, 0, names), upstream)
