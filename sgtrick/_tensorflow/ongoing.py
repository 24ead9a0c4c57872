"""What happens at present: a rule runs, a graph only shows what is connected, errors may raise."""

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments.scopes import scope
from sgtrick._tensorflow.graphs import is_part_of
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


def running(*, for_graph: bool = False) -> contextlib.AbstractContextManager[None]:
    """A scope in which a rule is run in the graph that is being traced, or eagerly."""
    return scope(_RUN, _Run(tf.compat.v1.get_default_graph(), for_graph))


def is_running() -> bool:
    """Whether what is being computed belongs to a rule that is being run, and to no other call.

    A `tf.function` that the rule calls does not: TensorFlow keeps its trace for other calls.
    """
    run = _RUN.get()
    return run is not None and is_part_of(run.graph)


def is_for_graph() -> bool:
    """Whether a rule is being run for the gradient of a graph, which other graphs differentiate."""
    run = _RUN.get()
    return run is not None and run.for_graph


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


def transposing_nothing() -> contextlib.AbstractContextManager[None]:
    """A scope for a pullback that is called again when no rule is transposed any more."""
    return scope(_TRANSPOSED, {})


_FOR_MEMBER: ContextVar[bool] = ContextVar("_FOR_MEMBER", default=False)


def for_member(is_so: bool = True) -> contextlib.AbstractContextManager[None]:
    """A scope in which a pullback of one member is traced that will be mapped."""
    return scope(_FOR_MEMBER, is_so)


def is_for_member() -> bool:
    """Whether what is being traced will be mapped."""
    return _FOR_MEMBER.get() and not tf.executing_eagerly()


_PROBE: ContextVar[Graph | None] = ContextVar("_PROBE", default=None)


def probing() -> contextlib.AbstractContextManager[None]:
    """A scope for the graph being traced, a probe: it shows what is connected and never runs."""
    return scope(_PROBE, tf.compat.v1.get_default_graph())


def is_probe() -> bool:
    """Whether what is being traced belongs to a probe alone.

    Branches and loops do. A `tf.function` that is called there does not, nor does its gradient:
    TensorFlow keeps the traces of both for other calls.
    """
    probe = _PROBE.get()
    return probe is not None and is_part_of(probe)


# Pullbacks of rules, and of functions of the caller's that are no rules.
_MAY_TRACE: ContextVar[tuple[bool, bool]] = ContextVar("_MAY_TRACE", default=(True, True))


def not_tracing_pullbacks(of_callers: bool = True) -> contextlib.AbstractContextManager[None]:
    """A scope in which no pullback is traced to find out what it closes over.

    While one is, others are not: a rule may call its own function, and that would never end. But
    while that of a rule is, functions of the caller's that it differentiates are, which it would
    not run otherwise (not `of_callers`).
    """
    return scope(_MAY_TRACE, (False, _MAY_TRACE.get()[1] and not of_callers))


def may_trace_pullbacks(*, of_caller: bool = False) -> bool:
    """Whether pullbacks may be traced to find out what they close over."""
    return _MAY_TRACE.get()[of_caller]


_MAY_RAISE: ContextVar[bool] = ContextVar("_MAY_RAISE", default=True)
_MESSAGES: ContextVar[list[str] | None] = ContextVar("_MESSAGES", default=None)


def may_raise() -> bool:
    """Whether an unknown derivative may be an error, and not only NaN."""
    return _MAY_RAISE.get()


def not_raising() -> contextlib.AbstractContextManager[None]:
    """A scope without errors, only NaN: for the gradient of a `tf.function` as a whole.

    There, TensorFlow computes the gradients with respect to all arguments, and then keeps those
    that were requested.
    """
    return scope(_MAY_RAISE, False)


@contextlib.contextmanager
def collecting_messages() -> Iterator[list[str]]:
    """A scope without errors, only NaN, that yields the messages of the errors.

    Only in eager execution. There may be messages about derivatives that were not requested.
    """
    messages: list[str] = []
    with scope(_MESSAGES, messages), not_raising():
        yield messages


def collect(message: str) -> None:
    """Adds the message of an error that is not raised."""
    messages = _MESSAGES.get()
    if messages is not None and message not in messages:
        messages.append(message)
