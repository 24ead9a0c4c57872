"""What graphs, their operations and their tensors know of themselves."""

from collections.abc import Hashable

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from sgtrick._core.structures import is_differentiable
from sgtrick._core.types import Graph, Operation, Tensor, Variable

# Operations that call Python functions.
HOST_CALLS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def operation(tensor: Tensor) -> Operation | None:
    """The operation that makes a tensor, None for an eager tensor."""
    return None if isinstance(tensor, ops.EagerTensor) else tensor.op


def here(t: Tensor) -> Tensor:
    """A tensor as one of the graph that is being traced, if any.

    A pullback may be called while another graph is traced than the forward pass was. Of what it
    calls in its turn, the arguments are tensors of the forward graph, out of reach for the graph
    in which that is differentiated again. Variables can be used everywhere as they are.
    """
    if tf.executing_eagerly() or t.dtype in (tf.resource, tf.variant):
        return t
    graph = tf.compat.v1.get_default_graph()
    return t if operation(t) is not None and t.graph is graph else tf.identity(t)


def as_used(t: Tensor) -> Tensor | Variable:
    """What stands for a tensor in the graph that is being traced, where a function closes over it.

    A variable stands for itself.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not isinstance(t, tf.Tensor) or not hasattr(graph, "capture"):
        return t
    return t if operation(t) is not None and t.graph is graph else graph.capture(t)


def version() -> int:
    """A number that grows with the operations of the graph that is being traced."""
    return 0 if tf.executing_eagerly() else int(tf.compat.v1.get_default_graph().version)


def was_made_since(op: Operation, before: int) -> bool:
    """Whether an operation is of the graph that is being traced, and younger than that version."""
    return op.graph is tf.compat.v1.get_default_graph() and bool(op._id > before + 1)


def has_no_gradient(op: Operation) -> bool:
    """Whether TensorFlow takes an operation for one without a derivative."""
    if op.type in ("StopGradient", "PreventGradient"):
        return True
    try:
        return ops.get_gradient_function(op) is None
    except LookupError:
        return op.type not in ("PartitionedCall", "StatefulPartitionedCall")


def called_function(op: Operation) -> Graph | None:
    """The graph of the function that an operation calls, None if it calls none."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    function = op.graph._get_function(op.get_attr("f").name)
    return getattr(function, "graph", None)


def captured_from(tensor: Tensor) -> Tensor | None:
    """What a tensor stands for that a graph captured from outside of it, None for another.

    A small eager tensor stands in the graph as a constant, and is captured all the same.
    """
    graph = tensor.graph
    if tensor.op.type in ("Placeholder", "Const"):
        captures = getattr(graph, "captures", ())
        return next((outer for outer, inner in captures if inner.name == tensor.name), None)
    # The gradient of a loop pops what the loop pushed.
    for number, inner in getattr(graph, "_indirect_captures", {}).items():
        if inner.name == tensor.name:
            operations = graph._forward_graph.get_operations()
            outer = [t for op in operations for t in op.outputs if ops.tensor_id(t) == number]
            return outer[0] if outer else None
    return None


def identity_of(tensor: Tensor) -> Hashable:
    """The same for what stands for the same tensor: TensorFlow makes Python objects anew."""
    if isinstance(tensor, tf.Tensor) and not isinstance(tensor, ops.EagerTensor):
        return id(tensor.graph), tensor.name
    return id(tensor)


def holds_floats(handle: Tensor) -> bool:
    """Whether a resource is a variable that has derivatives."""
    outside = None if operation(handle) is None else captured_from(handle)
    data = getattr(handle if outside is None else outside, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return False
    return is_differentiable(tf.as_dtype(data.shape_and_type[0].dtype))


def in_xla(graph: Graph) -> bool:
    """Whether what is traced into `graph` will be compiled.

    The only place that knows of XLA while tracing. Without, XLA refuses the operation itself, by a
    message that does not say what to do.
    """
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))
