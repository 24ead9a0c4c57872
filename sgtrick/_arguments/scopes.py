"""Scopes in which a context variable has another value."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def scope(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A scope in which a variable has this value; other threads do not see it."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
