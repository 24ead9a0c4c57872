"""What `custom_vjp` requires of a function and its rule, shared with `sgtrick.keras`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sgtrick._arguments import calls, shapes, structures
from sgtrick._types import Function, Gradient, Structure, Tensor


class Argument(NamedTuple):
    """An argument of a call.

    Attributes:
        name: Its name in errors.
        places: Where its leaves are: `['a'][0]`.
        leaves: Its leaves.
        is_default: Whether it has the default of its parameter.
    """

    name: str
    places: list[str]
    leaves: list[Any]
    is_default: bool

    @property
    def paths(self) -> list[str]:
        """The names of its leaves."""
        return [self.name + place for place in self.places]


def arguments_of(
    function: calls.Callee, call: calls.Call, own: int, defaulted: set[str]
) -> list[Argument]:
    """The arguments of a call, except the first `own` ones, and which have their default."""
    found = []
    for name, flat in zip(function.names(call)[own:], call.flat[own:], strict=True):
        places, leaves = [place for place, _ in flat], [leaf for _, leaf in flat]
        found.append(Argument(name, places, leaves, name in defaulted))
    return found


def value_and_rule(f: Function, returned: Structure, rule: str) -> tuple[Structure, Function]:
    """Returns the result of `f`, checked to be a pair; `rule` is what its second part is called."""
    if not (structures.is_pair(returned) and callable(returned[1])):
        got = structures.kind_of(returned)
        if structures.is_pair(returned):
            got += f" whose second part is a {type(returned[1]).__name__}, not a function"
        raise TypeError(
            f"{calls.name_of(f)} must return (y, {rule}), the value and a function from the "
            f"upstream gradient to the gradients of the arguments, got {got}."
        )
    y, pull = returned
    if y is None:
        raise TypeError(f"{calls.name_of(f)} returned None as its value. Return a tensor.")
    return y, pull


def gradients_of(
    arguments: Sequence[Argument],
    primals: Sequence[Tensor | None],
    returned: Structure,
    rule: str,
    is_zero: Callable[[Any, Any], bool] = lambda _, __: False,
) -> list[tuple[Gradient, str]]:
    """Returns `(gradient, path)` for each primal that is not None, from what `rule` returned.

    Args:
        arguments: The arguments of the call.
        primals: Their leaves, None for those with respect to which nothing is differentiated.
        returned: One gradient for each argument, or one for each leaf.
        rule: The name of the rule in errors.
        is_zero: Whether a gradient says nothing of a leaf that has no derivatives.

    Raises:
        ValueError: `returned` is neither, or both with different meanings.
        TypeError: There is a gradient of something that has no derivatives.
    """
    pairs = zip((path for a in arguments for path in a.paths), primals, strict=True)
    inputs = [path for path, x in pairs if x is not None]
    required = [a for a in arguments if not (a.is_default and set(inputs).isdisjoint(a.paths))]
    readings = _readings(arguments, returned)
    if len(required) < len(arguments):
        readings += _readings(required, returned)
    if not readings:
        raise ValueError(_misfit(arguments, returned, rule))
    without = {
        path: leaf
        for a in arguments
        for path, leaf in zip(a.paths, a.leaves, strict=True)
        if path not in inputs and not structures.has_derivatives(leaf)
    }
    wrong = [
        [
            path
            for path, g in reading.items()
            if g is not None and path in without and not is_zero(g, without[path])
        ]
        for reading in readings
    ]
    if all(wrong):
        path = wrong[0][0]
        raise TypeError(
            f"{rule} returned a gradient for {path}, which has no derivatives: it is "
            f"{_kind_of(without[path])}. Return None there, or pass {path} as a floating tensor."
        )
    first, *others = [reading for reading, paths in zip(readings, wrong, strict=True) if not paths]
    if any(first.get(path) is not other.get(path) for other in others for path in inputs):
        raise ValueError(
            f"What {rule} returned can be understood in two ways: as one gradient for each of "
            f"{', '.join(a.name for a in arguments)}, or as one for each of their leaves. Return "
            "the gradient of each argument in its structure."
        )
    return [(first.get(path), path) for path in inputs]


def _readings(arguments: Sequence[Argument], returned: Structure) -> list[dict[str, Gradient]]:
    """The gradients by path, without those that are None, in each way `returned` gives them."""
    is_list = isinstance(returned, (list, tuple))
    gradients = list(returned) if is_list else [returned]
    by_argument = [_by_argument(arguments, gradients)]
    if len(arguments) == 1 and is_list:  # its gradient need not be in a list
        by_argument.append(_by_argument(arguments, [returned]))
    readings = [reading for reading in by_argument if reading is not None]
    paths = [path for a in arguments for path in a.paths]
    if readings and paths == [a.name for a in arguments]:
        return readings
    flat = list(structures.flatten(gradients))
    if len(flat) == len(paths) and all(place.count("[") == 1 for place, _ in flat):
        readings.append(dict(zip(paths, (g for _, g in flat), strict=True)))
    return readings


def _by_argument(
    arguments: Sequence[Argument], gradients: Sequence[Structure]
) -> dict[str, Gradient] | None:
    """The gradients by path, if there is one for each argument, in its structure or None."""
    if len(gradients) != len(arguments):
        return None
    found: dict[str, Gradient] = {}
    for argument, gradient in zip(arguments, gradients, strict=True):
        flat = dict(structures.flatten(gradient))
        if gradient is None:
            continue
        if list(flat) != argument.places:
            return None
        found.update(zip(argument.paths, flat.values(), strict=True))
    return found


def _misfit(arguments: Sequence[Argument], returned: Structure, rule: str) -> str:
    count = len(list(structures.flatten(returned)))
    names = [a.name for a in arguments]
    paths = [path for a in arguments for path in a.paths]
    expected = f"{len(names)}, one for each of: {', '.join(names) or 'no arguments'}"
    if paths != names:
        expected = (
            f"one for each argument, None or in its structure: {', '.join(names)}; or one for each "
            f"leaf: {', '.join(paths) or 'none'}"
        )
    return f"{rule} returned {count} gradient{'' if count == 1 else 's'}, expected {expected}."


def _kind_of(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    return type(leaf).__name__ if dtype is None else f"of dtype {getattr(dtype, 'name', dtype)}"


def check_shape(
    shape: shapes.Shape | None, expected: shapes.Shape | None, path: str, rule: str
) -> None:
    """Checks that a gradient that `rule` returned may have the shape of its argument."""
    if shape is not None and expected is not None and not shapes.compatible(shape, expected):
        raise ValueError(
            f"{rule} returned a gradient of shape {shapes.show(shape)} for {path}, expected "
            f"{shapes.show(expected)}."
        )
