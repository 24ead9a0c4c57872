"""Evaluates a function of NumPy arrays for the members of a batch, in order or by an executor."""

import contextlib
import itertools
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from sgtrick._core.types import Array, DTypeLike, Function, Structure
from sgtrick._host import reticulate
from sgtrick._host.contract import Parts, Shape
from sgtrick._host.executors import MainThreadExecutor
from sgtrick._host.hessians import HessianTimes
from sgtrick._host.replies import (
    Reply,
    Results,
    ValueAndGradient,
    count_nonfinite,
    split_shapes,
)

# Returns what an engine returned, perhaps after waiting for it.
Result: TypeAlias = Callable[[], Structure]


class WrongUseError(TypeError):
    """An engine that cannot work at any point as declared, so `on_error` does not apply."""


class Engine:
    """A function of arrays with its derivatives, and how to call it.

    Attributes:
        dtype: The dtype to which floating arguments are cast.
        calls: Number of calls for a value and a gradient.
        hess_calls: Number of calls for second derivatives.
        failures: Number of calls, of either kind, that raised.
        nonfinite: Number of points where the value or an entry of the gradient was not finite.
        seconds: Total wall time of all evaluations.
        has_whole_hessian: Whether the function for second derivatives returns the whole Hessian.
    """

    def __init__(
        self,
        fn: Function,
        grad: Function | None = None,
        *,
        hessp: Function | None = None,
        hess: Function | None = None,
        vectorized: bool,
        broadcasts: bool = False,
        dtype: DTypeLike,
        executor: futures.Executor | None,
        on_error: str | float,
    ) -> None:
        """See `from_numpy`.

        With `broadcasts`, a vectorized engine gets arguments that all members share with batch
        dimensions of size 1; without, it gets views of the common batch shape.
        """
        if hessp is not None and hess is not None:
            raise TypeError("hessp and hess were both given. Pass one of them.")
        self.dtype, self._instead = _floating(dtype), _number(on_error)
        self._functions = [reticulate.as_engine(f) for f in (fn, grad) if f is not None]
        self._hessian = [reticulate.as_engine(f) for f in (hessp, hess) if f is not None]
        self.has_whole_hessian = hess is not None
        self._vectorized, self._broadcasts, self._executor = vectorized, broadcasts, executor
        _check_executor(executor, [*self._functions, *self._hessian])
        self.calls, self.hess_calls, self.failures, self.nonfinite = 0, 0, 0, 0
        self.seconds = 0.0
        self._counting = threading.Lock()
        # TensorFlow calls from any thread, and most engines expect one call at a time; an executor
        # sets its own limit. Reentrant, because an engine may call itself through TensorFlow.
        self._turn: contextlib.AbstractContextManager[object] = (
            threading.RLock() if executor is None else contextlib.nullcontext()
        )
        # A serial executor gets one call at a time, as the engine may reuse its result buffer.
        self._concurrent = executor is not None and not isinstance(executor, MainThreadExecutor)

    def evaluate(self, reply: ValueAndGradient, *arrays: Array) -> list[Array]:
        """Returns the values, the gradients of the leaves that have derivatives, and aux if any.

        Args:
            reply: How to pass the arrays to the engine, and what it must return.
            arrays: The leaves, with equally many batch dimensions, which are broadcast.
        """
        return self._answer(_Asked(reply, self._functions, "calls"), arrays)

    def hessian_times(self, reply: HessianTimes, *arrays: Array) -> list[Array]:
        """Returns the Hessian times a vector, one part for each leaf that has derivatives.

        Args:
            reply: How to pass the arrays to the engine, and what it must return.
            arrays: The leaves, then the parts of the vector, one for each leaf with derivatives.
        """
        return self._answer(_Asked(reply, self._hessian, "hess_calls"), arrays)

    @property
    def has_hessian(self) -> bool:
        """Whether the engine has second derivatives."""
        return bool(self._hessian)

    @property
    def tells_failures(self) -> bool:
        """Whether second derivatives need to know where a number replaced the engine's value."""
        return self.has_hessian and self._instead is not None

    def _answer(self, asked: "_Asked", arrays: Sequence[Array]) -> list[Array]:
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
                    self.nonfinite += asked.nonfinite
                    self.seconds += time.perf_counter() - begin

    def _parts(self, asked: "_Asked", arrays: Sequence[Array]) -> Parts:
        """The results for all members of the batch."""
        reply = asked.reply
        leaves = reply.incoming(arrays, self.dtype)
        batch, events = split_shapes(leaves, reply.event_ndims)
        if not self._vectorized or 0 in batch:
            return self._by_member(asked, arrays, leaves, batch, events)
        whole = leaves
        if not self._broadcasts:
            whole = [_broadcast(a, batch + e) for a, e in zip(leaves, events, strict=True)]
        result = self._started(asked, whole)
        try:
            returned = self._returned(asked, result)
        except _EngineError as failure:
            if self._instead is not None and math.prod(batch) > 1:
                # One bad member must not reject the others. The failed call may have modified
                # `leaves`, so copy them again.
                leaves = reply.incoming(arrays, self.dtype)
                return self._by_member(asked, arrays, leaves, batch, events)
            return self._failed(asked, failure, arrays, batch, events)
        parts = reply.parts(returned, batch, events, whole)
        columns = parts[:-1] if reply.has_aux else parts
        asked.nonfinite = count_nonfinite(columns, batch)
        for k, column in enumerate(columns):
            if column is None:
                parts[k] = np.full(reply.shapes(batch, events)[k], np.nan)
        return parts

    def _by_member(
        self,
        asked: "_Asked",
        arrays: Sequence[Array],
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
        results = Results(reply, batch, events, len(one))
        for i, (member, result) in zip(places, started, strict=True):
            try:
                returned = self._returned(asked, result)
            except _EngineError as failure:
                came = [_of(i, np.asarray(a), s) for a, s in zip(arrays, shared, strict=True)]
                results.put(i, self._failed(asked, failure, came, one, events), failed=True)
            else:
                results.put(i, reply.parts(returned, one, events, member))
        asked.nonfinite = results.nonfinite()
        return results.joined()

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
            raise _EngineError from error

    def _failed(
        self,
        asked: "_Asked",
        failure: "_EngineError",
        member: Sequence[Array],
        batch: Shape,
        events: Sequence[Shape],
    ) -> Parts:
        """The parts that replace those of a failed call; raises if `on_error` is "raise"."""
        asked.failures += 1
        error = failure.__cause__
        assert error is not None
        if self._instead is None:
            raise RuntimeError(_message(asked.reply, member, error)) from error
        return asked.reply.instead(self._instead, batch, events)

    def _started(self, asked: "_Asked", leaves: Sequence[Array]) -> Result:
        """Starts a call if there is an executor; returns a function that returns its result."""
        if len(asked.functions) == 1:
            return self._call(asked, asked.functions[0], leaves)
        # Neither function sees how the other modifies its arguments.
        copies = [a.copy() if a.flags.writeable else a for a in leaves]
        f, grad = asked.functions
        value, gradient = self._call(asked, f, leaves), self._call(asked, grad, copies)
        return lambda: (value(), gradient())

    def _call(self, asked: "_Asked", f: Function, leaves: Sequence[Array]) -> Result:
        arguments = asked.reply.arguments(leaves)
        if self._executor is None:
            return partial(f, *arguments)
        asked.running.append(self._submitted(asked.reply.name, f, arguments))
        return asked.running[-1].result

    def _submitted(
        self, name: str, f: Function, arguments: Sequence[Structure]
    ) -> futures.Future[Structure]:
        assert self._executor is not None
        try:
            return self._executor.submit(f, *arguments)
        except Exception as error:
            raise RuntimeError(_lost(name, error)) from error


class _Asked:
    """One request to an engine: the expected reply, the functions to call, and the counts."""

    def __init__(self, reply: Reply, functions: Sequence[Function], counter: str) -> None:
        self.reply, self.functions, self.counter = reply, functions, counter
        self.running: list[futures.Future[Structure]] = []
        self.calls, self.failures, self.nonfinite = 0, 0, 0


class _EngineError(Exception):
    """An engine raised: `__cause__`."""


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
    why = (
        "A worker has died or could not load the engine, the engine cannot be sent to it, or the "
        "executor is shut down."
    )
    trace = str(error.__cause__)  # the traceback if the pool could not unpickle an answer
    if "loads(" in trace:
        said = [line for line in trace.splitlines() if line.strip("' ")][-1]
        why = (
            f"{said}. The pool is lost because an exception or a result could be pickled by the "
            "worker but not unpickled here. Raise one of Python's built-in exceptions in the "
            "engine, such as ArithmeticError(str(error))."
        )
    return f"{name} got no answer from its executor: {_said(error).rstrip('.')}. {why}"


def _message(reply: Reply, member: Sequence[Array], error: BaseException) -> str:
    show = partial(np.array2string, separator=", ", threshold=100, floatmode="unique")
    given = [
        f"\n  {path} = {show(np.asarray(a))}" for path, a in zip(reply.paths, member, strict=True)
    ]
    return f"{reply.name} raised {_said(error)}{''.join(given)}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _floating(dtype: DTypeLike) -> np.dtype[Any]:
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
