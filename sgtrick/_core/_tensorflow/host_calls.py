"""Operations that call the host."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.ops.parallel_for import pfor as pfor_lib

from sgtrick._core.types import Function, Graph, Tensor


def host_call(callback: Function, xs: Sequence[Tensor], dtypes: Sequence[Any]) -> list[Tensor]:
    """An operation that calls the host, and that `tf.vectorized_map` maps as one call.

    Args:
        callback: From arrays to a list of arrays. Mapped, it gets each array with one more
            dimension in front: as many as there are members, or 1 where all members share it.
        xs: The tensors whose values it gets.
        dtypes: Of what it returns.
    """
    with tf.device("CPU:0"):  # it has no other kernel, and soft placement may be switched off
        # A pure function: under vectorized_map a stateful one is called once too often.
        outputs = list(tf.numpy_function(callback, xs, dtypes, stateful=False, name="host_call"))
    # pfor, which is what vectorized_map is, looks for this attribute before it looks into its own
    # table of converters. Without, it calls the host in a loop: right, but member by member.
    outputs[0].op.pfor_converter = functools.partial(_map_host_call, callback, dtypes)
    return outputs


def _map_host_call(callback: Function, dtypes: Sequence[Any], pfor_input: Any) -> list[Any]:
    """The operation of all members."""
    xs = [x.t if x.is_stacked else tf.expand_dims(x.t, 0) for x in pfor_input.inputs]
    return [pfor_lib.wrap(y, True) for y in host_call(callback, xs, dtypes)]


def forbid_saving(graph: Graph, reason: str) -> None:
    """Makes `tf.saved_model.save` refuse the function that is being traced.

    It would store the name of a callback of this process. What it cannot store, it says by name, is
    a resource that no object of the model holds.
    """
    # In the function around loops and branches: those that take a resource are run even where
    # nobody uses them, as the one that vectorized_map replaces.
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    with tf.init_scope():
        if tf.executing_eagerly() and hasattr(graph, "capture"):
            graph.capture(_unsavable(reason))


@functools.cache
def _unsavable(reason: str) -> Tensor:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=reason)
    # Else TensorFlow searches all of memory for a parent; the message comes then, too.
    handle._parent_trackable = lambda: None
    return handle
