"""How `tf.vectorized_map` converts operations that come with their own converter."""

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.ops.parallel_for import control_flow_ops
from tensorflow.python.ops.parallel_for import pfor as pfor_lib

from sgtrick._tensorflow.graphs import CALLS, as_used, called, captured_from, identity_of
from sgtrick._types import Graph, Operation, Tensor


class Vectorized(NamedTuple):
    """The inputs of an operation for all members of a batch.

    Attributes:
        inputs: For each input of the operation a tensor and whether it has a leading batch
            dimension; if not, it is the same for all members.
        take: Returns the same for any other tensor of the operation's graph.
        stack: Adds a batch dimension to a tensor that is the same for all members.
        graph: The operation's graph.
        outputs: The operation's outputs, for one member.
    """

    inputs: Sequence[tuple[Tensor, bool]]
    take: Callable[[Tensor], tuple[Tensor, bool]]
    stack: Callable[[Tensor], Tensor]
    graph: Graph
    outputs: Sequence[Tensor]


def member_indices() -> list[Tensor]:
    """The index of the member, for each `tf.vectorized_map` whose function is being traced.

    It is in the stack frame that traces the function.
    """
    graphs = [tf.compat.v1.get_default_graph()]
    # A function that is called there may be called elsewhere too, but branches and loops are parts.
    while isinstance(graphs[-1], control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graphs.append(graphs[-1].outer_graph)
    found: list[Tensor] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is control_flow_ops._pfor_impl.__code__:
            index = frame.f_locals.get("loop_var")
            is_traced = "new_ops" in frame.f_locals  # and is being converted
            if index is not None and not is_traced and any(index.graph is g for g in graphs):
                found.append(index)
        frame = frame.f_back
    return found


def convert(pfor_input: Any, vectorize: Callable[[Vectorized], Sequence[Tensor]]) -> list[Any]:
    """The batched outputs of an operation, the first of which `vectorize` returns.

    The other outputs are the last inputs.
    """
    batch = _vectorized(pfor_input)
    outputs = vectorize(batch)
    count = len(outputs)
    return [pfor_lib.wrap(t, True) for t in outputs] + [
        pfor_lib.wrap(*found) for found in batch.inputs[count:]
    ]


def map_by(op: Operation, vectorize: Callable[[Vectorized], Sequence[tuple[Tensor, bool]]]) -> None:
    """Gives a call of a function a rule that returns its outputs, and whether each is stacked."""

    def converter(pfor_input: Any) -> list[Any]:
        found = vectorize(_vectorized(pfor_input))
        if len(found) < len(op.outputs):  # what the gradient of the call needs
            raise NotImplementedError(_BRANCH)
        return [pfor_lib.wrap(*t) for t in found]

    op.pfor_converter = converter


_BRANCH = (
    "TensorFlow cannot map the gradient of a branch (tf.cond, tf.switch_case, if in AutoGraph) by "
    "tf.vectorized_map. It is asked for where branches of a JVP rule use the tangents, and the map "
    "is differentiated in forward mode or twice. Use tf.where there, or choose only the slope in "
    "the branch and multiply the tangent by it outside."
)


def _vectorized(pfor_input: Any) -> Vectorized:
    op, pfor = pfor_input.op, pfor_input.pfor

    def take(tensor: Tensor) -> tuple[Tensor, bool]:
        if isinstance(tensor, ops.EagerTensor) or tensor.graph is not op.graph:
            if _depends_on_member(tensor):
                raise OutOfReachError
            return tensor, False
        found = pfor._convert_helper(tensor)
        return found.t, bool(found.is_stacked)

    def stack(tensor: Tensor) -> Any:
        return pfor_lib._stack(tensor, pfor.loop_len_vector).t

    inputs = [(found.t, bool(found.is_stacked)) for found in pfor_input.inputs]
    return Vectorized(inputs, take, stack, op.graph, op.outputs)


_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


def is_unmappable(operations: Iterable[Operation]) -> bool:
    """Whether there are branches among operations, or in functions they call, with gradients.

    Such a branch also returns what its gradient needs, as optional values, and TensorFlow cannot
    map that.
    """

    def is_branch(op: Operation) -> bool:
        if op.type in CALLS:
            return is_unmappable(called(op).get_operations())
        return op.type in _BRANCHES and any(t.dtype == tf.variant for t in op.outputs)

    return any(map(is_branch, operations))


def over_members(
    f: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
    us: Sequence[Tensor],
    taken: Sequence[tuple[Tensor, bool]],
) -> list[Tensor]:
    """`tf.vectorized_map` of a function of `us` and of tensors that were taken from a graph.

    Args:
        f: The function, for one member.
        us: Tensors with a leading batch dimension.
        taken: What `Vectorized.take` returned.
    """
    # TensorFlow loses derivatives of a mapped call by what the mapped function captures.
    taken = [(as_used(t), is_stacked) for t, is_stacked in taken]
    stacked = [t for t, is_stacked in taken if is_stacked and t.dtype != tf.variant]

    def one(arguments: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        us, of_stacked = arguments
        some = iter(of_stacked)
        tensors = [
            t if not is_stacked else _list_of(t, us[0]) if t.dtype == tf.variant else next(some)
            for t, is_stacked in taken
        ]
        return f(us, tensors)

    return tf.vectorized_map(one, (list(us), stacked))  # type: ignore[no-any-return]


def _list_of(lists: Tensor, u: Tensor) -> Tensor:
    """A member's tensor list, as of a loop, in a function that is mapped.

    `u` is any tensor that differs between the members.

    `tf.vectorized_map` stacks the elements of lists, and not the lists, so it cannot be given them.
    """
    member, _ = tf.identity_n([lists, u])
    member.op.pfor_converter = lambda pfor_input: [
        pfor_lib.wrap(lists, True),
        pfor_lib.wrap(pfor_input.stacked_input(1), True),
    ]
    return member


def map_jax_by(
    graph: Graph, f: Callable[[Sequence[Tensor], Sequence[bool]], Sequence[Tensor]]
) -> None:
    """Gives the operation that jax2tf made in a graph the rule `f`.

    Args:
        graph: The graph of this operation alone.
        f: From its inputs for all members, and whether each has a batch dimension, to the outputs.
    """

    def converter(pfor_input: Any) -> list[Any]:
        stacked = [bool(x.is_stacked) for x in pfor_input.inputs]
        ys = f([x.t for x in pfor_input.inputs], stacked)
        return [pfor_lib.wrap(y, any(stacked)) for y in ys]

    for op in graph.get_operations():
        if op.type == "XlaCallModule":
            op.pfor_converter = converter
        elif op.type == "PreventGradient":  # around it
            op.pfor_converter = lambda pfor_input: list(pfor_input.inputs)


class OutOfReachError(Exception):
    """A tensor of a mapped function is not in the graph that is being converted."""


def _depends_on_member(tensor: Tensor) -> bool:
    """Whether a tensor differs between the members of the batch of a `tf.vectorized_map`."""
    stack, seen = [tensor], set()
    while stack:
        t = stack.pop()
        if isinstance(t, ops.EagerTensor) or identity_of(t) in seen:
            continue
        seen.add(identity_of(t))
        if t.op.type == "PlaceholderWithDefault" and t.dtype == tf.int32:  # the member's index
            return True
        if t.op.type in ("Shape", "ShapeN", "Size", "Rank"):  # the same for all members
            continue
        outside = captured_from(t)
        stack.extend(t.op.inputs if outside is None else [outside])
    return False
