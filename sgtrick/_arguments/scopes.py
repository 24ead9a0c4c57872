"""Scopes in which context variables have other values."""

import contextlib
from collections.abc import Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_VARIABLES: set[ContextVar[Any]] = set()


@contextlib.contextmanager
def scope(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A scope in which a variable has this value; other threads do not see it."""
    _VARIABLES.add(variable)
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def outside() -> Context:
    """The context variables as they are outside of all scopes."""
    context = Context()
    for variable, value in copy_context().items():
        if variable not in _VARIABLES:
            context.run(variable.set, value)
    return context
