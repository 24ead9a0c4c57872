"""The derivative of outputs with respect to inputs, as a form defines it, and whether it is run."""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments.scopes import scope
from sgtrick._tensorflow import graphs
from sgtrick._types import Gradient, Graph, Pullback, Pushforward, Tangent, Tensor


class Rule(NamedTuple):
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: The function's name in errors.
        pull: From one upstream gradient for each output, None for those without derivatives, to one
            gradient or None for each input.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error in forward mode; or None to transpose `pull`, with a test.
        transposes: Whether `push` transposes `pull`.
        batched: Under `tf.vectorized_map`, from the inputs for all members, and whether each has a
            batch dimension, to the outputs with their derivatives; None to map `pull`.
        is_guarded: Whether `pull` comes with errors for derivatives that TensorFlow would lose.
        is_of_caller: Whether `pull` calls a function of the caller's that is no rule, and may close
            over anything, also over what no operation of the forward pass has used.
    """

    name: str
    pull: Pullback
    push: Pushforward | str | None = None
    transposes: bool = False
    batched: Callable[[Sequence[tuple[Tensor, bool]]], Sequence[Tensor]] | None = None
    is_guarded: bool = False
    is_of_caller: bool = False


def in_addition(rule: Rule, count: int = 1) -> Rule:
    """The rule of `count` values that keep their own derivatives in addition to those of `rule`."""

    def pull(*upstream: Tensor) -> list[Gradient]:
        return [*upstream, *rule.pull(*upstream)]

    def push(*tangents: Tangent) -> list[Tangent]:
        assert callable(rule.push)
        return plus(tangents[:count], rule.push(*tangents[count:]))

    return rule._replace(pull=pull, push=push)


def plus(a: Sequence[Tangent], b: Sequence[Tangent]) -> list[Tangent]:
    """Sums of tangents, where None is zero."""
    return [q if p is None else p if q is None else p + q for p, q in zip(a, b, strict=True)]


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
