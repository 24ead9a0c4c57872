"""What `custom_vjp` requires of a function and its rule, shared with `sgtrick.keras`."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from sgtrick._arguments import calls, shapes, structures
from sgtrick._types import Function, Gradient, Structure, Tensor


class Argument(NamedTuple):
    """An argument of a call.

    Attributes:
        name: Its name in errors.
        places: Where its leaves are: `['a'][0]`.
        leaves: Its leaves.
        is_default: Whether the caller left it out.
    """

    name: str
    places: list[str]
    leaves: list[Any]
    is_default: bool

    @property
    def paths(self) -> list[str]:
        """The names of its leaves."""
        return [self.name + place for place in self.places]


def arguments_of(call: calls.Call, names: Sequence[str], own: int) -> list[Argument]:
    """The arguments of a call, except the first `own` ones; `names` are those of all arguments."""
    found = []
    for name, value in zip(names[own:], call.values[own:], strict=True):
        flat = list(structures.flatten(value))
        places, leaves = [place for place, _ in flat], [leaf for _, leaf in flat]
        found.append(Argument(name, places, leaves, name in call.defaults))
    return found


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
    arguments: Sequence[Argument], primals: Sequence[Tensor | None], returned: Structure, rule: str
) -> list[tuple[Gradient, str]]:
    """Returns `(gradient, path)` for each primal that is not None, from what `rule` returned.

    Args:
        arguments: Those of the call.
        primals: Their leaves, None for those with respect to which nothing is differentiated.
        returned: One gradient for each argument, or one for each leaf.
        rule: The name of the rule in errors.

    Raises:
        ValueError: `returned` is neither, or both with different meanings.
        TypeError: There is a gradient of something that has no derivatives.
    """
    found = _readings(arguments, primals, returned)
    if not found:
        raise ValueError(_misfit(arguments, returned, rule))
    paths = [path for a in arguments for path in a.paths]
    leaves = [leaf for a in arguments for leaf in a.leaves]
    may_have = [
        x is not None or structures.has_derivatives(leaf)
        for x, leaf in zip(primals, leaves, strict=True)
    ]
    wrong = [_places_of_others(gradients, may_have) for gradients in found]
    if all(wrong):
        path, leaf = paths[wrong[0][0]], leaves[wrong[0][0]]
        raise TypeError(
            f"{rule} returned a gradient for {path}, which has no derivatives: it is "
            f"{_kind_of(leaf)}. Return None there, or pass {path} as a floating tensor."
        )
    first, *others = [
        gradients for gradients, places in zip(found, wrong, strict=True) if not places
    ]
    if any(g is not h for other in others for g, h in zip(first, other, strict=True)):
        raise ValueError(
            f"What {rule} returned can be understood in two ways: as one gradient for each of "
            f"{', '.join(a.name for a in arguments)}, or as one for each of their leaves. Return "
            "the gradient of each argument in its structure."
        )
    return [(g, path) for g, x, path in zip(first, primals, paths, strict=True) if x is not None]


def _places_of_others(gradients: Sequence[Gradient], may_have: Sequence[bool]) -> list[int]:
    """Where there is a gradient of something that cannot have one."""
    return [
        i
        for i, (g, may) in enumerate(zip(gradients, may_have, strict=True))
        if g is not None and not may
    ]


def _readings(
    arguments: Sequence[Argument], primals: Sequence[Tensor | None], returned: Structure
) -> list[list[Gradient]]:
    """The gradients of all leaves, in each way in which `returned` gives them.

    Defaults that the caller left out may be left out by the rule too, as in TensorFlow, unless
    their gradients may be requested.
    """
    rest = iter(primals)
    inputs = [list(itertools.islice(rest, len(a.leaves))) for a in arguments]
    passed = [
        not a.is_default or any(x is not None for x in xs)
        for a, xs in zip(arguments, inputs, strict=True)
    ]
    found = _ways(arguments, returned)
    if all(passed):
        return found
    for way in _ways(list(itertools.compress(arguments, passed)), returned):
        some = iter(way)
        found.append(
            [
                next(some) if is_passed else None
                for a, is_passed in zip(arguments, passed, strict=True)
                for _ in a.leaves
            ]
        )
    return found


def _ways(arguments: Sequence[Argument], returned: Structure) -> list[list[Gradient]]:
    """The same, where the rule leaves out no argument."""
    found = []
    if len(arguments) == 1:  # its gradient need not be in a list
        found.append(_by_argument(arguments, [returned]))
    if isinstance(returned, (list, tuple)):
        found.append(_by_argument(arguments, returned))
    flat = list(structures.flatten(returned))
    keys = [_keys(place) for place, _ in flat]
    of_arguments = [_keys(place) for a in arguments for place in a.places]
    # A dictionary of gradients must not go by its order: that of tf.nest is not that of arguments.
    if len(keys) == len(of_arguments) and (keys == of_arguments or not any(keys)):
        found.append([g for _, g in flat])
    return [gradients for gradients in found if gradients is not None]


def _by_argument(
    arguments: Sequence[Argument], returned: Sequence[Structure]
) -> list[Gradient] | None:
    """The gradients of all leaves, if `returned` has None or the structure of each argument."""
    if len(returned) != len(arguments):
        return None
    found: list[Gradient] = []
    for argument, gradient in zip(arguments, returned, strict=True):
        flat = list(structures.flatten(gradient))
        if gradient is None:
            found += [None] * len(argument.leaves)
        elif [place for place, _ in flat] == argument.places:
            found += [g for _, g in flat]
        else:
            return None
    return found


def _keys(place: str) -> list[str]:
    """The keys of dictionaries on the way to a leaf."""
    return [part for part in place.split("[") if part.startswith(("'", '"'))]


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
    return f"{rule} returned {count} gradients, expected {expected}."


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
