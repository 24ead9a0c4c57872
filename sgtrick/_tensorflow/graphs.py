"""Properties of graphs, their operations and their tensors."""

from collections.abc import Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_v2_func_graphs,
    handle_data_util,
)

from sgtrick._arguments.structures import ORIGIN, is_differentiable
from sgtrick._types import DType, Graph, Operation, Tensor, Variable

# Operations that call Python functions.
HOST_CALLS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# Operations that call functions of TensorFlow.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def operation(tensor: Tensor) -> Operation | None:
    """The operation that computes a tensor, None for an eager tensor."""
    return None if isinstance(tensor, ops.EagerTensor) else tensor.op


def here(t: Tensor) -> Tensor:
    """A tensor as a tensor of the graph that is being traced, if any.

    A pullback may be called while another graph is traced than in the forward pass. Functions that
    it calls would get tensors of the forward graph as arguments, which are out of reach for the
    graph in which those functions are differentiated again. Variables can be used in every graph.
    """
    if tf.executing_eagerly() or t.dtype == tf.resource:
        return t
    graph = tf.compat.v1.get_default_graph()
    return t if operation(t) is not None and t.graph is graph else tf.identity(t)


def as_used(t: Tensor) -> Tensor | Variable:
    """The tensor that represents `t` in the graph being traced, if a function closes over it.

    A variable represents itself.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not isinstance(t, tf.Tensor) or not hasattr(graph, "capture"):
        return t
    return t if operation(t) is not None and t.graph is graph else graph.capture(t)


def carries_derivatives(t: Tensor) -> bool:
    """Whether derivatives may flow through a tensor: numbers, or one of a loop's lists of them."""
    if is_differentiable(t.dtype) or t.dtype != tf.variant:
        return is_differentiable(t.dtype)
    held = _dtype_held(t)  # may be unknown
    return held is None or held == tf.variant or is_differentiable(held)


def may_carry(t: Tensor) -> bool:
    """Whether derivatives may flow through a tensor, or to a variable of which it is the handle."""
    return carries_derivatives(t) or t.dtype == tf.resource or t.dtype != t.dtype.base_dtype


# The registered gradients of these are None.
_GIVE_NONE = ("Floor", "Ceil", "Round", "Rint", "FloorDiv", "TruncateDiv")


def has_no_gradient(op: Operation) -> bool:
    """Whether TensorFlow treats an operation as one without a derivative."""
    if op.type in ("StopGradient", "PreventGradient"):
        return True
    if op.type in _GIVE_NONE and not is_overridden(op):
        return True
    try:
        return ops.get_gradient_function(op) is None
    except LookupError:
        return op.type not in CALLS


def is_overridden(op: Operation) -> bool:
    """Whether TensorFlow uses another gradient for an operation than that of its type."""
    return bool(attribute(op, "_gradient_op_type"))


def called(op: Operation) -> Graph:
    """The graph of the function that an operation calls."""
    name, graph = attribute(op, "f").name, op.graph
    while graph._get_function(name) is None:  # as in branches and loops
        graph = graph.outer_graph
    return graph._get_function(name).graph


def attribute(op: Operation, name: str) -> Any:
    """An attribute of an operation, None if it has none of this name."""
    try:
        return op.get_attr(name)
    except ValueError:
        return None


def type_has_no_gradient(type_: str) -> bool:
    """Whether eager operations of a type have no derivative.

    The type of a call is the name of the function.
    """
    if type_ in _GIVE_NONE:
        return True
    try:
        return ops.gradient_registry.lookup(type_) is None
    except LookupError:
        return False


def captured_from(tensor: Tensor) -> Tensor | None:
    """The outer tensor that a tensor of a graph represents if it was captured, else None.

    A small eager tensor becomes a constant in the graph, but counts as captured too.
    """
    graph = tensor.graph
    if tensor.op.type in ("Placeholder", "Const"):
        captures = getattr(graph, "captures", ())
        return next((outer for outer, inner in captures if inner.name == tensor.name), None)
    # The gradient of a loop pops the tensors that the loop pushed.
    for number, inner in getattr(graph, "_indirect_captures", {}).items():
        if inner.name == tensor.name:
            operations = graph._forward_graph.get_operations()
            outer = [t for op in operations for t in op.outputs if ops.tensor_id(t) == number]
            return outer[0] if outer else None
    return None


def is_out_of_reach() -> bool:
    """Whether the gradient of a branch, now being traced, uses what TensorFlow cannot pass to it.

    It knows tensors of the branch, and of the graph around the branch. If the branch is itself the
    gradient of one, what that captured is in neither.
    """
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph):
        return False
    for t, _ in graph.captures:
        before = None if operation(t) is None else captured_from(t)
        if before is not None and operation(before) is not None:
            around = getattr(t.graph, "outer_graph", None)
            if around is not None and before.graph is not around:
                return True
    return False


def outside(t: Tensor) -> Tensor:
    """A tensor of a graph as it was before any graph captured it."""
    found = None if operation(t) is None else captured_from(t)
    return t if found is None else outside(found)


def read(handle: Tensor) -> Tensor:
    """The value of the variable with this handle, as tapes know it."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=_dtype_held(handle))
    if tf.executing_eagerly():
        setattr(value, ORIGIN, handle)
    return value


def identity_of(tensor: Tensor) -> Hashable:
    """A key that is equal for Python objects of the same tensor: TensorFlow creates several."""
    if isinstance(tensor, ops.EagerTensor) or not isinstance(tensor, tf.Tensor):
        return id(tensor)
    return id(tensor.graph), tensor.name


def is_variable(handle: Tensor) -> bool:
    """Whether a tensor is the handle of a variable."""
    return handle.dtype == tf.resource and _dtype_held(handle) is not None


def holds_floats(handle: Tensor) -> bool:
    """Whether a tensor is the handle of a variable that has derivatives."""
    dtype = _dtype_held(handle) if handle.dtype == tf.resource else None
    return dtype is not None and is_differentiable(dtype)


def _dtype_held(handle: Tensor) -> DType | None:
    """The dtype of a variable, or of what is in a list of tensors, if it is known."""
    outside = None if operation(handle) is None else captured_from(handle)
    t = handle if outside is None else outside
    # Of tensors in a graph, only variables have it as an attribute.
    data = getattr(t, "_handle_data", None)
    if data is None and operation(t) is not None:
        data = handle_data_util.get_resource_handle_data(t)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def is_part_of(graph: Graph) -> bool:
    """Whether the graph being traced is this one, or that of a branch or a loop in it."""
    current = tf.compat.v1.get_default_graph()
    while isinstance(current, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        current = current.outer_graph
    return current is graph


def in_xla(graph: Graph) -> bool:
    """Whether `graph` will be compiled by XLA.

    Without this check XLA rejects the operation itself, with a message that does not say what to
    do.
    """
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))
