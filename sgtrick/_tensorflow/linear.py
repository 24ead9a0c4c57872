"""Whether results are linear in some tensors, as the types of the operations in between tell.

What is found to be linear here is, and TensorFlow's gradient of it is the transpose. Of anything
else nothing is said: branches, loops and overridden gradients are not looked into, but those that
pass derivatives on. Calls of functions are.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from sgtrick._tensorflow import graphs
from sgtrick._tensorflow.connections import PASSES_ON
from sgtrick._tensorflow.graphs import identity_of
from sgtrick._types import Tensor

T = TypeVar("T")

# Linear in one input, or in either of the first two; the other inputs are constant.
_IN_FIRST = (
    *("Identity", "Neg", "Cast", "Reshape", "ExpandDims", "Squeeze", "Transpose", "ZerosLike"),
    *("Sum", "Mean", "Cumsum", "StridedSlice", "Slice", "GatherV2", "Unpack", "Tile", "Pad"),
    *("BroadcastTo", "ReverseV2", "RealDiv", "DivNoNan"),
)
_IN_SECOND = ("Split", "MatrixSolve", "MatrixTriangularSolve")
_IN_EITHER = ("Mul", "MulNoNan", "MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
# Linear in these inputs together: if one of them were constant, the result would be affine.
_TOGETHER: dict[str, slice] = {
    **dict.fromkeys(("Add", "AddV2", "AddN", "Sub", "Pack"), slice(None)),
    "ConcatV2": slice(-1),
    "SelectV2": slice(1, None),
}
# Constant for tensors of one shape.
_OF_SHAPE = ("Shape", "ShapeN", "Size", "Rank", "OnesLike")


def with_operations(f: Callable[[], T]) -> tuple[T, list[Any]]:
    """Calls a function, and returns the operations that it adds to a graph too."""
    if tf.executing_eagerly():
        return f(), []
    graph = tf.compat.v1.get_default_graph()
    before = graph.num_operations()
    return f(), graph.get_operations()[before:]


def are_linear(ys: Sequence[Tensor], ts: Sequence[Tensor], operations: Sequence[Any]) -> bool:
    """Whether all of `ys` are linear in `ts`, of which these operations made them."""
    linear: dict[Hashable, bool] = {identity_of(t): True for t in ts}
    _follow(operations, linear)
    return all(linear.get(identity_of(y)) for y in ys)


def _follow(operations: Sequence[Any], linear: dict[Hashable, bool]) -> None:
    """Adds whether what operations make of tensors is linear in these; what is constant is not."""
    for op in operations:
        found = [linear.get(identity_of(t)) for t in op.inputs]
        if all(f is None for f in found) or op.type in _OF_SHAPE:
            continue
        if op.type in graphs.CALLS:
            graph = graphs.called(op)
            made = _known(graph.inputs, found)
            _follow(graph.get_operations(), made)
            # TensorFlow appends to the results of a function what its gradient needs.
            results = graph.outputs[: len(op.outputs)]
            linear.update(_known(op.outputs, [made.get(identity_of(y)) for y in results]))
        else:
            is_linear = False not in found and _is_linear(op, [f is not None for f in found])
            linear.update((identity_of(t), is_linear) for t in op.outputs)


def _known(tensors: Sequence[Tensor], are_linear: Sequence[bool | None]) -> dict[Hashable, bool]:
    pairs = zip(tensors, are_linear, strict=True)
    return {identity_of(t): is_linear for t, is_linear in pairs if is_linear is not None}


def _is_linear(op: Any, moving: list[bool]) -> bool:
    """Whether an operation is linear in those of its inputs that are `moving`."""
    if op.type == "IdentityN" and graphs.attribute(op, PASSES_ON):
        return moving[0]
    if not all(t.dtype.is_floating for t in op.outputs):
        return False
    if graphs.is_overridden(op):
        return False
    if op.type in _TOGETHER:
        return all(moving[_TOGETHER[op.type]])
    if sum(moving) != 1:
        return False
    place = moving.index(True)
    return (
        (op.type in _IN_FIRST and place == 0)
        or (op.type in _IN_SECOND and place == 1)
        or (op.type in _IN_EITHER and place < 2)
    )
