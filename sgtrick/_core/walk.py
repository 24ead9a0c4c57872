"""The operations that a tensor in a graph was computed by, in loops, branches and functions too."""

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import NamedTuple

from sgtrick._core._tensorflow import graphs, overrides
from sgtrick._core.types import Operation, Tensor


class Visit(NamedTuple):
    """A tensor that a walk has come to.

    Attributes:
        tensor: The tensor.
        calls: The calls, loops and branches whose functions the tensor is in, the innermost last.
        crossed: The types of the operations without a derivative that the walk has passed.
    """

    tensor: Tensor
    calls: tuple[Operation, ...] = ()
    crossed: frozenset[str] = frozenset()

    def to(self, tensor: Tensor) -> "Visit":
        """The same for another tensor in the same function."""
        return self._replace(tensor=tensor)


def back(
    tensor: Tensor,
    *,
    differentiably: bool,
    until: Collection[Hashable] = (),
    ends: Callable[[Visit], bool] | None = None,
    cuts: Collection[str] = (),
) -> Iterator[Visit]:
    """Yields a tensor and all that it depends on, also in called functions and outer graphs.

    Args:
        tensor: Where the walk begins.
        differentiably: Whether to go only where TensorFlow takes derivatives.
        until: The identities of the tensors where the walk ends.
        ends: Whether it ends at another tensor.
        cuts: Types of operations without a derivative that the walk passes all the same.
    """
    # Once for each call of the functions around a tensor: their arguments differ.
    seen: set[tuple[Hashable, tuple[Operation, ...], frozenset[str]]] = set()
    stack = [Visit(tensor)]
    while stack:
        visit = stack.pop()
        t = visit.tensor
        key = graphs.identity_of(t)
        if (key, visit.calls, visit.crossed) in seen:
            continue
        if differentiably and not graphs.carries_derivatives(t):
            continue
        seen.add((key, visit.calls, visit.crossed))
        arguments = _arguments(visit)
        if arguments is not None:
            stack.extend(arguments)
            continue
        yield visit
        op = graphs.operation(t)
        if key in until or op is None or (ends is not None and ends(visit)):
            continue
        inside = _results(visit)
        outside = graphs.captured_from(t)
        if inside is not None:
            stack.extend(inside)
        elif outside is not None:
            stack.append(visit.to(outside))
        elif not differentiably:
            stack.extend(map(visit.to, op.inputs))
        elif not graphs.has_no_gradient(op):
            stack.extend(map(visit.to, overrides.differentiated(op, t.value_index)))
        elif op.type in cuts:
            crossed = visit.crossed | {op.type}
            stack.extend(visit.to(i)._replace(crossed=crossed) for i in op.inputs)


def _results(visit: Visit) -> list[Visit] | None:
    """The results of the functions that computed a tensor; None if it is no result of functions."""
    t = visit.tensor
    functions = graphs.called_functions(t.op)
    if not functions:
        return None
    calls = (*visit.calls, t.op)
    found = [visit._replace(tensor=f.outputs[t.value_index], calls=calls) for f in functions]
    if graphs.is_loop(t.op):  # which may take no step
        found.append(visit.to(t.op.inputs[t.value_index]))
    return found


def _arguments(visit: Visit) -> list[Visit] | None:
    """What an argument stands for in the function that was entered last; None for other tensors."""
    t, calls = visit.tensor, visit.calls
    if not calls or graphs.operation(t) is None or t.op.type != "Placeholder":
        return None
    call = calls[-1]
    function = next((f for f in graphs.called_functions(call) if f is t.graph), None)
    if function is None:
        return None
    index = [p.name for p in function.inputs].index(t.name)
    first = len(call.inputs) - len(function.inputs)  # after what chooses a branch
    found = [visit._replace(tensor=call.inputs[first + index], calls=calls[:-1])]
    if graphs.is_loop(call):  # from the step before
        found.append(visit.to(function.outputs[index]))
    return found
