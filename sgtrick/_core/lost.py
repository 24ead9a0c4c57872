"""Whether TensorFlow can differentiate a gradient again, and the messages if it cannot."""

from collections.abc import Collection, Sequence

import tensorflow as tf

from sgtrick._core import ancestry
from sgtrick._core._tensorflow import graphs, tracing
from sgtrick._core.absent import present, spread
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Graph, Tensor


def message(name: str) -> str:
    """The error for a gradient that cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, but TensorFlow sees no connection from "
        "the gradient to the point: it was computed by a host call or by NumPy, was stopped, or "
        "does not depend on the point. If it really is a constant, add 0 * x to it. Otherwise "
        "compute it from TensorFlow ops, or give the host call its own gradient with one of "
        "sgtrick's functions."
    )


def cut_message(name: str) -> str:
    """The error for a gradient that cannot be differentiated by the upstream gradients."""
    return (
        f"The gradient of {name} was differentiated again, with respect to the upstream gradient "
        "(that of whatever was computed from the result), but TensorFlow sees no connection to it: "
        "the gradient function passes it to a host call or to NumPy, or stops it. Compute with it "
        "in TensorFlow ops, or give the host call its own gradient with one of sgtrick's functions."
    )


_STOP = "StopGradient"
_CUTS = (*graphs.HOST_CALLS, _STOP)


def are_lost(gradient: Tensor, sources: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """With respect to which of `sources` the derivative of a gradient in a graph is lost.

    With respect to all, if it is not connected to any of them but depends on more than `others`.
    """
    paths = ancestry.paths(gradient, sources, others, cuts=_CUTS)
    if not any(map(_is_direct, paths)):
        return [not ancestry.is_made_of(gradient, others)] * len(sources)
    return list(map(_is_lost, paths))


def is_cut(gradient: Tensor, us: Sequence[Tensor]) -> bool:
    """Whether the derivative of a gradient in a graph with respect to `us` is lost."""
    return _is_lost(set().union(*ancestry.paths(gradient, us, cuts=_CUTS)))


def _is_direct(paths: Collection[frozenset[str]]) -> bool:
    """Whether there is a path through nothing that cuts derivatives."""
    return frozenset() in paths


def _is_lost(paths: Collection[frozenset[str]]) -> bool:
    """Whether a derivative lacks a part, by the paths that lead to the tensor.

    What is stopped beside something that is not stopped was meant to be. A host call was not.
    """
    on_host = any(path and _STOP not in path for path in paths)
    return on_host or (bool(paths) and not _is_direct(paths))


def is_constant(rule: Rule, us: Sequence[Tensor | None], place: int) -> bool:
    """Whether a gradient depends on the upstream gradient alone, like that of a linear function."""
    graph, at = _traced(rule, us, place)
    return graph is not None and ancestry.is_made_of(graph.outputs[0], at)


def are_reached(rule: Rule, us: Sequence[Tensor | None], place: int) -> list[bool]:
    """Which sources a gradient depends on, in eager execution, even if through a cut."""
    graph, at = _traced(rule, us, place)
    if graph is None:
        return [False] * len(rule.sources)
    return list(map(bool, ancestry.paths(graph.outputs[0], rule.sources, at, cuts=_CUTS)))


def is_cut_at(rule: Rule, us: Sequence[Tensor | None], place: int) -> bool:
    """`is_cut` for a gradient in eager execution."""
    graph, at = _traced(rule, us, place)
    return graph is None or is_cut(graph.outputs[0], at)


def _traced(
    rule: Rule, us: Sequence[Tensor | None], place: int
) -> tuple[Graph | None, Sequence[Tensor]]:
    """The graph of a gradient and its upstream gradients; None if it cannot be traced."""
    at = present(us)

    def gradient(*upstream: Tensor) -> Tensor:
        return values_of(rule.pull(*spread(upstream, us))[place])

    try:
        graph = tracing.trace(gradient, tracing.specs_of(at)).graph
    except Exception:  # then it may depend on anything
        return None, ()
    return graph, graph.inputs[: len(at)]


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which may be `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """The same gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part
