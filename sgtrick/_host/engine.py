"""Evaluates a function of NumPy arrays for the members of a batch, in order or by an executor."""

import contextlib
import functools
import itertools
import math
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, structures
from sgtrick._host import reticulate
from sgtrick._host.contract import Parts, Shape
from sgtrick._host.executors import MainThreadExecutor
from sgtrick._host.replies import Evaluation, Product, Reply
from sgtrick._types import Args, Array, DTypeLike, Function, Structure

# Returns what an engine returned, perhaps after waiting for it.
Result: TypeAlias = Callable[[], Structure]


class WrongUseError(TypeError):
    """An engine that cannot work at any point as declared, so `on_error` does not apply."""


# Mistakes in the code of an engine, to which it does not apply either.
_MISTAKES = (NameError, AttributeError, ImportError, SyntaxError)


class Functions(NamedTuple):
    """A function of arrays and its derivatives, as arguments of `from_numpy`; None if not given."""

    fn: Any  # a class or static method cannot be called, so it is no Function
    grad: Any = None
    vjp: Any = None
    jvp: Any = None
    hessp: Any = None
    hess: Any = None

    def of(self, instance: object, owner: type | None) -> "Functions":
        """The functions bound to `instance`; for class methods, `instance` is `owner`."""

        def bind(f: Any) -> Any:
            # Ask the type: a bound method instance exposes the __get__ of its function. Python
            # 3.13 warns that partials will become methods; here they remain what they are.
            binds = hasattr(type(f), "__get__") and not isinstance(f, functools.partial)
            return f.__get__(instance, owner) if binds else f

        return Functions(*map(bind, self))


class Options(NamedTuple):
    """How to call the engine: the arguments of `from_numpy` with these names."""

    vectorized: bool
    dtype: DTypeLike
    executor: futures.Executor | None
    on_error: str | float
    event_ndims: int | Structure
    has_aux: bool
    name: str | None
    value_shape: Structure = ()  # None if the framework finds it


class Engine:
    """A function of arrays with its derivatives, and how to call it.

    Attributes:
        dtype: The dtype to which floating arguments are cast.
        schemes: The names of finite differences, by the arguments that have them.
        calls: Number of calls for a value and, if it comes with the value, a gradient.
        vjp_calls: Number of calls of `vjp`.
        jvp_calls: Number of calls of `jvp`.
        hess_calls: Number of calls for second derivatives.
        failures: Number of calls, of any kind, that raised.
        nonfinite: Number of points where the value or an entry of the gradient was not finite.
        seconds: Total wall time of all evaluations.
    """

    def __init__(self, functions: Functions, options: Options, *, broadcasts: bool) -> None:
        """See `from_numpy`.

        With `broadcasts`, a vectorized engine gets arguments that all members share with batch
        dimensions of size 1; without, it gets views of the common batch shape.
        """
        executor = options.executor
        self.dtype, self._instead = floating(options.dtype), _number(options.on_error)
        stated = {key: f for key, f in functions._asdict().items() if f is not None}
        self._has_no_gradient = stated.get("grad") is False
        if self._has_no_gradient:
            del stated["grad"]
        _check_functions(stated, self._has_no_gradient)
        self.schemes = {key: f for key, f in stated.items() if isinstance(f, str)}
        given = {
            key: reticulate.as_engine(f) for key, f in stated.items() if key not in self.schemes
        }
        self._functions = [f for key, f in given.items() if key in ("fn", "grad")]
        self._products = {key: given[key] for key in _COUNTERS if key in given}
        self._vectorized, self._broadcasts = options.vectorized, broadcasts
        self._executor = executor
        _check_executor(executor, list(given.values()))
        self.calls, self.vjp_calls, self.jvp_calls, self.hess_calls = 0, 0, 0, 0
        self.failures, self.nonfinite, self.seconds = 0, 0, 0.0
        self._has_warned = False
        self._callable = set[tuple[int, int]]()  # functions, with how many arguments
        self._counting = threading.Lock()
        # TensorFlow calls from any thread, and most engines expect one call at a time; an executor
        # sets its own limit. Reentrant, because an engine may call itself through TensorFlow.
        self._turn: contextlib.AbstractContextManager[object] = (
            threading.RLock() if executor is None else contextlib.nullcontext()
        )
        # A serial executor gets one call at a time: after a failure, the rest is not wanted.
        self._concurrent = executor is not None and not isinstance(executor, MainThreadExecutor)

    def evaluate(
        self, reply: Evaluation, *arrays: Array | bytes, counter: str = "calls"
    ) -> list[Array]:
        """Returns the values, gradients of the leaves that have derivatives, and what it tells.

        Args:
            reply: How to pass the arrays to the engine, and what it must return.
            arrays: The leaves, with equally many batch dimensions, which are broadcast.
            counter: The attribute that counts these calls.
        """
        return self._answer(_Asked(reply, self._functions, counter, reply.name), arrays)

    def product(
        self, argument: str, reply: Product, *arrays: Array | bytes, counter: str | None = None
    ) -> list[Array]:
        """Returns a product with a derivative.

        Args:
            argument: The argument of `from_numpy` with the function that returns it.
            reply: How to pass the arrays to the function, and what it must return.
            arrays: The leaves, then those of what the product is with.
            counter: The attribute that counts these calls, if not that of the argument.
        """
        functions, what = [self._products[argument]], f"{argument} of {reply.name}"
        counter = counter or _COUNTERS[argument]
        return self._answer(_Asked(reply, functions, counter, what), arrays)

    def note_nonfinite(self, parts: Parts, failed: Array) -> None:
        """Counts the batch members for which a part is not finite, except failed ones."""
        with self._counting:
            self.nonfinite += _count_nonfinite(
                parts, failed.shape, list(map(tuple, np.argwhere(failed)))
            )

    def gives(self, argument: str) -> bool:
        """Whether a function, or finite differences, were given as this argument."""
        return argument in self._products or argument in self.schemes

    @property
    def gives_hessian(self) -> bool:
        """Whether second derivatives can be had."""
        return self.gives("hessp") or self.gives("hess")

    @property
    def gives_gradient(self) -> bool:
        """Whether the gradient comes with the value."""
        return not (self.gives("vjp") or self.gives("jvp") or self._has_no_gradient)

    @property
    def tells_failures(self) -> bool:
        """Whether derivatives on request need to know where a number replaced the value."""
        return (bool(self._products) or "hess" in self.schemes) and self._instead is not None

    def _answer(self, asked: "_Asked", arrays: Sequence[Array | bytes]) -> list[Array]:
        """The results as arrays for TensorFlow; updates the counters."""
        with self._turn:
            begin = time.perf_counter()
            try:
                return asked.reply.outgoing(self._parts(asked, arrays))
            finally:
                for future in asked.running:
                    future.cancel()
                with self._counting:
                    setattr(self, asked.counter, getattr(self, asked.counter) + asked.calls)
                    self.failures += asked.failures
                    self.nonfinite += asked.nonfinite * asked.reply.counts_nonfinite
                    self.seconds += time.perf_counter() - begin

    def _parts(self, asked: "_Asked", arrays: Sequence[Array | bytes]) -> Parts:
        """The results for all members of the batch."""
        reply = asked.reply
        leaves = reply.incoming(arrays, self.dtype)
        batch, events = _split_shapes(leaves, reply.event_ndims)
        if not self._vectorized or 0 in batch:
            return self._by_member(asked, arrays, leaves, batch, events)
        whole = leaves
        if not self._broadcasts:
            whole = [_broadcast(a, batch + e) for a, e in zip(leaves, events, strict=True)]
        result = self._started(asked, whole)
        try:
            returned = self._returned(asked, result)
        except _EngineError as failure:
            if self._replaces(failure) and math.prod(batch) > 1:
                # One bad member must not reject the others. The failed call may have modified
                # `leaves`, so copy them again.
                leaves = reply.incoming(arrays, self.dtype)
                return self._by_member(asked, arrays, leaves, batch, events)
            self._failed(asked, failure, arrays)
            return self._filled(reply, batch, events)
        parts = reply.parts(returned, batch, events, whole)
        known = parts[:-1] if reply.has_aux else parts
        asked.nonfinite = _count_nonfinite(known, batch)
        if any(part is None for part in parts):
            shapes = reply.shapes(batch, events, parts, len(batch))
            filled = zip(parts, shapes, strict=True)
            parts = [np.full(shape, np.nan) if p is None else p for p, shape in filled]
        return parts

    def _by_member(
        self,
        asked: "_Asked",
        arrays: Sequence[Array | bytes],
        leaves: Sequence[Any],
        batch: Shape,
        events: Sequence[Shape],
    ) -> Parts:
        """Calls the engine for each member of the batch, and joins the results.

        A vectorized engine is called with batches of one.
        """
        reply, one = asked.reply, (1,) * len(batch) if self._vectorized else ()
        shared = [a.shape != batch + event for a, event in zip(leaves, events, strict=True)]
        plain = not (one or any(shared))

        def start(i: Shape) -> tuple[list[Array], Result]:
            if plain:  # a fast path for the usual case
                member = [a[(*i, ...)] for a in leaves]
            else:
                member = [_of(i, *a, len(one)) for a in zip(leaves, shared, strict=True)]
            return member, self._started(asked, member)

        places = list(itertools.product(*map(range, batch)))
        started: Iterable[tuple[list[Array], Result]] = map(start, places)
        if self._concurrent:
            started = list(started)
        columns: Parts = []
        failed: list[Shape] = []
        unknown: set[int] = {len(reply.dtypes) - 1} if reply.has_aux else set()
        for i, (member, result) in zip(places, started, strict=True):
            try:
                returned = self._returned(asked, result)
            except _EngineError as failure:
                came = [_of(i, np.asarray(a), s) for a, s in zip(arrays, shared, strict=True)]
                self._failed(asked, failure, came)
                failed.append(i)
                continue
            parts = reply.parts(returned, one, events, member)
            if not columns:
                columns = self._filled(reply, batch, events, parts, len(one))
            elif reply.unstated:
                reply.check_same(parts, len(one), columns, batch)
            for k, (column, part) in enumerate(zip(columns, parts, strict=True)):
                if part is None:
                    unknown.add(k)
                    part = np.nan
                column[(*i, ...)] = part
        columns = columns or self._filled(reply, batch, events)
        known = [column for k, column in enumerate(columns) if k not in unknown]
        asked.nonfinite = _count_nonfinite(known, batch, failed)
        return columns

    def _filled(
        self,
        reply: Reply,
        batch: Shape,
        events: Sequence[Shape],
        like: Sequence[Any] = (),
        ndims: int = 0,
    ) -> Parts:
        """The parts if all calls fail. float64 holds results of any dtype until all have come."""
        numbers = reply.instead(np.nan if self._instead is None else self._instead)
        return list(map(np.full, reply.shapes(batch, events, like, ndims), numbers))

    def _returned(self, asked: "_Asked", result: Result) -> Structure:
        """The result of one call.

        Args:
            asked: The request that the call belongs to.
            result: Makes the call, or waits for the executor.

        Raises:
            _EngineError: The engine raised.
            RuntimeError: The executor did not answer.
        """
        asked.calls += 1
        try:
            return result()
        except (reticulate.WrongThreadError, WrongUseError):
            raise  # not a failure at this point: the engine could not be called, or never works
        except Exception as error:
            lost = isinstance(error, (futures.BrokenExecutor, futures.CancelledError))
            if lost and self._executor is not None:
                raise RuntimeError(_lost(asked.reply.name, error)) from error
            raise _EngineError(error) from error

    def _failed(
        self, asked: "_Asked", failure: "_EngineError", member: Sequence[Array | bytes]
    ) -> None:
        """Counts a failed call; raises unless a number replaces its value."""
        asked.failures += 1
        message = _message(asked, member, failure.error)
        if not self._replaces(failure):
            raise RuntimeError(message) from failure.error
        if not self._has_warned:
            self._has_warned = True
            code = getattr(asked.functions[0], "__code__", None)
            place = (code.co_filename, code.co_firstlineno) if code else (asked.what, 0)
            warnings.warn_explicit(f"{_REPLACES} {message}", RuntimeWarning, *place)

    def _replaces(self, failure: "_EngineError") -> bool:
        """Whether `on_error` replaces what the engine would have returned."""
        return self._instead is not None and not isinstance(failure.error, _MISTAKES)

    def _started(self, asked: "_Asked", leaves: Sequence[Array]) -> Result:
        """Starts a call if there is an executor; returns a function that returns its result."""
        if len(asked.functions) == 1:
            return self._call(asked, asked.functions[0], leaves)
        # Neither function sees how the other modifies its arguments.
        copies = [a.copy() if a.flags.writeable else a for a in leaves]
        f, grad = asked.functions
        value, gradient = self._call(asked, f, leaves), self._call(asked, grad, copies)
        return lambda: (_own(value()), gradient())

    def _call(self, asked: "_Asked", f: Function, leaves: Sequence[Array]) -> Result:
        arguments = asked.reply.arguments(leaves)
        if (id(f), len(arguments)) not in self._callable:
            _check_arguments(asked, f, arguments)
            self._callable.add((id(f), len(arguments)))
        if self._executor is None:
            return partial(f, *arguments)
        asked.running.append(self._submitted(asked.reply.name, f, arguments))
        return asked.running[-1].result

    def _submitted(
        self, name: str, f: Function, arguments: Sequence[Structure]
    ) -> futures.Future[Structure]:
        assert self._executor is not None
        try:
            return self._executor.submit(_Owning(f), *arguments)
        except Exception as error:
            raise RuntimeError(_lost(name, error)) from error


class _Asked:
    """One request to an engine: the expected reply, the functions to call, and the counts."""

    def __init__(
        self, reply: Reply, functions: Sequence[Function], counter: str, what: str
    ) -> None:
        self.reply, self.functions, self.counter, self.what = reply, functions, counter, what
        self.running: list[futures.Future[Structure]] = []
        self.calls, self.failures, self.nonfinite = 0, 0, 0


class _EngineError(Exception):
    """An engine raised an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


_REPLACES = "on_error replaces the first failure. All are counted, in `failures`."


class _Owning:
    """A function whose results are copied by its worker, before that makes the next call.

    The function may return the same array each time. A worker in another process gets the function
    itself: its results are copied on the way here, and it need not have this library.
    """

    def __init__(self, f: Function) -> None:
        self._f, self.__name__ = f, calls.name_of(f)  # the name is shown by clusters

    def __call__(self, *arguments: Structure) -> Structure:
        return _own(self._f(*arguments))

    def __reduce__(self) -> Args:
        return partial, (self._f,)


def _own(returned: Structure) -> Structure:
    """The same numbers in memory of our own, as far as these are numbers."""
    if returned is None or isinstance(returned, (float, int)):
        return returned
    if isinstance(returned, np.ndarray):
        return returned.copy()
    is_structure = isinstance(returned, (tuple, list, Mapping)) or structures.is_object(returned)
    if is_structure:  # for tf.nest, buffers such as memoryview are structures too
        return tf.nest.map_structure(_own, returned)
    with contextlib.suppress(Exception):  # what is no array will be refused
        array = np.array(returned)
        return array if array.dtype.kind in "fiu" else returned
    return returned


def _check_arguments(asked: _Asked, f: Function, arguments: Sequence[Structure]) -> None:
    signature = calls.signature_of(f)
    try:
        if signature is not None:
            signature.bind(*arguments)
    except TypeError as error:
        raise WrongUseError(
            f"{asked.what} is called with {len(arguments)} arguments by position, but "
            f"{calls.name_of(f)}{signature} does not take them: {error}."
        ) from None


def _count_nonfinite(parts: Parts, batch: Shape, but: Sequence[Shape] = ()) -> int:
    """The number of batch members for which a known part is not finite.

    Args:
        parts: Arrays; None for unknown ones.
        batch: The batch shape.
        but: Members that are not counted.
    """
    bad: Array | None = None
    for part in parts:
        if part is not None:
            finite = np.isfinite(part)
            if np.count_nonzero(finite) < finite.size:
                bad = np.zeros(batch, bool) if bad is None else bad
                bad |= ~finite.reshape((*batch, -1)).all(-1)
    if bad is None:
        return 0
    for i in but:
        bad[i] = False
    return int(np.count_nonzero(bad))


def _split_shapes(leaves: Sequence[Array], event_ndims: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """The batch shape to which the leaves broadcast, and their shapes without batch."""
    fronts, events = [], []
    for a, n in zip(leaves, event_ndims, strict=True):
        front = a.ndim - n
        fronts.append(a.shape[:front])
        events.append(a.shape[front:])
    if not fronts or all(shape == fronts[0] for shape in fronts[1:]):
        return fronts[0] if fronts else (), events
    return np.broadcast_shapes(*fronts), events


def _broadcast(a: Array, shape: Shape) -> Array:
    """`a`, or a read-only view of it that takes no memory."""
    return a if a.shape == shape else np.broadcast_to(a, shape)


def _of(i: Shape, a: Any, shared: bool, ones: int = 0) -> Array:
    """The part of a leaf for member `i`, always an array, even without dimensions.

    A shared leaf is copied, so that each member may modify its own copy. `ones` is the number of
    leading dimensions of size 1 to add, as a batch of one.
    """
    if shared:
        i = tuple(k if n > 1 else 0 for k, n in zip(i, a.shape, strict=False))
    own: Array = a[(*i, ...)]
    own = own.copy() if shared else own
    return own.reshape((1,) * ones + own.shape) if ones else own


def _lost(name: str, error: BaseException) -> str:
    """The message for an executor that did not answer."""
    # A pool that cannot unpickle an answer tells why in the traceback that is its cause.
    cause = f"\n{error.__cause__}" if error.__cause__ else ""
    return (
        f"{name} got no answer from its executor: {_said(error).rstrip('.')}. A worker has died or "
        "could not load the engine, the engine cannot be sent to it, the executor is shut down, or "
        "an exception or a result could be pickled by the worker but not unpickled here: raise one "
        f"of Python's built-in exceptions, such as ArithmeticError(str(error)).{cause}"
    )


def _message(asked: _Asked, member: Sequence[Array | bytes], error: BaseException) -> str:
    show = partial(np.array2string, separator=", ", threshold=100, floatmode="unique")
    paths = asked.reply.paths
    given = [f"\n  {path} = {show(np.asarray(a))}" for path, a in zip(paths, member, strict=True)]
    return f"{asked.what} raised {_said(error)}{''.join(given)}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def floating(dtype: DTypeLike) -> np.dtype[Any]:
    """The dtype in which an engine computes, checked."""
    try:
        found = None if dtype is None else np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    except TypeError:
        found = None
    if found is None or found.kind != "f":
        raise TypeError(
            f"dtype must be a real floating dtype such as 'float64', got {dtype!r}. Pass a complex "
            "argument as two, its real and its imaginary part."
        )
    return found


COUNTERS = ["calls", "vjp_calls", "jvp_calls", "hess_calls", "failures", "nonfinite", "seconds"]

# The arguments of `from_numpy` with functions that return a product, and what counts their calls.
_COUNTERS = {
    "vjp": "vjp_calls",
    "jvp": "jvp_calls",
    "hessp": "hess_calls",
    "hess": "hess_calls",
}


# Finite differences, by their names in SciPy: the power of eps in the step, and the directions of
# the steps; see differences.py.
SCHEMES = {"2-point": (1 / 2, (1,)), "3-point": (1 / 3, (1, -1))}


def _check_functions(given: dict[str, Any], has_no_gradient: bool) -> None:
    for argument, f in given.items():
        if isinstance(f, str) and argument in ("grad", "hess"):
            if f not in SCHEMES:
                raise ValueError(
                    f"{argument} must be a function, or one of {list(SCHEMES)}, got {f!r}."
                )
        elif not callable(f):
            raise TypeError(f"{argument} must be a function, got {type(f).__name__}.")
    for one, other, why in _EXCLUSIVE:
        if one in given and other in given:
            raise TypeError(f"{one} and {other} were both given. {why}")
    if has_no_gradient:
        for argument in ("vjp", "hessp", "hess"):
            if argument in given:
                raise TypeError(f"grad=False says that there is no gradient: leave out {argument}.")
    scheme = given.get("hess")
    if isinstance(scheme, str) and isinstance(given.get("grad"), str):
        raise TypeError(
            f"hess={scheme!r} takes differences of the gradient, which must be accurate: those of "
            f"grad={given['grad']!r} would be noise. Pass a function for the gradient, or leave "
            "hess out."
        )
    if isinstance(scheme, str) and "jvp" in given and "vjp" not in given:
        raise TypeError(f"hess={scheme!r} takes differences of the gradient: pass vjp= too.")


_ONE = "Pass one of them."
_EXCLUSIVE = [
    ("hessp", "hess", _ONE),
    ("grad", "vjp", _ONE),
    ("grad", "jvp", "grad gives all first derivatives: leave jvp out."),
]


def _number(on_error: object) -> float | None:
    if isinstance(on_error, str) and on_error == "raise":
        return None
    numbers = (int, float, np.integer, np.floating)
    if isinstance(on_error, bool) or not isinstance(on_error, numbers):
        raise ValueError(f"on_error must be 'raise' or a number such as -np.inf, got {on_error!r}.")
    return float(on_error)


def _check_executor(executor: futures.Executor | None, functions: Sequence[Function]) -> None:
    if executor is not None and not isinstance(executor, futures.Executor):
        raise TypeError(
            "executor must be a concurrent.futures.Executor, for example ThreadPoolExecutor(), or "
            f"None, got {executor!r}."
        )
    if isinstance(executor, futures.ProcessPoolExecutor):
        try:
            pickle.dumps(functions)
        except Exception as error:
            raise TypeError(
                f"executor is a process pool, to which the engine cannot be sent: {_said(error)}. "
                "Define it at the top level of a module, not as a lambda or closure; or use a "
                "ThreadPoolExecutor."
            ) from error
