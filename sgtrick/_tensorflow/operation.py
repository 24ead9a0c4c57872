"""Operations with overridden derivatives, which are released together with their graph."""

import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.ops.parallel_for import pfor as pfor_lib

from sgtrick._arguments.scopes import scope
from sgtrick._arguments.structures import is_differentiable
from sgtrick._tensorflow import graphs
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._tensorflow.connections import IS_CONNECTED, PASSES_ON, VALUES
from sgtrick._tensorflow.pfor import Vectorized, convert, member_indices
from sgtrick._tensorflow.tapes import not_recording, record_override, unrecorded
from sgtrick._tensorflow.tracing import Traced
from sgtrick._types import Gradient, Graph, Operation, Pullback, Pushforward, Tensor


class Derivatives(NamedTuple):
    """Other derivatives of an operation than its own.

    Attributes:
        pull: From upstream gradients of the outputs to gradients of the inputs, for tapes.
        push: From tangents of the inputs to tangents of the outputs, for accumulators.
        pull_of_graph: `pull` for `tf.gradients`, and for the gradient of a function or branch.
        vectorize: From `Vectorized` inputs to the outputs for a batch, with derivatives in turn.
        is_connected: Whether in a probe, gradients are connected to all inputs.
        passes_on: Whether the derivatives with respect to the first input are those of the values,
            and with respect to others unknown or zero.
    """

    pull: Pullback
    push: Pushforward
    pull_of_graph: Pullback
    vectorize: Callable[[Vectorized], Sequence[Tensor]]
    is_connected: bool = False
    passes_on: bool = False


def identity_with(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    derivatives: Derivatives,
    if_lost: Sequence[Tensor] | str,
) -> list[Tensor]:
    """Returns `ys`, to the last bit, with these derivatives with respect to `xs` and no others.

    In eager execution they are copies, of which tapes and accumulators are told the derivatives. In
    a graph they also are the outputs of an operation with a gradient of its own.

    Args:
        ys: Tensors, in a graph those of the graph being traced.
        xs: Tensors, in a graph those of the graph being traced.
        derivatives: The derivatives.
        if_lost: The same values, whose own derivatives are used if TensorFlow drops those of the
            operation; or the message of the error then.
    """
    if tf.executing_eagerly():
        outputs = list(map(unrecorded, ys))
    else:
        if isinstance(if_lost, str):
            message = if_lost
            if_lost = [_prevented(y, message) if is_differentiable(y.dtype) else y for y in ys]
        outputs = _operation(if_lost, xs, derivatives)
        for output, y in zip(outputs, ys, strict=True):
            output.set_shape(y.shape)
    record_override(outputs, xs, derivatives.pull, derivatives.push)
    return outputs


def _prevented(y: Tensor, message: str) -> Tensor:
    """Returns `y`, whose derivative is an error with this message."""
    with not_recording():
        prevented = tf.raw_ops.PreventGradient(input=y, message=message)

    def pull(_: Tensor) -> list[Gradient]:
        raise LookupError(message)

    # For tapes alone, where TensorFlow copies the operation that has this for its value.
    record_override([prevented], [y], pull, lambda tangent: [tangent])
    # `tf.vectorized_map` has no rule for the operation.
    prevented.op.pfor_converter = lambda pfor_input: pfor_lib.wrap(
        _prevented(pfor_input.stacked_input(0), message), True
    )
    return prevented


class _Overrides:
    """The overrides of one graph by name. Only the graph holds them, so they are freed with it."""

    def __init__(self, graph: Graph) -> None:
        self.by_name: dict[str, Derivatives] = {}
        self.operations: dict[str, str] = {}  # the names of the operations
        self.graph = weakref.ref(graph)
        self.names: list[str] = []
        # TensorFlow's registry never drops a gradient by itself.
        weakref.finalize(self, _forget, self.names)


def _forget(names: list[str]) -> None:
    for name in names:
        ops.gradient_registry._registry.pop(name, None)


# A SavedModel of another process must not find the overrides of this one under its names.
_PROCESS, _NUMBERS = uuid.uuid4().hex, itertools.count()


# The names of overrides that a gradient creates while it is being saved.
_MADE: ContextVar[list[str] | None] = ContextVar("_MADE", default=None)


def is_storing() -> bool:
    """Whether a gradient is being traced that a SavedModel will contain, without its overrides."""
    return _MADE.get() is not None


_ATTRIBUTE = "_sgtrick_overrides"


# TensorFlow's error for a loaded operation without its gradient names the operation.
_IF_LOST = "its_gradient_needs_a_SavedModel_with_experimental_custom_gradients"
_IN_GRADIENT = (
    "a_SavedModel_has_no_derivatives_of_this_gradient_since_they_are_unknown_or_from_a_rule"
)


def _operation(
    if_lost: Sequence[Tensor], inputs: Sequence[Tensor], derivatives: Derivatives
) -> list[Tensor]:
    """Returns `if_lost` as the outputs of an operation of the graph that is being traced.

    Tapes and accumulators do not see it.
    """
    graph = tf.compat.v1.get_default_graph()
    overrides = getattr(graph, _ATTRIBUTE, None)
    if overrides is None:
        overrides = _Overrides(graph)
        setattr(graph, _ATTRIBUTE, overrides)
    name = f"sgtrick-{_PROCESS}-{next(_NUMBERS)}"
    made = _MADE.get()
    if made is not None:
        made.append(name)
    # tf.vectorized_map converts no operation whose inputs are the same for all members, and may
    # copy it, so that tapes do not see it. But its gradients may differ by members, and their sum
    # is not the gradient of the sum of what flows back.
    indices = member_indices()

    def vectorize(batch: Vectorized) -> Sequence[Tensor]:
        own = batch.inputs[: len(batch.inputs) - len(indices)]
        return derivatives.vectorize(batch._replace(inputs=own))

    overrides.by_name[name] = derivatives._replace(vectorize=vectorize)
    overrides.names.append(name)
    _register(name, len(if_lost), len(indices), weakref.ref(overrides))
    values = {VALUES: tf.compat.v1.AttrValue(i=len(if_lost))}
    if derivatives.is_connected:
        values[IS_CONNECTED] = tf.compat.v1.AttrValue(b=True)
    if derivatives.passes_on:
        values[PASSES_ON] = tf.compat.v1.AttrValue(b=True)
    with (
        not_recording(),
        graph.gradient_override_map({"IdentityN": name}),
        graph._attr_scope(values),
    ):
        name_ = _IN_GRADIENT if is_storing() else _IF_LOST
        outputs = tf.identity_n([*if_lost, *inputs, *indices], name=name_)
    overrides.operations[name] = outputs[0].op.name
    # tf.vectorized_map looks for this attribute before it looks into its registry.
    outputs[0].op.pfor_converter = _map
    return list(outputs[: len(if_lost)])


def _map(pfor_input: Any) -> list[Any]:
    """The converter for `tf.vectorized_map`: another override, of the batch."""
    overrides = _overrides_of(pfor_input.op)
    if overrides is None:
        raise LookupError(_COPIED)
    name = pfor_input.op.get_attr("_gradient_op_type").decode()
    return convert(pfor_input, overrides.by_name[name].vectorize)


def _register(name: str, count: int, rest: int, reference: Callable[[], _Overrides | None]) -> None:
    @tf.RegisterGradient(name)  # type: ignore[untyped-decorator]
    @unconverted
    def gradient(op: Operation, *upstream: Tensor) -> list[Gradient]:
        overrides = reference()
        if overrides is None:
            raise LookupError(_COPIED)
        pull = overrides.by_name[name].pull_of_graph
        if op is None:
            pull = _to_be_stored(pull)
        elif _overrides_of(op) is not overrides:
            pull = _of_copy(pull, overrides.graph(), overrides.operations[name], op)
        gradients = pull(*upstream[:count])
        if graphs.is_out_of_reach():
            raise NotImplementedError(_IN_BRANCH)
        return [*[None] * count, *gradients, *[None] * rest]


def _overrides_of(op: Operation) -> _Overrides | None:
    return getattr(op.graph, _ATTRIBUTE, None)


def _to_be_stored(pull: Pullback) -> Pullback:
    """The pullback as `tf.saved_model.save` traces it, without an operation.

    A SavedModel does not contain gradients of gradients. So guards add nothing where nothing is
    missing, and the overrides that are created here are removed from the registry: loaded
    operations cannot find them by name.
    """

    def pull_and_forget(*upstream: Tensor) -> Sequence[Gradient]:
        made: list[str] = []
        try:
            with scope(_MADE, made):
                return pull(*upstream)
        finally:
            _forget(made)

    return pull_and_forget


def _of_copy(pull: Pullback, graph: Graph, name: str, op: Operation) -> Pullback:
    """The pullback of an operation of this name, for the same operation in a copy of its graph.

    Forward mode in a graph differentiates loops and branches through copies of their bodies. The
    tensors that the pullback uses have the same names in the copy.
    """
    copy, is_body = op.graph, isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)
    # A loaded model does not count as a copy, since it has other variables.
    if not is_body or (copy.name, op.name) != (graph.name, name):
        raise LookupError(_COPIED)
    captures = {id(outer): inner for outer, inner in getattr(graph, "captures", ())}
    inputs = [t.name for t in getattr(graph, "inputs", ())]

    def in_copy(t: Tensor) -> Any:
        t = captures.get(id(t), t)
        if isinstance(t, ops.EagerTensor) and t.dtype != tf.resource:
            return t
        if isinstance(t, ops.EagerTensor) or t.graph is not graph:
            raise LookupError(_COPIED)
        if t.name in inputs:
            return copy.inputs[inputs.index(t.name)]
        return copy.get_tensor_by_name(t.name)

    def pull_in_copy(*upstream: Tensor) -> list[Gradient]:
        traced = Traced(pull, upstream, graph)
        return list(traced(upstream, list(map(in_copy, traced.captured))))

    return pull_in_copy


_IN_BRANCH = (
    "A gradient was differentiated again in a branch (tf.cond, tf.switch_case), where its rule "
    "uses a tensor or variable that it closes over. TensorFlow cannot pass that to the derivative. "
    "Pass it to the function with the rule as an argument."
)

_COPIED = (
    "TensorFlow copied an operation of sgtrick without its gradient: by loading a SavedModel that "
    "was saved with experimental_custom_gradients=False, or by tf.vectorized_map over a "
    "tf.function whose arguments are the same for all members. Save with "
    "experimental_custom_gradients=True, or call the function outside of the mapped one."
)
