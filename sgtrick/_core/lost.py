"""Whether TensorFlow can differentiate a gradient again, and the messages if it cannot."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import ancestry, walk
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core.absent import present, spread
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Graph, Tape, Tensor, Variable


def message(name: str) -> str:
    """The error for a gradient that cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, but TensorFlow sees no connection from "
        "the gradient to the point, or to whatever else it was differentiated with respect to, or "
        "not all of the connection: the gradient, or a part of it, was computed "
        "by a host call or by NumPy; or it was stopped, or does not depend on the point. If it "
        "really is a constant, add 0 * x to it. Otherwise compute it from TensorFlow ops, or give "
        "the host call its own gradient with one of sgtrick's functions."
    )


def cut_message(name: str) -> str:
    """The error for a gradient that cannot be differentiated by the upstream gradients."""
    return (
        f"The gradient of {name} was differentiated again, with respect to the upstream gradient "
        "(that of whatever was computed from the result), but TensorFlow does not see how the one "
        "depends on the other: the gradient function passes it to a host call or to NumPy, or "
        "stops it. Compute with it in TensorFlow ops, or give the host call its own gradient with "
        "one of sgtrick's functions."
    )


def unknown_list(name: str) -> str:
    """The error for a `tf.TensorArray` of which it is not known what it was made of."""
    return (
        f"{name} closes over a tf.TensorArray that a loop or a function got as an argument, so "
        "that nothing tells what it was made of. Read the array before, and pass what was read to "
        f"{name} as an argument."
    )


_STOP = "StopGradient"
_CUTS = (*graphs.HOST_CALLS, _STOP)


def are_lost(
    gradient: Tensor,
    sources: Sequence[Tensor],
    at: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    tape: Tape | None = None,
) -> list[list[bool]]:
    """With respect to which of `sources` the derivatives of the terms of a gradient are lost.

    With respect to all, if it is not connected to any of them but depends on more than `at` and
    `others`. It may also depend on eager tensors that `tape` has recorded.

    Args:
        gradient: A gradient in a graph.
        sources: Tensors.
        at: What the gradient is linear in, with a term for each: upstream gradients or tangents.
        others: Tensors with derivatives of their own.
        tape: A persistent tape.

    Returns:
        For each of `at`, and for each of the sources, whether the derivative is lost.
    """
    by_term = _paths_by_term(gradient, sources, at, others, tape)
    if not any(_is_direct(p) for paths in by_term for p in paths):
        is_known = ancestry.is_made_of(gradient, [*at, *others])
        return [[not is_known] * len(sources) for _ in at]
    return [list(map(_is_lost, paths)) for paths in by_term]


def _paths_by_term(
    gradient: Tensor,
    sources: Sequence[Tensor],
    at: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    tape: Tape | None = None,
) -> list[list[set[frozenset[str]]]]:
    """`ancestry.paths` from sources to a gradient, for each of its terms `c_i u_i` alone.

    What is stopped in one term was not meant to be because another term is not stopped: that may be
    another output, which nobody uses, or the tangent of another argument, which may be zero.
    """
    ends = [*at, *others]
    paths = ancestry.paths(gradient, sources, ends, cuts=_CUTS, tape=tape)
    if not any(crossed for p in paths for crossed in p):
        return [paths] * len(at)
    known = set().union(*map(ancestry.names_of, sources), *map(ancestry.names_of, others))
    leading = walk.leading_to(gradient, list(map(ancestry.names_of, at)), known, _CUTS)
    in_some = set().union(*leading)
    return [
        ancestry.paths(gradient, sources, ends, cuts=_CUTS, tape=tape, beside=in_some - to_one)
        for to_one in leading
    ]


def are_cut(gradients: Sequence[Tensor], us: Sequence[Tensor | None]) -> list[bool]:
    """With respect to which of `us` the derivative of some gradient in a graph is lost."""
    by_gradient = [spread(ancestry.paths(g, present(us), cuts=_CUTS), us) for g in gradients]
    return [any(_is_lost(paths[i] or ()) for paths in by_gradient) for i in range(len(us))]


def through_host(
    gradient: Tensor, known: Sequence[Tensor], graph: Graph | None = None
) -> list[Tensor]:
    """The tensors besides `known` that host calls make a gradient in a graph of, as far as known.

    They are in the graph, or around it, or without one eager tensors.
    """
    return ancestry.through(gradient, known, graphs.HOST_CALLS, graph)


def on_host(
    gradients: Sequence[Tensor],
    sources: Sequence[Tensor | Variable],
    others: Sequence[Tensor] = (),
) -> list[bool]:
    """By which of `sources` host calls compute gradients in a graph, in part or wholly.

    Other than through `others`, such as the point.
    """
    of_sources = [ancestry.names_of(s if isinstance(s, tf.Tensor) else s.handle) for s in sources]
    until = set().union(*of_sources, *map(ancestry.names_of, others))
    found = set[Hashable]()
    for gradient in gradients:
        for t, _, crossed in walk.back(
            gradient, differentiably=True, until=until, cuts=graphs.HOST_CALLS
        ):
            if crossed:
                handle = graphs.handle_read_by(t)
                found.add(graphs.identity_of(t if handle is None else handle))
    return [bool(names & found) for names in of_sources]


def _is_direct(paths: Collection[frozenset[str]]) -> bool:
    """Whether there is a path through nothing that cuts derivatives."""
    return frozenset() in paths


def _is_lost(paths: Collection[frozenset[str]]) -> bool:
    """Whether a derivative lacks a part, by the paths that lead to the tensor.

    What is stopped beside something that is not stopped was meant to be. A host call was not.
    """
    on_host = any(path and _STOP not in path for path in paths)
    return on_host or (bool(paths) and not _is_direct(paths))


class Traced(NamedTuple):
    """A function in a graph of its own."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def traced(f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Traced | None:
    """Traces a function to see what tapes do not: host calls. None for code that runs eagerly.

    Apart, since an accumulator that is active cannot follow a loop, and may silence the tapes of a
    rule.
    """
    try:
        graph = tapes.apart(lambda: tracing.trace(f, tracing.specs_of(inputs))).graph
    except Exception:
        return None
    return Traced(graph.inputs[: len(inputs)], graph.outputs)


def traced_rule(
    rule: Rule, us: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """The same for a rule: the upstream gradients, and the numbers of the gradients, if any."""
    pulled: Sequence[Gradient] = []

    def gradients(*at: Tensor) -> list[Tensor]:
        nonlocal pulled
        pulled = (rule.again or rule.pull)(*spread(at, us))
        return list(map(values_of, present(pulled)))

    found = traced(gradients, present(us))
    return ([], []) if found is None else (found.inputs, spread(found.outputs, pulled))


def are_lost_eagerly(
    gradient: Tensor, sources: Sequence[Tensor], us: Sequence[Tensor], missing: Sequence[bool]
) -> list[list[bool]]:
    """`are_lost` in eager execution, where tapes have found which derivatives are missing.

    Args:
        gradient: The gradient in a graph of its own.
        sources: Eager tensors.
        us: The upstream gradients in that graph.
        missing: Whether tapes find no derivative, for each of the sources.
    """
    if all(missing):  # a linear function has a gradient that is constant
        return [[not ancestry.is_made_of(gradient, us)] * len(sources) for _ in us]
    return [
        [
            _is_lost(p) or (is_missing and bool(p))
            for p, is_missing in zip(paths, missing, strict=True)
        ]
        for paths in _paths_by_term(gradient, sources, us)
    ]


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which may be `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """The same gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part
