"""What a function closes over, where it is called in the gradient of the graph that made it.

TensorFlow differentiates a graph in another one, which can use the tensors of the first. What the
first has captured from elsewhere is out of reach there: the gradient of a branch cannot capture it,
and that of a gradient captures a tensor of a graph that nobody runs any more. But the first graph
has a tensor that represents it.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import tensorflow as tf

from sgtrick._arguments.scopes import scope
from sgtrick._tensorflow.graphs import operation
from sgtrick._tensorflow.tracing import is_soon_closed
from sgtrick._types import Graph, Tensor

F = TypeVar("F", bound=Callable[..., Any])


class _Level(NamedTuple):
    """A graph in which a function is made that is called in the gradient of it, or one around.

    Attributes:
        graph: A weak reference to the graph: functions may be kept for longer than those around.
        captured: What it has captured by now and forgets when it is complete, and what represents
            that: all in branches and loops; in functions, variables in objects that they take.
    """

    graph: Callable[[], Graph | None]
    captured: Sequence[tuple[Tensor, Tensor]]

    def inner(self) -> dict[int, Tensor]:
        """What represents tensors, by their identities."""
        known = (*self.captured, *_captures(self.graph()))
        return {id(outer): inner for outer, inner in known}


_LEVELS: ContextVar[tuple[_Level, ...]] = ContextVar("_LEVELS", default=())


def from_here(f: F) -> F:
    """`f`, for the gradient of the graph being traced: what it closes over is found there."""
    levels, is_forgotten = _LEVELS.get(), is_soon_closed()
    for graph in _with_graphs_around(tf.compat.v1.get_default_graph()):
        known = [pair for pair in _captures(graph) if is_forgotten or _is_argument(pair[0])]
        levels = *levels, _Level(weakref.ref(graph), known)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        inner, is_closed = [level.inner() for level in levels], is_soon_closed()

        def found(t: Tensor) -> Tensor:
            if t.dtype == tf.resource and not (is_closed or _is_argument(t)):
                return t  # a variable can be used everywhere, and is stored under its own handle
            names = {id(t)}  # of what represents it in any of these graphs
            for of_level in inner:
                last = [of_level[k] for k in names if k in of_level]
                names |= set(map(id, last))
            return last[0] if last else t

        with _capturing(found), scope(_LEVELS, levels):
            return f(*args)

    return cast(F, call)


@contextlib.contextmanager
def _capturing(found: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A scope in which the graph being traced captures what is found in the place of a tensor."""
    graph = tf.compat.v1.get_default_graph()
    capture = graph.capture
    graph.capture = lambda t, *name, **named: capture(found(t), *name, **named)
    try:
        yield
    finally:
        del graph.capture  # the method of the class is there again
        if not inspect.ismethod(capture):
            graph.capture = capture


def _with_graphs_around(graph: Graph) -> list[Graph]:
    """A graph, and before it those in which it is being traced, from outside in."""
    around = getattr(graph, "outer_graph", None)
    return [graph] if around is None else [*_with_graphs_around(around), graph]


def _is_argument(t: Tensor) -> bool:
    """Whether this is the handle of a variable in an object that a function takes.

    It is a placeholder, which the graph of the function captures and which has no value.
    """
    op = operation(t) if t.dtype == tf.resource else None
    return op is not None and op.type == "Placeholder"


def _captures(graph: Graph | None) -> Iterable[tuple[Tensor, Tensor]]:
    """What a graph has captured, and what represents that; a graph of TensorFlow 1 does not."""
    found: Iterable[tuple[Tensor, Tensor]] = getattr(graph, "captures", ())
    return found
