"""What a call uses besides its arguments: the tensors and variables that a function closes over."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.python.eager import forwardprop_util
from tensorflow.python.framework import ops

from sgtrick._core._tensorflow import graphs, tapes
from sgtrick._core._tensorflow.graphs import identity_of
from sgtrick._core.structures import is_differentiable, refuse_reference
from sgtrick._core.types import Tensor, Variable

T = TypeVar("T")


class Uses(NamedTuple):
    """What operations used and did not make.

    Attributes:
        tensors: Tensors that have derivatives.
        variables: Trainable variables, in the order in which they were created.
        tables: Those of the variables that were gathered from.
        has_lists: Whether there is a list of tensors, as of a `tf.TensorArray`.
        has_fixed: Whether there is a variable that is not trainable.
    """

    tensors: Sequence[Tensor] = ()
    variables: Sequence[Variable] = ()
    tables: Sequence[Variable] = ()
    has_lists: bool = False
    has_fixed: bool = False


def call(f: Callable[[], T], passed: Sequence[Tensor]) -> tuple[T, Uses]:
    """Calls a function, and returns what it uses besides the tensors that it was `passed`."""
    if not tf.executing_eagerly():
        return _in_graph(f, passed)
    if not tapes.somebody_records():
        with tapes.watching_variables(passed) as variables_read:
            result = f()
        return result, Uses(variables=_with_derivatives(variables_read()))
    age = ops.uid()
    with tapes.noting() as used, tapes.watching_variables(passed) as variables_read:
        result = f()
    known = _identities(passed)

    def is_closed_over(t: Tensor) -> bool:
        return (
            identity_of(t) not in known
            and is_differentiable(t.dtype)
            and ops.tensor_id(t) < age
            and tapes.is_recorded([t])
        )

    inputs = [t for type_, ts in used if not graphs.type_has_no_gradient(type_) for t in ts]
    gathered = {id(t) for type_, ts in used if _gathers(type_) for t in ts}
    inputs += _tensors_of(result)
    variables = _with_derivatives(variables_read())
    return result, Uses(
        _once(t for t in inputs if isinstance(t, ops.EagerTensor) and is_closed_over(t)),
        variables,
        [v for v in variables if id(v.handle) in gathered],
    )


def _in_graph(f: Callable[[], T], passed: Sequence[Tensor]) -> tuple[T, Uses]:
    graph = tf.compat.v1.get_default_graph()
    before = graph.num_operations()
    with tapes.watching_variables(passed) as variables_read:
        result = f()
    operations = graph.get_operations()[before:]
    made = {identity_of(t) for op in operations for t in op.outputs}
    # The placeholder of a captured tensor is new, but the tensor is not.
    made -= {identity_of(inner) for _, inner in getattr(graph, "captures", ())}
    # Accumulators compute tangents in between.
    tangents = forwardprop_util.pack_tangents(list(passed)).tangents
    known = made | _identities([*passed, *tangents])
    inputs = [t for op in operations if not graphs.has_no_gradient(op) for t in op.inputs]
    inputs += [graphs.as_used(t) for t in _tensors_of(result)]
    for t in inputs:
        refuse_reference(t, f"{t.op.name}, which the function reads,")
    older = _once(t for t in inputs if identity_of(t) not in known)
    gathered = {identity_of(op.inputs[0]) for op in operations if _gathers(op.type)}
    variables = {
        identity_of(graphs.as_used(v.handle)): v for v in _with_derivatives(variables_read())
    }
    return result, Uses(
        [t for t in older if is_differentiable(t.dtype)],
        list(variables.values()),
        [v for key, v in variables.items() if key in gathered],
        any(t.dtype == tf.variant and graphs.carries_derivatives(t) for t in older),
        any(
            t.dtype == tf.resource and graphs.holds_floats(t) and identity_of(t) not in variables
            for t in older
        ),
    )


def _gathers(type_: str) -> bool:
    return type_.startswith("ResourceGather")


def _with_derivatives(variables: Iterable[Variable]) -> list[Variable]:
    return [v for v in variables if is_differentiable(v.dtype)]


def _tensors_of(result: object) -> list[Tensor]:
    leaves = tf.nest.flatten(result, expand_composites=True)
    return [t for t in leaves if isinstance(t, tf.Tensor)]


def _identities(tensors: Iterable[Tensor]) -> set[Hashable]:
    return set(map(identity_of, tensors))


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({identity_of(t): t for t in tensors}.values())
