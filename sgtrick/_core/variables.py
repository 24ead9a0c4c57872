"""Which trainable variables a function reads."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import shapes, structures
from sgtrick._core._tensorflow import tapes
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Gradient, Graph, Structure, Tape, Tensor, Variable


class Reader:
    """Runs a function and finds the trainable variables that it reads."""

    def __init__(self) -> None:
        self._orders: dict[frozenset[Any], list[Variable]] = {}

    def __call__(
        self, f: Callable[[], Structure], arguments: Sequence[Any]
    ) -> tuple[Structure, list[Variable]]:
        """Returns the result of `f`, and its variables, each once, in the order first read.

        Eager execution does not keep the order. So if `f` reads several variables, it is traced
        once; if it cannot be traced, the order is that in which the variables were created.

        Args:
            f: The call.
            arguments: Variables among these are left out.
        """
        result, variables, _ = self._run(f, arguments, tf.GradientTape())
        return result, variables

    def recorded(
        self, f: Callable[[], Structure], arguments: Sequence[Any]
    ) -> tuple[Structure, list[Variable], Tape | None]:
        """The same, with a persistent tape of how it was computed from the arguments, in eager."""
        if not tf.executing_eagerly() or not tapes.somebody_records():
            return (*self(f, arguments), None)
        return self._run(f, arguments, tf.GradientTape(persistent=True))

    def _run(
        self, f: Callable[[], Structure], arguments: Sequence[Any], tape: Tape
    ) -> tuple[Structure, list[Variable], Tape | None]:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = 0 if graph is None else len(graph.get_operations())
        with tape:
            tape.watch(
                [a for a in arguments if structures.is_dense(a) and not hasattr(a, "assign")]
            )
            result = f()
        handles = [_handle(a) for a in arguments]  # kept alive, so that no id is reused
        known = {id(t) for t in (*arguments, *handles) if t is not None}
        variables = [
            v
            for v in tape.watched_variables()
            if id(v) not in known and id(_handle(v)) not in known
        ]
        if len(variables) < 2:
            return result, variables, tape
        if graph is not None:
            return result, _in_order(variables, _used(graph, before), graph), tape
        key = frozenset(v.ref() for v in variables)
        if key not in self._orders:
            if len(self._orders) == _KEPT:
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = _in_order(variables, _traced(f))
        return result, self._orders[key], tape


def _handle(variable: object) -> Tensor | None:
    """The handle that a variable shares with the variable that it wraps; None for other values.

    Keras layers wrap variables, and cast what they read from them.
    """
    variable = getattr(variable, "_value", variable)
    try:
        return getattr(variable, "handle", None)
    except ValueError:  # a variable of many replicas, read outside of them
        return None


# A method is called on many objects, each with its own variables, which must not stay alive here.
_KEPT = 16


def pull_variables(
    jacobians: Structure,
    variables: list[Variable],
    reads: list[Tensor],
    y: Tensor,
    upstream: Tensor,
    name: str,
) -> list[Gradient]:
    """Returns the gradient of each variable, from the Jacobians that a gradient function returned.

    Args:
        jacobians: Of `y` with respect to each of them.
        variables: The variables that the function read.
        reads: Their values.
        y: The value of the function.
        upstream: The gradient with respect to `y`.
        name: The function's name in errors.
    """
    names = [v.name for v in variables]
    what = f"grad of {name} must return a gradient for each of the variables"
    if not isinstance(jacobians, (list, tuple)) or len(jacobians) != len(names):
        raise ValueError(
            f"{what} {names}, in a list in this order, got {structures.kind_of(jacobians)}."
        )
    missing = [v for v, g in zip(names, jacobians, strict=True) if g is None]
    if missing:
        raise ValueError(f"{what}, but returned None for {missing}. If it is zero, return zeros.")
    return [
        _pull_one(g, x, y, upstream, v) for g, x, v in zip(jacobians, reads, names, strict=True)
    ]


def _pull_one(gx: Tensor, x: Tensor, y: Tensor, upstream: Tensor, variable: str) -> Gradient:
    what = f"the gradient with respect to the variable {variable}"
    if not isinstance(gx, tf.IndexedSlices):
        names = shapes.Names("the value", what, f"the variable {variable}")
        return TENSORFLOW.transpose(TENSORFLOW.leaf("", x, gx, y, 0, names), upstream)
    if y.shape.rank != 0:
        raise ValueError(
            f"{what} is tf.IndexedSlices, which is only allowed for a scalar value, but the value "
            f"has shape {y.shape}. Return a tensor."
        )
    values = TENSORFLOW.to_dtype(gx.values, x.dtype.name, what, f"the variable is {x.dtype.name}")
    indices = tf.convert_to_tensor(gx.indices)
    values = structures.shaped_like(values, tf.gather(x, indices), what, "expected")
    pulled = TENSORFLOW.transpose(structures.Leaf("", values, values, 0), upstream)
    return tf.IndexedSlices(pulled, indices, tf.shape(x))


def _in_order(
    variables: list[Variable], handles: list[Tensor], graph: Graph | None = None
) -> list[Variable]:
    """Sorted by their first place in `handles`; variables that are not there come last."""
    places: dict[int, int] = {id(handle): i for i, handle in reversed(list(enumerate(handles)))}

    def place(v: Variable) -> int:
        handle = v.handle
        if graph is not None and hasattr(graph, "capture"):
            handle = graph.capture(handle)
        return places.get(id(handle), len(handles))

    return sorted(variables, key=place)


def _used(graph: Graph, before: int) -> list[Tensor]:
    """The handles of variables that operations of a graph use, in the order of operations."""
    taken = [t for op in graph.get_operations()[before:] for t in op.inputs]
    return [t for t in taken if t.dtype == tf.resource]


def _traced(f: Callable[[], Structure]) -> list[Tensor]:
    """The handles of variables that a function captures, in that order."""
    try:
        function = tf.function(lambda: [f(), None][1], autograph=False)
        graph = function.get_concrete_function().graph
    except Exception:  # code that only runs eagerly
        return []
    return [outside for outside, _ in graph.captures]
