"""Whether a rule is being run, and for what."""

import contextlib
from collections.abc import Hashable, Mapping
from contextvars import ContextVar

from sgtrick._arguments.scopes import scope
from sgtrick._types import Graph

_FOR: ContextVar[str | None] = ContextVar("_FOR", default=None)


def is_running() -> bool:
    """Whether a rule is being run."""
    return _FOR.get() is not None


def is_for_graph() -> bool:
    """Whether it is being run for the gradient of a graph, which other graphs differentiate."""
    return _FOR.get() == "graph"


def running(what: str) -> contextlib.AbstractContextManager[None]:
    """A scope in which a rule is run for "tapes", or for the gradient of a "graph"."""
    return scope(_FOR, what)


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
