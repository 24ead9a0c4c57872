"""Whether a rule is being run, and for what."""

import contextlib
from contextvars import ContextVar

from sgtrick._arguments.scopes import scope

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
