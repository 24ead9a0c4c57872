"""The variables that a function reads."""

from collections.abc import Sequence
from typing import Any

from sgtrick._types import Tensor, Variable


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
