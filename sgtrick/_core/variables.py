"""Which trainable variables a function reads."""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import shapes, structures
from sgtrick._core._tensorflow import graphs, tapes
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Gradient, Graph, Structure, Tape, Tensor, Variable


def reads(
    f: Callable[[], Structure], arguments: Sequence[Any], name: str
) -> tuple[Structure, list[Variable]]:
    """Returns the result of `f`, and the trainable variables that it reads.

    Each once, in the order first read; without any order where nothing is differentiated.

    Args:
        f: The call.
        arguments: Variables among these are left out.
        name: The function's name in errors.
    """
    result, variables, _ = _run(f, arguments, name, tf.GradientTape())
    return result, variables


def recorded(
    f: Callable[[], Structure], arguments: Sequence[Any], name: str
) -> tuple[Structure, list[Variable], Tape | None]:
    """The same, with a persistent tape of how it was computed from the arguments, in eager."""
    if not tf.executing_eagerly() or not tapes.somebody_records():
        return (*reads(f, arguments, name), None)
    return _run(f, arguments, name, tf.GradientTape(persistent=True))


def _run(
    f: Callable[[], Structure], arguments: Sequence[Any], name: str, tape: Tape
) -> tuple[Structure, list[Variable], Tape | None]:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    is_recorded = graph is None and tapes.somebody_records()
    noting: contextlib.AbstractContextManager[dict[Hashable, int]] = (
        tapes.noting_reads() if is_recorded else contextlib.nullcontext({})
    )
    with tape, noting as places:
        tape.watch([a for a in arguments if structures.is_dense(a) and not hasattr(a, "assign")])
        result = f()
    handles = [_handle(a) for a in arguments]  # kept alive, so that no id is reused
    known = {id(t) for t in (*arguments, *handles) if t is not None}
    variables = [
        v for v in tape.watched_variables() if id(v) not in known and id(_handle(v)) not in known
    ]
    if len(variables) > 1 and graph is not None:
        variables = _sorted(variables, _places(variables, graph, before), name)
    elif len(variables) > 1 and is_recorded:
        variables = _sorted(variables, places, name)
    return result, variables, tape


def _handle(variable: object) -> Tensor | None:
    """The handle that a variable shares with the variable that it wraps; None for other values.

    Keras layers wrap variables, and cast what they read from them.
    """
    variable = getattr(variable, "_value", variable)
    try:
        return getattr(variable, "handle", None)
    except ValueError:  # a variable of many replicas, read outside of them
        return None


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


def _sorted(variables: list[Variable], places: Mapping[Hashable, int], name: str) -> list[Variable]:
    """Variables by their places, which are unknown if they are equal or missing."""
    found = [places.get(v.ref(), -1) for v in variables]
    unclear = [v.name for v, i in zip(variables, found, strict=True) if i < 0 or found.count(i) > 1]
    if unclear:
        raise LookupError(
            f"{name} reads the variables {unclear}, but the order in which it does, that of their "
            "gradients, cannot be told. Read them one after the other, with "
            "tf.convert_to_tensor(variable), or pass them as arguments."
        )
    return sorted(variables, key=lambda v: places[v.ref()])


def _places(variables: list[Variable], graph: Graph, before: int) -> dict[Hashable, int]:
    """The places of variables among what the latest operations of a graph use."""
    used: dict[Hashable, int] = {}
    for op in graph.get_operations()[before:]:
        for t in op.inputs:
            if t.dtype == tf.resource:
                used.setdefault(graphs.identity_of(t), len(used))
    keys = {v.ref(): graphs.identity_of(graphs.as_used(v.handle)) for v in variables}
    return {v: used[key] for v, key in keys.items() if key in used}
