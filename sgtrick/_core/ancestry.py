"""What a tensor in a graph depends on."""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import structures, walk
from sgtrick._core._tensorflow import graphs, tapes
from sgtrick._core.types import Graph, Tape, Tensor


def is_connected(tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether TensorFlow can differentiate a tensor with respect to one of `sources`."""
    wanted = set().union(*map(names_of, sources))
    return any(
        graphs.identity_of(visit.tensor) in wanted
        for visit in walk.back(
            tensor, differentiably=True, until=wanted, ends=cannot_depend_on(sources)
        )
    )


def paths(
    tensor: Tensor,
    sources: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    *,
    cuts: Collection[str] = (),
    tape: Tape | None = None,
    beside: Collection[Hashable] = (),
) -> list[set[frozenset[str]]]:
    """The paths from each of the sources to a tensor, by which of `cuts` they lead through.

    Paths through another source or through `others` do not count.

    Args:
        tensor: A tensor in a graph.
        sources: Where the paths begin.
        others: Where they must not begin.
        cuts: Types of operations without a derivative that paths may lead through.
        tape: A persistent tape that recorded eager tensors that paths may lead through.
        beside: The keys of visits that paths must not lead through.
    """
    names = list(map(names_of, sources))
    found: list[set[frozenset[str]]] = [set() for _ in sources]
    until = {*map(graphs.identity_of, others)}.union(*names)
    too_old = cannot_depend_on(sources)
    for t, _, crossed in walk.back(
        tensor, differentiably=True, until=until, ends=too_old, cuts=cuts, beside=beside
    ):
        name = graphs.identity_of(t)
        if name in until:
            begins = [name in own for own in names]
        elif tape is not None and graphs.operation(t) is None:
            begins = [g is not None for g in tape.gradient(t, sources)]
        else:
            continue
        for paths_of_one in itertools.compress(found, begins):
            paths_of_one.add(crossed)
    return found


def through(
    tensor: Tensor, until: Sequence[Tensor], cuts: Collection[str], graph: Graph | None
) -> list[Tensor]:
    """The tensors from which a tensor is computed through operations without a derivative.

    Paths end there: these tensors have derivatives, of which `tensor` lacks a part. What was
    computed before all of `until` is left out: the function that got these did not compute it.

    Args:
        tensor: A tensor in a graph.
        until: Where paths end without one.
        cuts: The types of those operations.
        graph: Where the tensors have to be in reach, None for eager execution. Handles stand for
            the variables that are read out of reach.
    """
    near = graphs.in_reach(graph)

    def is_in_reach(t: Tensor) -> bool:
        return graphs.operation(t) is None or t.graph in near

    def ends(visit: walk.Visit) -> bool:
        return bool(visit.crossed) and not visit.calls and is_in_reach(visit.tensor)

    found, too_old = {}, cannot_depend_on(until)
    names = set().union(*map(names_of, until))
    for visit in walk.back(
        tensor,
        differentiably=True,
        until=names,
        ends=lambda visit: ends(visit) or too_old(visit),
        cuts=cuts,
    ):
        t = visit.tensor
        if graphs.identity_of(t) in names or not visit.crossed:
            continue
        if not ends(visit):
            t = graphs.handle_read_by(t)
        if t is not None and is_in_reach(t):
            found[graphs.identity_of(t)] = t
    return list(found.values())


def names_of(tensor: Tensor) -> set[Hashable]:
    """The identities of a tensor and of what it is an alias of."""
    return set(map(graphs.identity_of, _same(tensor)))


def _same(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor and the tensors that it is an alias of, within this graph and outside."""
    while tensor is not None:
        yield tensor
        op = graphs.operation(tensor) if isinstance(tensor, tf.Tensor) else None
        if op is None:
            return
        outside = graphs.captured_from(tensor)
        tensor = outside if op.type != "Identity" else op.inputs[0]


def cannot_depend_on(sources: Sequence[Tensor]) -> Callable[[walk.Visit], bool]:
    """Returns whether a walk has come to a tensor that was computed before all of `sources`.

    Never if there are none, or if one is eager or a variable, of which graphs do not tell the age.
    """
    oldest = [list(_same(t))[-1] for t in sources]
    origins = [graphs.operation(t) if isinstance(t, tf.Tensor) else None for t in oldest]
    if not origins or None in origins:
        return lambda _: False

    def ends(visit: walk.Visit) -> bool:
        op = graphs.operation(visit.tensor)
        return op is not None and all(graphs.cannot_depend_on(op, origin) for origin in origins)

    return ends


def has_sources(tensor: Tensor, others: Sequence[Tensor], before: int) -> bool:
    """Whether a tensor may have a derivative other than through `others`.

    Constants that are older than the version `before` of the graph count, since a tape may watch
    them.
    """
    until = set(map(graphs.identity_of, others))
    for t, calls, _ in walk.back(tensor, differentiably=True, until=until):
        op = graphs.operation(t)
        if op is None:
            return True
        if graphs.identity_of(t) in until:
            continue
        if op.type == "Const" and not graphs.was_made_since((*calls, op)[0], before):
            return True
        # A placeholder, or a read from a variable.
        begins = not any(map(graphs.carries_derivatives, op.inputs))
        if begins and (op.type == "Placeholder" or not graphs.has_no_gradient(op)):
            return True
    return False


class Begun(NamedTuple):
    """The older and outer tensors that tensors in a graph depend on.

    Attributes:
        tensors: Those that are differentiated, as seen by a function that closes over them.
        handles: For the identity of each variable's handle how it is used, "read" or "gathered".
        lists: Lists of tensors (`tf.TensorArray`), each with a tensor that was computed from it.
    """

    tensors: list[Tensor]
    handles: dict[Hashable, str]
    lists: list[tuple[Tensor, Tensor]]


def begins(ys: Sequence[Tensor], point: Sequence[Tensor], before: int) -> Begun:
    """The older and outer tensors that tensors in a graph depend on, apart from the point.

    Args:
        ys: Tensors in the graph that is being traced.
        point: Tensors to leave out.
        before: The version of the graph before `ys` were computed.
    """
    seen = set(map(graphs.identity_of, point))
    begun = Begun([], {}, [])
    stack = [(y, y, "read") for y in ys]
    while stack:
        t, computed, use = stack.pop()
        key = graphs.identity_of(t)
        if t.dtype == tf.resource:
            if graphs.holds_floats(t) and begun.handles.get(key) != "gathered":
                begun.handles[key] = use
            continue
        if key in seen or not graphs.carries_derivatives(t):
            continue
        seen.add(key)
        op = graphs.operation(t)
        outside = None if op is None else graphs.captured_from(t)
        if op is None or outside is not None or not graphs.was_made_since(op, before):
            t = t if outside is None else outside
            if structures.is_differentiable(t.dtype):
                begun.tensors.append(t)
            else:
                begun.lists.append((t, computed))
        elif not graphs.has_no_gradient(op):
            use = "gathered" if op.type.startswith("ResourceGather") else "read"
            stack.extend((i, t, use) for i in op.inputs)
    return begun


def elements(listed: Tensor) -> tuple[list[Tensor], bool]:
    """The floating tensors that a list of tensors was made of, and whether these are all.

    They are not if a loop or a function that is being traced got the list as an argument.
    """

    def ends(visit: walk.Visit) -> bool:
        return structures.is_differentiable(visit.tensor.dtype) and not visit.calls

    def is_argument(t: Tensor) -> bool:
        op = graphs.operation(t)
        return op is not None and op.type == "Placeholder" and graphs.captured_from(t) is None

    visits = list(walk.back(listed, differentiably=True, ends=ends))
    are_all = not any(is_argument(v.tensor) for v in visits if not ends(v))
    return [v.tensor for v in visits if ends(v)], are_all


def is_read(tensor: Tensor) -> bool:
    """Whether a tensor is read from a list of tensors, and does not depend on other tensors."""
    live = [
        t.dtype for t in tensor.op.inputs if graphs.carries_derivatives(t) or t.dtype == tf.resource
    ]
    return structures.is_differentiable(tensor.dtype) and live == [tf.variant]


def begins_eagerly(
    y: Tensor, point: Sequence[Tensor], before: int, made_by: Mapping[Hashable, tapes.Operation]
) -> list[Tensor]:
    """The older tensors that an eager tensor depends on and that are differentiated.

    Args:
        y: The tensor.
        point: Tensors to leave out.
        before: The version before `y` was computed.
        made_by: The operations since then, as `tapes.noting` yields them.
    """
    seen = set(map(graphs.identity_of, point))
    tensors, stack = [], [y]
    while stack:
        t = stack.pop()
        key = graphs.identity_of(t)
        if key in seen or not graphs.carries_derivatives(t):
            continue
        seen.add(key)
        if key in made_by:
            if not graphs.type_has_no_gradient(made_by[key].type):
                stack.extend(made_by[key].inputs)
        # What is new is a constant, or the value of a variable.
        elif graphs.is_older(t, before) and tapes.is_recorded([t]):
            tensors.append(t)
    return tensors


def is_made_of(tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether a tensor is computed from `sources` alone.

    False if it depends on a floating constant, a captured tensor, a variable or a host call.
    """
    wanted = set(map(graphs.identity_of, sources))
    for t, *_ in walk.back(tensor, differentiably=False, until=wanted):
        op = graphs.operation(t)
        if op is None or op.type in graphs.HOST_CALLS or t.dtype == tf.resource:
            return False
        begins = not op.inputs and structures.is_differentiable(t.dtype)
        if begins and graphs.identity_of(t) not in wanted:
            return False
    return True
