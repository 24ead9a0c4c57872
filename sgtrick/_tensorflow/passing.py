"""Through which of its inputs an operation passes derivatives on, if it calls functions.

A call, a branch or a loop has all that its functions use as inputs, what they stop included. The
definitions of the functions tell. As elsewhere, what cannot be told counts as passing on.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context

from sgtrick._tensorflow import graphs
from sgtrick._types import Tensor


class _Operation(Protocol):
    """One of a graph, or `tapes.Operation`."""

    type: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def inputs_of(op: _Operation, t: Tensor) -> Sequence[Tensor]:
    """The inputs of an operation to which derivatives of its output `t` may flow."""
    key = graphs.identity_of(t)
    k = next(i for i, y in enumerate(op.outputs) if graphs.identity_of(y) == key)
    if isinstance(op, tf.Operation):
        reached = _of_call(op.type, lambda name: _names(graphs.attribute(op, name)), k)
    else:  # the type of an eager call is the name of the function
        reached = _arguments_of(op.type, k)
    return op.inputs if reached is None else [op.inputs[i] for i in sorted(reached)]


def _names(functions: Any) -> list[str]:
    return [f.name for f in (functions if isinstance(functions, list) else [functions])]


def _of_call(
    type_: str, functions: Callable[[str], Sequence[str]], k: int
) -> Collection[int] | None:
    """The inputs that output `k` of a call is connected to; None for all.

    Args:
        type_: The type of the operation.
        functions: Returns the names of the functions that an attribute holds.
        k: The output.
    """
    if type_ in graphs.CALLS:
        return _arguments_of(functions("f")[0], k)
    if type_ in ("If", "StatelessIf"):
        return _of_branches([*functions("then_branch"), *functions("else_branch")], k)
    if type_ in ("Case", "StatelessCase"):
        return _of_branches(functions("branches"), k)
    if type_ in ("While", "StatelessWhile"):
        return _of_loop(functions("body")[0], k)
    return _arguments_of(type_, k)  # calls of TensorFlow 1 have the name of the function as type


def _of_branches(names: Sequence[str], k: int) -> Collection[int] | None:
    found = [_arguments_of(name, k) for name in names]
    # Before the arguments of a branch comes what selects it.
    return None if None in found else {i + 1 for of in found for i in of or ()}


def _of_loop(body: str, k: int) -> Collection[int] | None:
    reached, new = set[int](), {k}
    while new:
        reached |= new
        found = [_arguments_of(body, j) for j in new]
        if None in found:
            return None
        new = {i for of in found for i in of or ()} - reached
    return reached


def _arguments_of(name: str, k: int) -> Collection[int] | None:
    found = connected(name)
    return None if found is None else found[k]


@functools.lru_cache(1024)
def connected(name: str) -> list[frozenset[int]] | None:
    """The arguments that each result of a function is connected to; None if it is not known."""
    if not context.context().has_function(name):
        return None
    definition = context.get_function_def(name)
    arguments = {a.name: i for i, a in enumerate(definition.signature.input_arg)}
    nodes = {node.name: node for node in definition.node_def}

    def of(result: str) -> frozenset[int]:
        stack, seen = [result], set[str]()
        while stack:
            connection = stack.pop()
            if connection not in seen:
                seen.add(connection)
                node = nodes.get(connection.split(":")[0])
                stack += [] if node is None else _inputs_of_node(node, connection)
        return frozenset(arguments[c] for c in seen if c in arguments)

    return [of(definition.ret[result.name]) for result in definition.signature.output_arg]


def _inputs_of_node(node: Any, connection: str) -> list[str]:
    inputs = [i for i in node.input if not i.startswith("^")]
    if "_gradient_op_type" in node.attr and "Call" not in node.op:
        return inputs
    if node.op in ("StopGradient", "PreventGradient") or graphs.type_has_no_gradient(node.op):
        return []
    k = int(connection.rpartition(":")[2])

    def functions(name: str) -> list[str]:
        value = node.attr[name]
        return _names(list(value.list.func) or value.func)

    reached = _of_call(node.op, functions, k)
    return inputs if reached is None else [inputs[i] for i in reached]
