"""Every touch of TensorFlow's private names, each with its reason.

Nothing of TensorFlow's public interface says how to override a gradient in forward mode or in
`tf.vectorized_map`, nor frees what an override holds. `tests/test_tensorflow.py` fails with the
name of what is missing, should a version of TensorFlow take one of these away.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import forwardprop_util, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_v2_func_graphs,
    gradients_util,
)
from tensorflow.python.ops.parallel_for import pfor as pfor_lib

Pullback = Callable[..., Sequence[Any]]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def unconverted(f: F) -> F:
    """Keeps AutoGraph out of a function; the same for type checkers."""
    return tf.autograph.experimental.do_not_convert(f)  # type: ignore[no-any-return]


def somebody_records() -> bool:
    """Whether a tape or an accumulator is active, so that eager results have to be recorded."""
    return bool(record.could_possibly_record())


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a tape or an accumulator knows a derivative of one of some eager tensors."""
    if record.should_record_backprop(list(tensors)):
        return True
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def not_recording() -> contextlib.AbstractContextManager[None]:
    """A scope in which no tape and no accumulator sees operations."""
    return record.stop_recording()  # type: ignore[no-any-return]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """A scope in which tapes record, also where TensorFlow has suspended them.

    `tf.recompute_grad` runs functions while recording is suspended. A rule that is traced there
    may hold a tape of its own, which would record nothing.
    """
    suspended = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if suspended:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if suspended:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def unsuspended(f: Callable[[], T]) -> T:
    """Calls a function whose own tapes have to record, where TensorFlow may have suspended them."""
    return apart(f) if pywrap_tfe.TFE_Py_TapeSetIsStopped() else f()


def record_override(
    outputs: Sequence[Any], inputs: Sequence[Any], pull: Pullback, push: Pullback
) -> None:
    """Tells all tapes and accumulators the derivatives of `outputs` with respect to `inputs`.

    Args:
        outputs: Tensors that nothing has recorded.
        inputs: Tensors.
        pull: From one upstream gradient for each output to one gradient or None for each input.
        push: From one tangent for each input, None for those without derivatives, to one tangent
            or None for each output.
    """
    record.record_operation("sgtrick", list(outputs), list(inputs), pull, push)


def apart(f: Callable[[], T]) -> T:
    """Calls a function where no tape and no accumulator is active, for they are a thread's own.

    While an accumulator computes a JVP, it silences all tapes that are younger than itself.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def run() -> T:
        with contextlib.nullcontext() if graph is None else graph.as_default():
            return f()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def tapes_are_silenced() -> bool:
    """Whether a tape that begins now would record nothing, since an accumulator is at work."""
    a, b = _ends()
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(a)
        record.record_operation("sgtrick", [b], [a], lambda upstream: [upstream])
        return not record.should_record_backprop([b])


@functools.cache
def _ends() -> tuple[Any, Any]:
    with tf.init_scope():
        return tf.constant(0.0), tf.constant(0.0)


def call_apart(f: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Returns `f(*arguments)`, traced apart and called here, where it is recorded as a whole."""
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in arguments]

    def run() -> tuple[Any, list[Any], list[Any]]:
        traced = Traced(f, specs)
        variables = [t for t in traced.captured if t.dtype == tf.resource]
        moving = [t for t in traced.captured if t.dtype not in (tf.resource, tf.variant)]

        # Forward mode over a function fails if what the function captures has a tangent.
        def explicit(*tensors: Any) -> Any:
            some = iter(tensors[len(specs) :])
            captured = [
                t if t.dtype in (tf.resource, tf.variant) else next(some) for t in traced.captured
            ]
            return traced(tensors[: len(specs)], captured)

        return (
            trace(explicit, [*specs, *(tf.TensorSpec(t.shape, t.dtype) for t in moving)]),
            moving,
            variables,
        )

    function, moving, variables = apart(run)
    if forwardprop_util.pack_tangents([as_used(t) for t in variables]).tangents:
        raise NotImplementedError(_VARIABLES_MOVE)
    return function(*arguments, *moving)


# TensorFlow would leave out, without a word, how they move.
_VARIABLES_MOVE = (
    "Forward mode with respect to a variable, over forward mode through a rule that reads it. Pass "
    "the variable as an argument, or differentiate by tf.GradientTape in one of the two."
)


def unrecorded(x: Any) -> Any:
    """The value of a tensor, which no tape and no accumulator connects with it."""
    with not_recording():
        return tf.stop_gradient(x)


def form(call: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function of `*args, **kwargs` that returns `call(converted, args, kwargs)`.

    AutoGraph takes a second to rewrite what has nothing for it, so that it is kept out of `call`.
    `converted` makes of a caller's function one that AutoGraph converts, where it converts callers.
    """
    call = unconverted(call)

    def form(*args: Any, **kwargs: Any) -> Any:
        status = tf.__internal__.autograph.control_status_ctx()
        return call(functools.partial(_converted, status), args, kwargs)

    return form


def _converted(status: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    if tf.executing_eagerly():
        return f
    return tf.__internal__.autograph.tf_convert(  # type: ignore[no-any-return]
        f, status, convert_by_default=False
    )


def asked_for(x: Any) -> bool:
    """Whether the tape that calls a pullback now was asked for the gradient of `x` itself.

    A tape calls pullbacks on all paths from its target, whether they lead to what was asked for
    or not, and tells no pullback which. The call of `GradientTape.gradient` knows.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "gradient" and "sources" in frame.f_locals:
            sources = tf.nest.flatten(frame.f_locals["sources"])
            return any(s is x or getattr(s, "handle", s) is x for s in sources)
        frame = frame.f_back
    return False


class Override(NamedTuple):
    """What an operation in a graph means instead of what it is.

    Attributes:
        gradient: From upstream gradients of the outputs to gradients of the inputs.
        vectorize: The same for a batch: from `Vectorized` inputs to the batched outputs.
    """

    gradient: Callable[..., Sequence[Any]]
    vectorize: Callable[["Vectorized"], Sequence[Any]]


class _Overrides:
    """Those of one graph by name. The graph holds them, so that they die with it."""

    def __init__(self, graph: Any) -> None:
        self.by_name: dict[str, Override] = {}
        self.operations: dict[str, str] = {}  # their names
        self.graph = weakref.ref(graph)
        # TensorFlow's registry never forgets a gradient.
        names: list[str] = []
        weakref.finalize(self, _forget, names)
        self.names = names


def _forget(names: list[str]) -> None:
    for name in names:
        ops.gradient_registry._registry.pop(name, None)


# A SavedModel of another process must not find the overrides of this one under its names.
_PROCESS, _NUMBERS = uuid.uuid4().hex, itertools.count()
# The names of those that a gradient makes while it is stored.
_MADE: ContextVar[list[str] | None] = ContextVar("_MADE", default=None)
_ATTRIBUTE = "_sgtrick_overrides"

# TensorFlow's error for a loaded operation without its gradient names the operation.
_IF_LOST = "its_gradient_needs_a_SavedModel_with_experimental_custom_gradients"


def override(natural: Sequence[Any], inputs: Sequence[Any], meaning: Override) -> list[Any]:
    """Returns `natural` as outputs of an operation of the default graph that means something else.

    Tapes and accumulators do not see it: see `record_override`.

    Args:
        natural: The values. Where the override is lost, the derivatives are theirs.
        inputs: What the gradients are with respect to.
        meaning: The override.
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
    overrides.by_name[name] = meaning
    overrides.names.append(name)
    _register(name, len(natural), weakref.ref(overrides))
    with not_recording(), graph.gradient_override_map({"IdentityN": name}):
        outputs = tf.identity_n([*natural, *inputs], name=_IF_LOST)
    overrides.operations[name] = outputs[0].op.name
    # tf.vectorized_map looks for this attribute before it looks into its registry.
    outputs[0].op.pfor_converter = _convert
    return list(outputs[: len(natural)])


def _register(name: str, count: int, reference: Callable[[], _Overrides | None]) -> None:
    @tf.RegisterGradient(name)  # type: ignore[untyped-decorator]
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(op: Any, *upstream: Any) -> list[Any]:
        overrides = reference()
        if overrides is None:
            raise LookupError(_COPIED)
        pull = overrides.by_name[name].gradient
        if op is None:
            pull = _to_be_stored(pull)
        elif _overrides_of(op) is not overrides:
            pull = _of_copy(pull, overrides.graph(), overrides.operations[name], op)
        return [*[None] * count, *pull(*upstream[:count])]


def _overrides_of(op: Any) -> _Overrides | None:
    return getattr(op.graph, _ATTRIBUTE, None)


def _to_be_stored(pull: Pullback) -> Pullback:
    """The pullback as `tf.saved_model.save` traces it, without an operation.

    It does not store gradients of gradients, so that operations that are loaded must not find those
    that are made here under their names.
    """

    def pull_and_forget(*upstream: Any) -> Sequence[Any]:
        made: list[str] = []
        token = _MADE.set(made)
        try:
            return pull(*upstream)
        finally:
            _forget(made)
            _MADE.reset(token)

    return pull_and_forget


def _of_copy(pull: Pullback, graph: Any, name: str, op: Any) -> Pullback:
    """The pullback of an operation of this name, for the same operation in a copy of its graph.

    Forward mode in a graph differentiates loops and branches by copies of their bodies. What the
    pullback uses of the graph has the same name in the copy.
    """
    copy, is_body = op.graph, isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)
    # Not that of a loaded model, whose variables are others.
    if not is_body or (copy.name, op.name) != (graph.name, name):
        raise LookupError(_COPIED)
    captures = {id(outer): inner for outer, inner in getattr(graph, "captures", ())}
    inputs = [t.name for t in getattr(graph, "inputs", ())]

    def in_copy(t: Any) -> Any:
        t = captures.get(id(t), t)
        if isinstance(t, ops.EagerTensor) and t.dtype != tf.resource:
            return t
        if isinstance(t, ops.EagerTensor) or t.graph is not graph:
            raise LookupError(_COPIED)
        if t.name in inputs:
            return copy.inputs[inputs.index(t.name)]
        return copy.get_tensor_by_name(t.name)

    def pull_in_copy(*upstream: Any) -> list[Any]:
        places: list[int] = []

        def some(*us: Any) -> list[Any]:
            given = iter(us)
            gradients = pull(*(None if u is None else next(given) for u in upstream))
            places[:] = [i for i, g in enumerate(gradients) if g is not None]
            return [tf.convert_to_tensor(gradients[i]) for i in places]

        us = [u for u in upstream if u is not None]
        traced = Traced(some, [tf.TensorSpec(u.shape, u.dtype) for u in us], graph)
        found = dict(zip(places, traced(us, list(map(in_copy, traced.captured))), strict=True))
        return [found.get(i) for i in range(len(op.inputs) - len(upstream))]

    return pull_in_copy


_COPIED = (
    "The gradient of a sgtrick function was asked for through a copy of its operation that "
    "TensorFlow made without the gradient: by loading a SavedModel stored with "
    "experimental_custom_gradients=False, or by tf.vectorized_map over a tf.function, loop or "
    "branch in which the function's arguments are the same for all members. Store with "
    "experimental_custom_gradients=True, or call the function outside of what is mapped."
)


class Vectorized(NamedTuple):
    """The inputs of an operation for all members of a batch.

    Attributes:
        inputs: For each input of the operation a tensor and whether it has a batch dimension in
            front; without, it is the same for all members.
        convert: The same for any other tensor of the operation's graph.
        stack: Gives a tensor that is the same for all members a batch dimension.
        graph: The operation's graph.
        outputs: The operation's outputs, for one member.
    """

    inputs: Sequence[tuple[Any, bool]]
    convert: Callable[[Any], tuple[Any, bool]]
    stack: Callable[[Any], Any]
    graph: Any
    outputs: Sequence[Any]


def _convert(pfor_input: Any) -> list[Any]:
    """What `tf.vectorized_map` makes of an override: another override, of the batch."""
    op, pfor = pfor_input.op, pfor_input.pfor

    def convert(tensor: Any) -> tuple[Any, bool]:
        if isinstance(tensor, ops.EagerTensor) or tensor.graph is not op.graph:
            if _depends_on_member(tensor):
                raise OutOfReachError
            return tensor, False
        found = pfor._convert_helper(tensor)
        return found.t, bool(found.is_stacked)

    def stack(tensor: Any) -> Any:
        return pfor_lib._stack(tensor, pfor.loop_len_vector).t

    overrides = _overrides_of(op)
    if overrides is None:
        raise LookupError(_COPIED)
    meaning = overrides.by_name[op.get_attr("_gradient_op_type").decode()]
    inputs = [(found.t, bool(found.is_stacked)) for found in pfor_input.inputs]
    outputs = meaning.vectorize(Vectorized(inputs, convert, stack, op.graph, op.outputs))
    count = len(outputs)
    return [pfor_lib.wrap(t, True) for t in outputs] + [
        pfor_lib.wrap(*found) for found in inputs[count:]
    ]


class OutOfReachError(Exception):
    """A tensor of a mapped function that is not of the graph that is being converted."""


def _depends_on_member(tensor: Any) -> bool:
    """Whether a tensor differs between the members of what `tf.vectorized_map` maps."""
    stack, seen = [tensor], set()
    while stack:
        t = stack.pop()
        if isinstance(t, ops.EagerTensor) or identity_of(t) in seen:
            continue
        seen.add(identity_of(t))
        if t.op.type == "PlaceholderWithDefault" and t.dtype == tf.int32:  # the member's number
            return True
        if t.op.type in ("Shape", "ShapeN", "Size", "Rank"):  # the same for all members
            continue
        outside = captured_from(t)
        stack.extend(t.op.inputs if outside is None else [outside])
    return False


def unconvertible(y: Any, message: str) -> Any:
    """Returns `y`; who differentiates it gets an error with this message.

    `tf.vectorized_map` has no rule for the operation, and gets one here.
    """
    with not_recording():
        prevented = tf.raw_ops.PreventGradient(input=y, message=message)
    if not tf.executing_eagerly():
        prevented.op.pfor_converter = lambda pfor_input: pfor_lib.wrap(
            unconvertible(pfor_input.stacked_input(0), message), True
        )
    return prevented


def as_one(f: Callable[..., Any], *tensors: Any) -> Any:
    """`f(*tensors)` without derivatives, in a graph as one operation that runs only if it is used.

    What is stateful in `f`, as an operation that may raise, would run in any case in a function. A
    call that is declared not to be stateful is left out with all that is in it. What it calls is
    traced once for each `f`, which has to be hashable, and for each shape and dtype.
    """
    if tf.executing_eagerly():
        return f(*tensors)
    function = _one(f, tuple(tf.TensorSpec(t.shape, t.dtype) for t in tensors))
    function.add_to_graph(tf.compat.v1.get_default_graph())
    (spec,) = function.outputs
    with not_recording():
        (y,) = tf.raw_ops.PartitionedCall(args=list(tensors), Tout=[spec.dtype], f=function)
        y = tf.stop_gradient(y) if spec.dtype.is_floating else y
    y.set_shape(spec.shape)
    return y


@functools.lru_cache(1024)
def _one(f: Callable[..., Any], specs: tuple[Any, ...]) -> Any:
    with tf.init_scope():
        return trace(f, specs)


def here(t: Any) -> Any:
    """A tensor as one of the graph that is being traced, if any.

    A pullback may be called while another graph is traced than the forward pass was. Of what it
    calls in its turn, the arguments are tensors of the forward graph, out of reach for the graph
    in which that is differentiated again. Variables can be used everywhere as they are.
    """
    if tf.executing_eagerly() or t.dtype in (tf.resource, tf.variant):
        return t
    graph = tf.compat.v1.get_default_graph()
    return t if operation(t) is not None and t.graph is graph else tf.identity(t)


def as_used(t: Any) -> Any:
    """What stands for a tensor in the graph that is being traced, where a function closes over it.

    A variable stands for itself.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not isinstance(t, tf.Tensor) or not hasattr(graph, "capture"):
        return t
    return t if operation(t) is not None and t.graph is graph else graph.capture(t)


def holds_floats(handle: Any) -> bool:
    """Whether a resource is a variable that has derivatives."""
    outside = None if operation(handle) is None else captured_from(handle)
    data = getattr(handle if outside is None else outside, "_handle_data", None)
    if data is None or not data.is_set or not data.shape_and_type:
        return False
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def trace(f: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """`f` as a concrete function for tensors like `specs`."""
    with recording():
        return tf.function(f, autograph=False).get_concrete_function(*specs)


def gradients_in(graph: Any, ys: Sequence[Any], xs: Sequence[Any], grad_ys: Sequence[Any]) -> Any:
    """`tf.gradients` of tensors of a graph which need not be the one that is being traced."""
    with recording():
        return gradients_util._GradientsHelper(
            list(ys), list(xs), grad_ys=list(grad_ys), src_graph=graph
        )


class Traced:
    """A function traced as part of a graph, to be called with other tensors than it captured.

    Attributes:
        captured: The tensors from outside that it uses.
        inputs: The placeholders of its arguments.
        outputs: The tensors that it returns.
    """

    def __init__(self, f: Callable[..., Any], specs: Sequence[Any], graph: Any = None) -> None:
        with contextlib.nullcontext() if graph is None else graph.as_default():
            self._function = trace(f, specs)
        self.captured = list(self._function.captured_inputs)
        self.inputs = self._function.graph.inputs[: len(specs)]
        self.outputs = self._function.graph.outputs

    def __call__(self, arguments: Sequence[Any], captured: Sequence[Any]) -> Any:
        """Calls the function with `captured` in the place of the tensors that it captured."""
        self._function.set_external_captures(list(captured))
        try:
            return self._function(*arguments)
        finally:
            self._function.set_external_captures(self.captured)


def carried(f: Callable[..., Any], specs: Sequence[Any], owner: Any) -> Callable[..., Any]:
    """`f`, so that it can be called where the tensors that it uses are out of reach.

    A gradient graph is differentiated in another one, which can take tensors of the former, and
    none of the forward graph.

    Args:
        f: Takes and returns tensors.
        specs: Of what it takes.
        owner: A tensor of the graph to which those belong that `f` uses.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or (operation(owner) is not None and owner.graph is graph):
        return f
    traced = Traced(f, specs)
    captured = list(map(here, traced.captured))
    return lambda *arguments: traced(arguments, captured)


def host_call(callback: Callable[..., Any], xs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
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


def _map_host_call(
    callback: Callable[..., Any], dtypes: Sequence[Any], pfor_input: Any
) -> list[Any]:
    """The operation of all members."""
    xs = [x.t if x.is_stacked else tf.expand_dims(x.t, 0) for x in pfor_input.inputs]
    return [pfor_lib.wrap(y, True) for y in host_call(callback, xs, dtypes)]


def in_xla(graph: Any) -> bool:
    """Whether what is traced into `graph` will be compiled.

    The only place that knows of XLA while tracing. Without, XLA refuses the operation itself, by a
    message that does not say what to do.
    """
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def forbid_saving(graph: Any, reason: str) -> None:
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
def _unsavable(reason: str) -> Any:
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=reason)
    # Else TensorFlow searches all of memory for a parent; the message comes then, too.
    handle._parent_trackable = lambda: None
    return handle


# Operations that call Python functions.
HOST_CALLS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def operation(tensor: Any) -> Any:
    """The operation that makes a tensor, None for an eager tensor."""
    return None if isinstance(tensor, ops.EagerTensor) else tensor.op


def version() -> int:
    """A number that grows with the operations of the graph that is being traced."""
    return 0 if tf.executing_eagerly() else int(tf.compat.v1.get_default_graph().version)


def was_made_since(op: Any, before: int) -> bool:
    """Whether an operation is of the graph that is being traced, and younger than that version."""
    return op.graph is tf.compat.v1.get_default_graph() and bool(op._id > before + 1)


def has_no_gradient(op: Any) -> bool:
    """Whether TensorFlow takes an operation for one without a derivative."""
    if op.type in ("StopGradient", "PreventGradient"):
        return True
    try:
        return ops.get_gradient_function(op) is None
    except LookupError:
        return op.type not in ("PartitionedCall", "StatefulPartitionedCall")


def called_function(op: Any) -> Any:
    """The graph of the function that an operation calls, None if it calls none."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    function = op.graph._get_function(op.get_attr("f").name)
    return getattr(function, "graph", None)


def captured_from(tensor: Any) -> Any:
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


def identity_of(tensor: Any) -> Any:
    """The same for what stands for the same tensor: TensorFlow makes Python objects anew."""
    if isinstance(tensor, tf.Tensor) and not isinstance(tensor, ops.EagerTensor):
        return id(tensor.graph), tensor.name
    return id(tensor)
