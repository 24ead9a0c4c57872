"""Tapes and accumulators: what they record, and which gradients were requested."""

import concurrent.futures
import contextlib
import ctypes
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, execute, forwardprop_util, record
from tensorflow.python.framework import composite_tensor_gradient, ops
from tensorflow.python.ops import custom_gradient, resource_variable_ops

from sgtrick._arguments.scopes import outside, scope
from sgtrick._arguments.structures import ORIGIN, dense, is_differentiable
from sgtrick._tensorflow import graphs, passing
from sgtrick._types import Gradient, Graph, Pullback, Pushforward, Tangent, Tensor, Variable

T = TypeVar("T")


def somebody_records() -> bool:
    """Whether a tape or an accumulator is active, so that eager operations must be recorded."""
    return bool(record.could_possibly_record())


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether a tape or an accumulator has recorded one of some eager tensors."""
    return bool(record.should_record_backprop(list(tensors))) or is_pushed(tensors)


def is_pushed(tensors: Sequence[Tensor]) -> bool:
    """Whether an accumulator knows a tangent of one of some eager tensors."""
    try:
        return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)
    except AttributeError:  # there is one, and it cannot be packed: it is slices
        return True


def tangents_of(t: Tensor) -> Sequence[Tensor]:
    """The tangents of a tensor that accumulators know, but for `tf.IndexedSlices`."""
    with contextlib.suppress(AttributeError):
        return forwardprop_util.pack_tangents([t]).tangents  # type: ignore[no-any-return]
    return ()


def somebody_pushes() -> bool:
    """Whether an accumulator is active."""
    return bool(forwardprop_util.pack_tangents([]).indices)


def not_recording() -> contextlib.AbstractContextManager[None]:
    """A scope in which no tape and no accumulator sees operations."""
    return record.stop_recording()  # type: ignore[no-any-return]


def recording() -> contextlib.AbstractContextManager[None]:
    """A scope in which tapes record, even if TensorFlow has suspended them.

    `tf.recompute_grad` runs functions while recording is suspended. A rule that is traced there may
    use a tape of its own, which would record nothing.
    """
    is_suspended = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    return _resumed() if is_suspended else contextlib.nullcontext()


@contextlib.contextmanager
def _resumed() -> Iterator[None]:
    pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def record_override(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], pull: Pullback, push: Pushforward
) -> None:
    """Tells all tapes and accumulators the derivatives of `outputs` with respect to `inputs`.

    Args:
        outputs: Tensors that have not been recorded.
        inputs: Tensors.
        pull: From one upstream gradient for each output to one gradient or None for each input.
        push: From one tangent for each input, None for those without derivatives, to one tangent
            or None for each output.
    """

    def push_dense(*tangents: Gradient) -> Sequence[Tangent]:
        return push(*map(dense, tangents))  # behind sums of segments they are slices

    record.record_operation("sgtrick", list(outputs), list(inputs), pull, push_dense)
    for operations in _LISTS.get():
        operations.append(Operation("sgtrick", inputs, outputs))


class Operation(NamedTuple):
    """An eager operation.

    Attributes:
        type: The type, or the name of a function.
        inputs: Its inputs.
        outputs: Its outputs.
        read: The trainable variables that have been read since the operation before.
    """

    type: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    read: Sequence[Variable] = ()


_LISTS: ContextVar[tuple[list[Operation], ...]] = ContextVar("_LISTS", default=())


@contextlib.contextmanager
def listing_operations() -> Iterator[list[Operation]]:
    """A scope that yields the eager operations in it, as they run."""
    operations: list[Operation] = []

    def note(  # as TensorFlow calls it
        op_type: str | bytes,
        inputs: Sequence[Tensor],
        attrs: object,  # noqa: ARG001
        outputs: Sequence[Tensor],
        op_name: str | None = None,  # noqa: ARG001
        graph: Graph | None = None,
    ) -> None:
        if graph is None:
            type_ = tf.compat.as_str(op_type)
            covered = _covered_by_custom_gradient() if type_ == "Identity" else ()
            # Copies: TensorFlow clears a list of outputs as a tf.TensorArray made of it is read.
            read = watcher.watched_variables()
            with recording():  # suspended around the call of a function
                if not (read or is_recorded([*inputs, *covered])):
                    return  # and not kept in memory
            passing.connected(type_)  # functions may be gone afterwards, such as those of maps
            operations.append(Operation(type_, (*inputs, *covered), tuple(outputs), read))
            if read:  # start anew
                watcher.__exit__(None, None, None)
                watcher.__enter__()

    # `op_callbacks` would switch off the callbacks of all threads as the last one of this thread is
    # removed. Without any, `execute_with_callbacks` does what `execute` does.
    execute.execute = execute.execute_with_callbacks
    context.context().add_op_callback(note)
    try:
        with record.VariableWatcher() as watcher, scope(_LISTS, (*_LISTS.get(), operations)):
            yield operations
    finally:
        context.context().remove_op_callback(note)


def _covered_by_custom_gradient() -> list[Tensor]:
    """The arguments of the `tf.custom_gradient` that makes an output by the operation, if any.

    In eager execution, its outputs are copies of its function's results. TensorFlow tells tapes
    what they depend on, and nobody else. It is in the stack frame of the decorator.
    """
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code is custom_gradient._eager_mode_decorator.__code__:
            # Not there yet while the function itself runs.
            arguments = (getattr(a, "handle", a) for a in frame.f_locals.get("flat_args", ()))
            return [a for a in arguments if isinstance(a, tf.Tensor)]
        frame = frame.f_back
    return []


@contextlib.contextmanager
def watching_variables() -> Iterator[Callable[[], list[Variable]]]:
    """A scope that yields a function: the trainable variables that have been read in it.

    In the order in which they were created. A tape that records operations would make TensorFlow
    trace the gradients of all loops at once, and these store every iterate; and it would hide from
    accumulators that a branch reads a variable.
    """
    # Without any tape, calls of functions would not tell what they read.
    needs_tape = not somebody_records()
    tape = tf.GradientTape(watch_accessed_variables=False) if needs_tape else None
    with tape or contextlib.nullcontext(), record.VariableWatcher() as watcher:
        yield lambda: list(watcher.watched_variables())


def watch(tape: tf.GradientTape, tensors: Sequence[Tensor]) -> None:
    """Watches tensors, and those that represent them in the graph that is being traced.

    If the graph captured them before, the tape has not seen it.
    """
    tape.watch(tensors)
    for t in tensors:
        inner = graphs.as_used(t)
        if inner is not t:
            record_override([inner], [t], lambda u: [u], lambda t: [t])


def in_thread(f: Callable[[], T]) -> T:
    """Calls a function where no tape and no accumulator is active, and all else is as here.

    While an accumulator computes a JVP, it silences all tapes that were started after it. Nobody
    but who started it can leave it, and TensorFlow keeps the active ones for each thread. So the
    function runs in another thread. It is or calls the caller's code, so it has the context
    variables of this one, and the variables that it reads count as read here. It has the
    `threading.local` data of this one too, but from Python 3.13 on, and elsewhere than in CPython,
    `threading.local` objects are empty there.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    context, data = outside(), _thread_data()

    def run() -> tuple[T, Sequence[Variable]]:
        own = _thread_data()
        own.update(data)
        # TensorFlow knows for each thread by itself whether it is executing eagerly.
        in_graph = contextlib.nullcontext() if graph is None else graph.as_default()
        try:
            with record.VariableWatcher() as watcher, in_graph:
                return context.run(f), watcher.watched_variables()
        finally:
            data.update(own)  # what was used for the first time

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        result, read = thread.submit(run).result()
    for variable in read:
        resource_variable_ops.variable_accessed(variable)
    return result


_get_dict: Callable[[], int] | None = None
# Since Python 3.13 each object keeps its data itself, by a key that only the thread has.
if sys.version_info < (3, 13) and hasattr(ctypes, "pythonapi"):
    _get_dict = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))


def _thread_data() -> dict[object, object]:
    """Where CPython before 3.13 keeps what `threading.local` objects hold in this thread."""
    if _get_dict is None:
        return {}
    found: dict[object, object] = ctypes.cast(_get_dict(), ctypes.py_object).value
    return found


def tapes_are_silenced() -> bool:
    """Whether a new tape would record nothing, because an accumulator is computing a JVP."""
    a, b = _ends()
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(a)
        record.record_operation("sgtrick", [b], [a], lambda upstream: [upstream])
        return not record.should_record_backprop([b])


@functools.cache
def _ends() -> tuple[Tensor, Tensor]:
    with tf.init_scope():
        return tf.constant(0.0), tf.constant(0.0)


def unrecorded(x: Tensor) -> Tensor:
    """The value of a tensor, which no tape and no accumulator connects to the tensor."""
    if tf.executing_eagerly() and not context.is_custom_device(x.device):  # such as a DTensor's
        # Another object for the same memory: an operation takes several times as long.
        return x._copy_to_device(x.backing_device)
    with not_recording():
        return tf.raw_ops.StopGradient(input=x)


def own_copy(x: Tensor) -> Tensor:
    """A copy of `x` as an argument of one call, with its derivatives.

    The function may get the same tensor as another argument too, or close over it. What a gradient
    depends on through this argument alone is what it depends on through the copy.
    """
    if not tf.executing_eagerly():
        # TensorFlow's gradient of a loop looks through an Identity, but not through a Cast. The
        # static value is known through both.
        return tf.raw_ops.Cast(x=x, DstT=x.dtype)
    if not is_recorded([x]):
        return x
    copy = unrecorded(x)
    record_override([copy], [x], lambda u: [u], lambda t: [t])
    setattr(copy, ORIGIN, x)
    return copy


def pushed_alone(tensors: Sequence[Tensor]) -> bool:
    """Whether one accumulator knows tangents of some tensors, and nobody differentiates these."""
    is_one = len(forwardprop_util.pack_tangents([]).indices) == 1 and is_pushed(tensors)
    return is_one and pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors)) == 1


def unpushed(x: Tensor) -> Tensor:
    """A copy of `x` that tapes connect with it, and accumulators do not."""
    with not_recording():
        copy = tf.raw_ops.Cast(x=x, DstT=x.dtype)
    record.record_operation_backprop_only("sgtrick", [copy], [x], lambda u: [u])
    return copy


def read(handle: Tensor) -> Tensor:
    """The value of the variable with this handle, recorded with respect to the handle itself.

    A graph may have captured the handle before a tape was there to record it. Accumulators watch
    what it was captured as.
    """
    handle = graphs.as_used(handle)
    with not_recording():
        value = graphs.read(handle)
    record_override([value], [handle], lambda u: [u], lambda t: [t])
    return value


def value_of(t: Tensor) -> Tensor:
    """The value of a variable with this handle, as `read` returns it; any other tensor itself."""
    return read(graphs.outside(t)) if t.dtype == tf.resource else t


def asked_for(x: Tensor) -> bool:
    """Whether the tape that is calling a pullback was asked for the gradient with respect to `x`.

    Or with respect to what `x` is a copy or the value of. A tape calls pullbacks on all paths from
    its target, whether or not they lead to a source, and does not tell pullbacks its sources. They
    are in the stack frame of `GradientTape.gradient`.
    """
    return any(t is s for t in _origins(x) for s in _sources())


def asked_only_for(xs: Sequence[Tensor], *, is_of_graph: bool) -> bool:
    """Whether it was asked for gradients with respect to some of `xs` and to nothing else.

    If what it differentiates is an operation of a graph (`is_of_graph`), only if the tape belongs
    to the graph that is being traced: the gradient of another function is kept for whoever asks
    later.
    """
    known = {id(t) for x in xs for t in _origins(x)}
    sources = _sources()
    if is_of_graph:
        here = tf.compat.v1.get_default_graph()
        if not all(graphs.operation(s) is not None and s.graph is here for s in sources):
            return False
    return bool(sources) and all(id(s) in known for s in sources)


def _sources() -> list[Tensor]:
    """The tensors, and the handles of variables, that the tape was asked for."""
    frame = _request()
    sources = (
        composite_tensor_gradient.get_flat_tensors_for_gradients(
            tf.nest.flatten(frame.f_locals["sources"])
        )
        if frame
        else []
    )
    return [getattr(s, "handle", s) for s in sources]


def oldest(xs: Sequence[Tensor]) -> int:
    """The number of the oldest of some eager tensors, and of what they are copies or values of.

    And of the eager tensors that the tape was asked for, which they may be made of.
    """
    asked = [s for s in _sources() if graphs.operation(s) is None]
    return min(int(ops.tensor_id(t)) for t in (*asked, *(o for x in xs for o in _origins(x))))


def _origins(x: Tensor | Variable) -> Iterator[Tensor]:
    """Yields an eager tensor, what it is a copy or the value of, and so on."""
    while x is not None:
        yield getattr(x, "handle", x)
        x = getattr(x, ORIGIN, None)


NAN_WARNING = "A gradient is NaN, since it depends on an unknown one."


def warn_of_nan(message: str) -> None:
    """Warns with this message if the gradient that a tape is computing comes out as NaN.

    Whether a path leads to a source is not known in a pullback, but when
    `GradientTape.gradient` returns. Python tells that to a profiler alone.
    """
    frame, before = _request(), sys.getprofile()
    if frame is None or getattr(before, "func", None) is _at_return:
        return
    if before is None:
        sys.setprofile(functools.partial(_at_return, frame, message))
    else:  # the caller's own profiler
        _warn(message)


def _at_return(
    frame: types.FrameType, message: str, current: types.FrameType, event: str, returned: Any
) -> None:
    """What Python calls as a profiler until this frame returns."""
    if current is frame and event == "return":
        sys.setprofile(None)
        if _has_nan(returned):
            _warn(message)


def _warn(message: str) -> None:
    # By the caller of `GradientTape.gradient`, where `_at_return` is what it calls last.
    warnings.warn(f"{NAN_WARNING} {message}", RuntimeWarning, stacklevel=4)


def _has_nan(gradients: Any) -> bool:
    found = [t for t in tf.nest.flatten(gradients, expand_composites=True) if t is not None]
    with not_recording():
        return any(tf.reduce_any(tf.not_equal(t, t)) for t in found if is_differentiable(t.dtype))


def _request() -> types.FrameType | None:
    """The stack frame of the `GradientTape.gradient` that is calling a pullback."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not tf.GradientTape.gradient.__code__:
        frame = frame.f_back
    return frame
