"""Whether a rule is being run, and for what."""

import contextlib
from collections.abc import Hashable, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments.scopes import scope
from sgtrick._tensorflow import graphs
from sgtrick._types import Graph


class _Run(NamedTuple):
    """A rule that is being run.

    Attributes:
        graph: In which graph.
        for_graph: Whether it is for the gradient of a graph, which other graphs differentiate.
    """

    graph: Graph
    for_graph: bool


_RUN: ContextVar[_Run | None] = ContextVar("_RUN", default=None)


def is_running() -> bool:
    """Whether what is being computed belongs to a rule that is being run, and to no other call.

    A `tf.function` that the rule calls does not: TensorFlow keeps its trace for other calls.
    """
    run = _RUN.get()
    return run is not None and graphs.is_part_of(run.graph)


def is_for_graph() -> bool:
    """Whether a rule is being run for the gradient of a graph, which other graphs differentiate."""
    run = _RUN.get()
    return run is not None and run.for_graph


def running(*, for_graph: bool = False) -> contextlib.AbstractContextManager[None]:
    """A scope in which a rule is run in the graph that is being traced, or eagerly."""
    return scope(_RUN, _Run(tf.compat.v1.get_default_graph(), for_graph))


# The calls whose JVP rules are being transposed, by function, and in which graphs.
_TRANSPOSED: ContextVar[Mapping[Hashable, Mapping[Hashable, Graph]]]
_TRANSPOSED = ContextVar("_TRANSPOSED", default={})  # noqa: B039


def transposed_now(function: Hashable) -> Mapping[Hashable, Graph]:
    """The calls of a function whose JVP rules are being transposed, each with its graph."""
    return _TRANSPOSED.get().get(function, {})


def transposing(
    function: Hashable, call: Hashable, graph: Graph
) -> contextlib.AbstractContextManager[None]:
    """A scope in which the JVP rule of a call of a function is transposed, in a graph."""
    calls = {**transposed_now(function), call: graph}
    return scope(_TRANSPOSED, {**_TRANSPOSED.get(), function: calls})


def for_later() -> contextlib.AbstractContextManager[None]:
    """A scope in which a pullback is traced that is called when no rule is transposed any more."""
    return scope(_TRANSPOSED, {})
