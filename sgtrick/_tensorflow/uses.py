"""What a call uses besides its arguments: the tensors and variables that a function closes over."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.python.framework import ops

from sgtrick._arguments import structures
from sgtrick._arguments.structures import check_supported, is_differentiable
from sgtrick._tensorflow import graphs, passing, tapes
from sgtrick._tensorflow.graphs import identity_of
from sgtrick._types import Tensor, Variable

T = TypeVar("T")


class Uses(NamedTuple):
    """What a result depends on, of what operations used and did not make.

    Attributes:
        tensors: Tensors that have derivatives.
        variables: Trainable variables, in the order in which they were created.
        tables: Those of the variables that were gathered from, and not read otherwise.
        rows: What was gathered.
        has_lists: Whether there is a list of tensors, as of a `tf.TensorArray`.
        fixed: The handles of variables that are not trainable, or values that were read.
        of_host: Tensors that have derivatives, and that only calls of the host use. In eager
            execution these are not told from NumPy.
        beside: In eager execution, tensors that have derivatives, and that were used for something
            else than the result, such as what a rule closes over.
    """

    tensors: Sequence[Tensor] = ()
    variables: Sequence[Variable] = ()
    tables: Sequence[Variable] = ()
    rows: Sequence[Tensor] = ()
    has_lists: bool = False
    fixed: Sequence[Tensor] = ()
    of_host: Sequence[Tensor] = ()
    beside: Sequence[Tensor] = ()

    @property
    def all_tensors(self) -> list[Tensor]:
        """The tensors that have derivatives, without the values of variables."""
        return [*self.tensors, *self.of_host]

    @property
    def values(self) -> list[Tensor]:
        """All tensors that have derivatives, and the values of all variables."""
        trainable = map(structures.as_tensor, self.variables)
        return [*self.all_tensors, *trainable, *map(tapes.value_of, self.fixed)]


def call(
    f: Callable[[], T], passed: Sequence[Tensor], *, variables_alone: bool = False
) -> tuple[T, Uses]:
    """Calls a function, and returns what its result depends on besides tensors it is `passed`.

    If `variables_alone`, of this only the variables are known.
    """
    if variables_alone or (tf.executing_eagerly() and not tapes.somebody_records()):
        with tapes.watching_variables() as variables_read:
            result = f()
        return result, Uses(variables=_with_derivatives(variables_read()))
    return _eagerly(f, passed) if tf.executing_eagerly() else _in_graph(f, passed)


def _eagerly(f: Callable[[], T], passed: Sequence[Tensor]) -> tuple[T, Uses]:
    age = ops.uid()
    with tapes.listing_operations() as listed, tapes.watching_variables() as variables_read:
        result = f()
    variables = _with_derivatives(variables_read())
    operations = [op for op in listed if not graphs.type_has_no_gradient(op.type)]
    # Tapes record what has no gradient, too.
    made = {identity_of(t) for op in listed for t in op.outputs}
    needed = _needed(result, operations, passed)
    recorded = [t for t in needed if identity_of(t) not in made and tapes.is_recorded([t])]
    older = [t for t in recorded if ops.tensor_id(t) < age]
    used = {id(t): t for op in operations for t in op.inputs if ops.tensor_id(t) < age}
    known = {*map(id, passed), *map(id, older)}
    # What is new, recorded, and not made was read from a variable.
    read = [t for t in recorded if ops.tensor_id(t) >= age]
    handles: dict[Hashable, Variable] = {id(v.handle): v for v in variables}
    return result, Uses(
        [t for t in older if is_differentiable(t.dtype)],
        variables,
        *_gathered(handles, operations),
        fixed=[
            *(t for t in older if graphs.holds_floats(t) and id(t) not in handles),
            *(t for t in read if not _is_of_trainable(t, read, operations)),
        ],
        beside=[
            t
            for key, t in used.items()
            if key not in known and is_differentiable(t.dtype) and tapes.is_recorded([t])
        ],
    )


def _is_of_trainable(t: Tensor, read: Sequence[Tensor], operations: Sequence[Any]) -> bool:
    """Whether one of the tensors that were read from variables was read from a trainable one.

    TensorFlow reads variables as it runs the operation that they are passed to. It tells which
    trainable ones it reads, but not for which input, and nothing of others.
    """
    op = next((op for op in operations if any(t is i for i in op.inputs)), None)
    if op is None:  # recorded by the caller's own code
        return False
    alike = [v for v in op.read if (v.dtype, v.shape) == (t.dtype, t.shape)]
    if sum(any(i is r for r in read) for i in op.inputs) <= len(op.read):
        return bool(alike)
    with tapes.not_recording():
        return any(tf.reduce_all(tf.equal(v, t)) for v in alike)


def _in_graph(f: Callable[[], T], passed: Sequence[Tensor]) -> tuple[T, Uses]:
    graph = tf.compat.v1.get_default_graph()
    before = graph.num_operations()
    with tapes.watching_variables() as variables_read:
        result = f()
    operations = graph.get_operations()[before:]
    # The placeholder of a captured tensor is new, but the tensor is not.
    inner = {identity_of(t) for _, t in getattr(graph, "captures", ())}
    made = [
        op
        for op in operations
        if not ((op.outputs and identity_of(op.outputs[0]) in inner) or graphs.has_no_gradient(op))
    ]
    new = {identity_of(t) for op in operations for t in op.outputs} - inner
    # Accumulators compute tangents in between.
    tangents = [tangent for t in passed for tangent in tapes.tangents_of(t)]

    def older_of(result: object) -> list[Tensor]:
        needed = _needed(result, made, [*passed, *tangents])
        return [t for t in map(graphs.as_used, needed) if identity_of(t) not in new]

    older = older_of(result)
    of_host = older_of([list(op.inputs) for op in operations if op.type in graphs.HOST_CALLS])
    if not tf.compat.v1.executing_eagerly_outside_functions():
        _check_supported([*older, *(t for op in operations for t in op.inputs)])
    variables = {
        identity_of(graphs.as_used(v.handle)): v for v in _with_derivatives(variables_read())
    }
    return result, Uses(
        [t for t in older if is_differentiable(t.dtype)],
        list(variables.values()),
        *_gathered(variables, made),
        any(t.dtype == tf.variant and graphs.carries_derivatives(t) for t in older),
        [
            graphs.outside(t)
            for t in older
            if graphs.holds_floats(t) and identity_of(t) not in variables
        ],
        [t for t in of_host if is_differentiable(t.dtype)],
    )


def _check_supported(tensors: Iterable[Tensor]) -> None:
    """Raises if one is a reference variable of TensorFlow 1, or was read from one."""
    for t in map(graphs.outside, tensors):
        if graphs.operation(t) is not None:
            t = t.op.inputs[0] if t.op.type == "Identity" else t
            check_supported(t, f"{t.op.name}, which the function reads,")


def _needed(result: object, operations: Sequence[Any], passed: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a result is computed from, and that the operations did not make.

    The operations are in the order in which they ran. Each of the tensors is returned once.
    """
    leaves = tf.nest.flatten(result, expand_composites=True)
    stack = [t for t in leaves if isinstance(t, tf.Tensor)]
    # Of two that tell of the same tensor, the later one has its derivative.
    made_by = {identity_of(t): op for op in operations for t in op.outputs}
    found = dict[Hashable, Tensor]()
    while stack:  # not in one pass backwards: a loop of TensorFlow 1 is a circle
        t = stack.pop()
        key = identity_of(t)
        if key not in found:
            found[key] = t
            inputs = passing.inputs_of(made_by[key], t) if key in made_by else ()
            stack += filter(graphs.may_carry, inputs)
    known = {*map(identity_of, passed), *made_by}
    return [t for key, t in found.items() if key not in known]


def _gathered(
    variables: Mapping[Hashable, Variable], operations: Sequence[Any]
) -> tuple[list[Variable], list[Tensor]]:
    """The variables, given by their handles, of which operations only gather rows, and these."""
    gathers = [op for op in operations if op.type.startswith("ResourceGather")]
    others = [op for op in operations if not op.type.startswith("ResourceGather")]
    gathered = {identity_of(op.inputs[0]) for op in gathers}
    tables = gathered.difference(identity_of(t) for op in others for t in op.inputs)
    rows = [op.outputs[0] for op in gathers if identity_of(op.inputs[0]) in variables]
    return [v for key, v in variables.items() if key in tables], rows


def _with_derivatives(variables: Iterable[Variable]) -> list[Variable]:
    return [v for v in variables if is_differentiable(v.dtype)]
