"""What a tensor in a graph is connected to, as TensorFlow sees it."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph

from sgtrick._core._tensorflow import graphs, tapes
from sgtrick._core._tensorflow.tracing import gradients_in
from sgtrick._core.structures import is_differentiable
from sgtrick._core.types import Tensor

# Operations that call Python functions.
HOST_CALLS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def are_connected(y: Tensor, xs: Sequence[Tensor]) -> bool:
    """Whether TensorFlow finds a derivative of `y` with respect to one of `xs`, in its graph.

    It is asked for one, in a graph that is thrown away.
    """
    if not xs or not is_differentiable(y.dtype):
        return False
    with func_graph.FuncGraph("sgtrick_connections").as_default():
        upstream = tf.compat.v1.placeholder(y.dtype, y.shape)
        try:
            found = gradients_in(y.graph, [y], xs, [upstream])
        except LookupError:  # an operation without a gradient: TensorFlow raises this by itself
            return True
        return any(g is not None for g in found)


def varying(outer: Sequence[Tensor], inner: Sequence[Tensor]) -> list[Tensor]:
    """The captured tensors of a traced function with respect to which derivatives may be taken.

    Args:
        outer: The tensors that it captured.
        inner: The same in its graph.
    """
    return [i for o, i in zip(outer, inner, strict=True) if _may_vary(o)]


def _may_vary(t: Tensor) -> bool:
    if t.dtype == tf.resource:
        return graphs.holds_floats(t)
    if not is_differentiable(t.dtype):
        return bool(t.dtype == tf.variant)
    if graphs.operation(t) is None:
        return tapes.is_recorded([t])
    inputs = getattr(t.graph, "inputs", None)
    if inputs is None:  # a graph of TensorFlow 1
        return t.op.type != "Const"
    return any(i is t for i in inputs) or are_connected(t, [i for i in inputs if _carries(i)])


def _carries(t: Tensor) -> bool:
    return is_differentiable(t.dtype) or t.dtype in (tf.resource, tf.variant)


class Subgraph:
    """The operations that a tensor depends on through operations that have derivatives."""

    def __init__(self, y: Tensor) -> None:
        definition = y.graph.as_graph_def()
        self._functions = {f.signature.name: f for f in definition.library.function}
        nodes = {node.name: node for node in definition.node}
        self._nodes = list(self._before(nodes, [y.op.name]))

    @property
    def calls_host(self) -> bool:
        """Whether one calls the host, with something that has derivatives."""
        return any(node.op in HOST_CALLS and _takes_floats(node) for node in self._nodes)

    def is_made_of(self, xs: Sequence[Tensor]) -> bool:
        """Whether all numbers come from `xs`, and none from constants or other inputs."""
        names = {x.op.name for x in xs}
        return all(
            node.input or node.name in names or not _gives_floats(node) for node in self._nodes
        )

    def _before(self, nodes: dict[str, Any], names: Sequence[str]) -> Iterator[Any]:
        stack, seen = list(names), set[str]()
        while stack:
            name = stack.pop()
            if name in seen or name not in nodes:  # an argument of a function is no node
                continue
            seen.add(name)
            node = nodes[name]
            if node.op == "StopGradient":
                continue
            yield node
            inputs = [i.split(":")[0] for i in node.input if not i.startswith("^")]
            # The values of a kept override: their own derivatives are not used.
            stack += inputs[node.attr["_sgtrick_values"].i :]
            for function in self._called(node):
                inside = {n.name: n for n in function.node_def}
                yield from self._before(inside, [r.split(":")[0] for r in function.ret.values()])

    def _called(self, node: Any) -> list[Any]:
        names = [
            f.name for a in node.attr.values() for f in (a.func, *a.list.func) if f.name
        ]
        return [self._functions[name] for name in names if name in self._functions]


def _takes_floats(node: Any) -> bool:
    return any(is_differentiable(tf.as_dtype(t)) for t in node.attr["Tin"].list.type)


def _gives_floats(node: Any) -> bool:
    return is_differentiable(tf.as_dtype(node.attr["dtype"].type or tf.int32))
