"""Whether TensorFlow can differentiate a gradient again, and the messages if it cannot."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import ancestry
from sgtrick._core._tensorflow import graphs, tracing
from sgtrick._core.absent import present, spread
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Tape, Tensor


def message(name: str) -> str:
    """The error for a gradient that cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, but TensorFlow sees no connection from "
        "the gradient to the point, or not all of it: the gradient, or a part of it, was computed "
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


_STOP = "StopGradient"
_CUTS = (*graphs.HOST_CALLS, _STOP)


def are_lost(
    gradient: Tensor,
    sources: Sequence[Tensor],
    others: Sequence[Tensor],
    tape: Tape | None = None,
) -> list[bool]:
    """With respect to which of `sources` the derivative of a gradient in a graph is lost.

    With respect to all, if it is not connected to any of them but depends on more than `others`.
    It may also depend on eager tensors that `tape` has recorded.
    """
    paths = ancestry.paths(gradient, sources, others, cuts=_CUTS, tape=tape)
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


class Traced(NamedTuple):
    """A function in a graph of its own."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def traced(f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Traced | None:
    """Traces a function to see what tapes do not: host calls. None for code that runs eagerly."""
    try:
        graph = tracing.trace(f, tracing.specs_of(inputs)).graph
    except Exception:
        return None
    return Traced(graph.inputs[: len(inputs)], graph.outputs)


def traced_rule(rule: Rule, us: Sequence[Tensor | None]) -> Traced | None:
    """The same for a rule: the numbers of the gradients that are not None."""
    pull = rule.again or rule.pull

    def gradients(*at: Tensor) -> list[Tensor]:
        return list(map(values_of, present(pull(*spread(at, us)))))

    return traced(gradients, present(us))


def are_lost_eagerly(
    gradient: Tensor | None,
    sources: Sequence[Tensor],
    us: Sequence[Tensor],
    missing: Sequence[bool],
) -> list[bool]:
    """`are_lost` in eager execution, where tapes have found which derivatives are missing.

    Args:
        gradient: In a graph of its own; None if it cannot be traced.
        sources: Eager tensors.
        us: The upstream gradients in that graph.
        missing: Whether tapes find no derivative, for each of the sources.
    """
    if all(missing):  # a linear function has a gradient that is constant
        is_constant = gradient is not None and ancestry.is_made_of(gradient, us)
        return [not is_constant] * len(sources)
    if gradient is None:
        return [False] * len(sources)
    paths = ancestry.paths(gradient, sources, us, cuts=_CUTS)
    return [_is_lost(p) or (m and bool(p)) for p, m in zip(paths, missing, strict=True)]


def values_of(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which may be `tf.IndexedSlices`."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Gradient, part: Tensor) -> Gradient:
    """The same gradient with other numbers."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(part, gradient.indices, gradient.dense_shape)
    return part
