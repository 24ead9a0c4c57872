"""What a tensor in a graph depends on, found by walking back along its operations."""

from collections.abc import Collection, Hashable, Iterator, Sequence

import tensorflow as tf

from sgtrick._core import structures
from sgtrick._core._tensorflow import graphs
from sgtrick._core.types import Operation, Tape, Tensor


def is_connected(
    tensor: Tensor,
    sources: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    *,
    cuts: Collection[str] = (),
) -> bool:
    """Whether TensorFlow can differentiate a tensor with respect to one of `sources`.

    Loops and branches count as connected to all their inputs. Paths through `others` do not count,
    and paths through operations of the types `cuts` do.
    """
    return any(True for _ in _reached(tensor, list(map(names_of, sources)), others, cuts))


def connections(
    tensor: Tensor,
    sources: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    *,
    cuts: Collection[str] = (),
) -> list[bool]:
    """The same for each of the sources. Paths through another source do not count."""
    found: set[Hashable] = set()
    names = list(map(names_of, sources))
    for name in _reached(tensor, names, others, cuts):
        found.add(name)
        if all(found & n for n in names):
            break
    return [bool(found & n) for n in names]


def _reached(
    tensor: Tensor,
    names: Sequence[set[Hashable]],
    others: Sequence[Tensor],
    cuts: Collection[str],
) -> Iterator[Hashable]:
    """Yields those names of the sources that a tensor is connected to."""
    wanted = set().union(*names)
    until = {*map(graphs.identity_of, others), *wanted}
    for t in _walk(tensor, differentiably=True, until=until, cuts=cuts):
        if graphs.identity_of(t) in wanted:
            yield graphs.identity_of(t)


def names_of(tensor: Tensor) -> set[Hashable]:
    """The identities of a tensor and of what it is an alias of."""
    return set(map(graphs.identity_of, _same(tensor)))


def is_connected_by(tape: Tape, tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether `tensor` depends on an eager tensor that is connected to one of `sources`.

    Args:
        tape: A persistent tape that recorded the eager tensors, or None.
        tensor: A tensor in a graph.
        sources: Eager tensors.
    """
    if tape is None:
        return False
    return any(
        any(g is not None for g in tape.gradient(t, sources))
        for t in _walk(tensor, differentiably=True)
        if graphs.operation(t) is None
    )


def _same(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor and the tensors that it is an alias of, within this graph and outside."""
    while tensor is not None:
        yield tensor
        op = graphs.operation(tensor) if isinstance(tensor, tf.Tensor) else None
        if op is None:
            return
        outside = graphs.captured_from(tensor)
        tensor = outside if op.type != "Identity" else op.inputs[0]


def has_sources(tensor: Tensor, others: Sequence[Tensor], before: int) -> bool:
    """Whether a tensor may have a derivative other than through `others`.

    Constants that are older than the version `before` of the graph count, since a tape may watch
    them.
    """
    until = set(map(graphs.identity_of, others))
    for t in _walk(tensor, differentiably=True, until=until):
        op = graphs.operation(t)
        if op is None:
            return True
        if graphs.identity_of(t) in until:
            continue
        if op.type == "Const" and not graphs.was_made_since(op, before):
            return True
        # A placeholder, or a read from a variable or a tensor list.
        begins = not any(structures.is_differentiable(i.dtype) for i in op.inputs)
        if begins and (op.type == "Placeholder" or not graphs.has_no_gradient(op)):
            return True
    return False


def begins(
    ys: Sequence[Tensor], point: Sequence[Tensor], before: int
) -> tuple[list[Tensor], dict[Hashable, str]]:
    """The older and outer tensors that tensors in a graph depend on, apart from the point.

    Args:
        ys: Tensors in the graph that is being traced.
        point: Tensors to leave out.
        before: The version of the graph before `ys` were computed.

    Returns:
        The tensors, as seen by a function that closes over them; and for the identity of each
        variable's handle how it is used, "read" or "gathered".
    """
    seen = set(map(graphs.identity_of, point))
    tensors: list[Tensor] = []
    handles: dict[Hashable, str] = {}
    stack = [(y, "read") for y in ys]
    while stack:
        t, use = stack.pop()
        key = graphs.identity_of(t)
        if t.dtype == tf.resource:
            if graphs.holds_floats(t) and handles.get(key) != "gathered":
                handles[key] = use
            continue
        if key in seen or not (structures.is_differentiable(t.dtype) or t.dtype == tf.variant):
            continue
        seen.add(key)
        op = graphs.operation(t)
        outside = None if op is None else graphs.captured_from(t)
        if op is None or outside is not None or not graphs.was_made_since(op, before):
            if structures.is_differentiable(t.dtype):
                tensors.append(t if outside is None else outside)
        elif not graphs.has_no_gradient(op):
            use = "gathered" if op.type.startswith("ResourceGather") else "read"
            stack.extend((i, use) for i in op.inputs)
    return tensors, handles


def is_made_of(tensor: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether a tensor is computed from `sources` alone.

    False if it depends on a floating constant, a captured tensor, a variable or a host call.
    """
    wanted = set(map(graphs.identity_of, sources))
    for t in _walk(tensor, differentiably=False, until=wanted):
        op = graphs.operation(t)
        if op is None or op.type in graphs.HOST_CALLS or t.dtype == tf.resource:
            return False
        begins = not op.inputs and structures.is_differentiable(t.dtype)
        if begins and graphs.identity_of(t) not in wanted:
            return False
    return True


def _walk(
    tensor: Tensor,
    *,
    differentiably: bool,
    until: Collection[Hashable] = (),
    cuts: Collection[str] = (),
) -> Iterator[Tensor]:
    """Yields a tensor and all that it depends on, also in called functions and outer graphs."""
    # Once for each call of the functions around a tensor: their arguments differ.
    seen: set[tuple[Hashable, tuple[Operation, ...]]] = set()
    # A tensor, and the calls of the functions that it is in, the innermost last.
    stack: list[tuple[Tensor, tuple[Operation, ...]]] = [(tensor, ())]
    while stack:
        t, calls = stack.pop()
        key = graphs.identity_of(t)
        if (key, calls) in seen or (differentiably and not structures.is_differentiable(t.dtype)):
            continue
        seen.add((key, calls))
        yield t
        if key in until:
            continue
        op = graphs.operation(t)
        if op is None:  # an eager tensor
            continue
        called = graphs.called_function(op)
        if called is not None:
            stack.append((called.outputs[t.value_index], (*calls, op)))
            continue
        # What a function captured is an argument too where it is called. The capture of a gradient
        # function is a tensor in its forward function, which has other arguments in each call.
        around = graphs.called_function(calls[-1]) if calls else None
        if op.type == "Placeholder" and around is not None and t.graph is around:
            index = [p.name for p in around.inputs].index(t.name)
            stack.append((calls[-1].inputs[index], calls[:-1]))
            continue
        outside = graphs.captured_from(t)
        if outside is not None:
            stack.append((outside, calls))
            continue
        if not (differentiably and graphs.has_no_gradient(op)) or op.type in cuts:
            stack.extend((i, calls) for i in op.inputs)
