"""The operations that a tensor in a graph was computed by, in loops, branches and functions too."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
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

    @property
    def key(self) -> Hashable:
        """The same for all visits of one tensor that come through the same calls and operations."""
        return graphs.identity_of(self.tensor), self.calls, self.crossed

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
    beside: Collection[Hashable] = (),
    edges: list[tuple[Hashable, Hashable]] | None = None,
) -> Iterator[Visit]:
    """Yields a tensor and all that it depends on, also in called functions and outer graphs.

    Args:
        tensor: Where the walk begins.
        differentiably: Whether to go only where TensorFlow takes derivatives.
        until: The identities of the tensors where the walk ends.
        ends: Whether it ends at another tensor.
        cuts: Types of operations without a derivative that the walk passes all the same.
        beside: The keys of visits that are left out.
        edges: A list for the keys of any two visits of which the first led to the second.
    """
    # Once for each call of the functions around a tensor: their arguments differ.
    seen = set(beside)
    stack = [Visit(tensor)]
    while stack:
        visit = stack.pop()
        if visit.key in seen or (differentiably and not graphs.carries_derivatives(visit.tensor)):
            continue
        seen.add(visit.key)
        found = _arguments(visit)
        if found is None:
            yield visit
            is_end = graphs.identity_of(visit.tensor) in until or (ends is not None and ends(visit))
            found = [] if is_end else _inputs(visit, differentiably, cuts)
        if edges is not None:
            edges.extend((visit.key, v.key) for v in found)
        stack.extend(found)


def leading_to(
    tensor: Tensor,
    ends: Sequence[Collection[Hashable]],
    others: Collection[Hashable],
    cuts: Collection[str],
) -> list[set[Hashable]]:
    """The keys of the visits on the way back to tensors with these identities, for each of `ends`.

    The walk goes where TensorFlow takes derivatives, and through `cuts`, but not through `others`.
    """
    edges: list[tuple[Hashable, Hashable]] = []
    until = set().union(*ends, others)
    visits = list(back(tensor, differentiably=True, until=until, cuts=cuts, edges=edges))
    before = dict[Hashable, list[Hashable]]()
    for first, second in edges:
        before.setdefault(second, []).append(first)
    found = []
    for names in ends:
        leading = set[Hashable]()
        stack = [v.key for v in visits if graphs.identity_of(v.tensor) in names]
        while stack:
            key = stack.pop()
            if key not in leading:
                leading.add(key)
                stack.extend(before.get(key, []))
        found.append(leading)
    return found


def _inputs(visit: Visit, differentiably: bool, cuts: Collection[str]) -> list[Visit]:
    """What a tensor is computed from in one step."""
    t, op = visit.tensor, graphs.operation(visit.tensor)
    if op is None:
        return []
    inside = _results(visit)
    if inside is not None:
        return inside
    outside = graphs.captured_from(t)
    if outside is not None:
        return [visit.to(outside)]
    if not differentiably:
        return list(map(visit.to, op.inputs))
    if not graphs.has_no_gradient(op):
        return list(map(visit.to, overrides.differentiated(op, t.value_index)))
    if op.type in cuts:
        crossed = visit._replace(crossed=visit.crossed | {op.type})
        return list(map(crossed.to, op.inputs))
    return []


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
