"""Operations that call the host."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.ops.parallel_for import pfor as pfor_lib

from sgtrick._types import Function, Graph, Tensor


def host_call(callback: Function, xs: Sequence[Tensor], dtypes: Sequence[Any]) -> list[Tensor]:
    """An operation that calls the host, and that `tf.vectorized_map` maps as one call.

    Args:
        callback: From arrays to a list of arrays. If it is mapped, each array has another leading
            dimension: the number of members, or 1 if all members share the array.
        xs: The tensors whose values the callback gets.
        dtypes: The dtypes of its results.
    """
    with tf.device("CPU:0"):  # there is no other kernel, and soft placement may be off
        # Declared stateless: vectorized_map calls a stateful function once too often.
        outputs = list(tf.numpy_function(callback, xs, dtypes, stateful=False, name="host_call"))
    # pfor, which implements vectorized_map, looks for this attribute before its own table of
    # converters. Without it, the host is called in a loop: correct, but member by member.
    outputs[0].op.pfor_converter = functools.partial(_map_host_call, callback, dtypes)
    return outputs


def _map_host_call(callback: Function, dtypes: Sequence[Any], pfor_input: Any) -> list[Any]:
    """The operation for all members."""
    xs = [x.t if x.is_stacked else tf.expand_dims(x.t, 0) for x in pfor_input.inputs]
    return [pfor_lib.wrap(y, True) for y in host_call(callback, xs, dtypes)]


def forbid_saving(graph: Graph, reason: str) -> None:
    """Makes `tf.saved_model.save` fail for the function that is being traced.

    It would store the name of a callback of this process. But it cannot store a resource that no
    object of the model holds, and its error includes the name of the resource.
    """
    # Captured by the function around loops and branches: a loop or branch that uses a resource runs
    # even if its results are unused, like the one that vectorized_map replaces.
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    with tf.init_scope():
        if tf.executing_eagerly() and hasattr(graph, "capture"):
            graph.capture(_unsavable(reason))


@functools.cache
def _unsavable(reason: str) -> Tensor:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=reason)
    # Otherwise TensorFlow searches all of memory for a parent, and then raises the same error.
    handle._parent_trackable = lambda: None
    return handle
