"""Evaluates a function of NumPy arrays for the members of a batch, by turns or by an executor."""

import contextlib
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from functools import partial
from typing import Any

import numpy as np

from sgtrick import _reticulate
from sgtrick._executors import MainThreadExecutor
from sgtrick._replies import Columns, Layout


class Engine:
    """A function of arrays, with its gradient in it or beside it, and how it is to be called.

    Attributes:
        dtype: What floating arguments are cast to.
        calls: How often the function was called.
        failures: How many of these calls raised.
        seconds: Wall time of all evaluations together.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        grad: Callable[..., Any] | None,
        *,
        vectorized: bool,
        dtype: Any,
        executor: Any,
        on_error: Any,
    ) -> None:
        self.dtype, self._instead = _floating(dtype), _number(on_error)
        self._functions = [_reticulate.as_engine(f) for f in (fn, grad) if f is not None]
        self._vectorized, self._executor = vectorized, executor
        _insist_on_executor(executor, self._functions)
        self.calls, self.failures, self.seconds = 0, 0, 0.0
        self._counting = threading.Lock()
        # TensorFlow calls from any thread, and most engines expect one call at a time. An executor
        # says how many it may be. The same thread may come again, from inside the engine.
        self._turn: Any = threading.RLock() if executor is None else contextlib.nullcontext()
        # One that does one thing at a time is given one: the engine may return the same buffer.
        self._at_once = executor is not None and not isinstance(executor, MainThreadExecutor)

    def evaluate(self, layout: Layout, *arrays: Any) -> list[Any]:
        """Returns the values, the gradients by the leaves that have derivatives, and perhaps aux.

        Args:
            layout: What the arrays are.
            arrays: The leaves, all with the same batch dimensions in front.
        """
        leaves = layout.incoming(arrays, self.dtype)
        batch = layout.batch(leaves)
        running: list[futures.Future[Any]] = []
        with self._turn:
            begin = time.perf_counter()
            try:
                if self._vectorized and 0 not in batch:
                    shapes = [batch, *[a.shape for a in leaves]]
                    result = self._started(layout, leaves, running)
                    parts = self._reply(layout, shapes, result, arrays)
                else:
                    parts = self._replies(layout, batch, leaves, arrays, running)
                return layout.outgoing(parts)
            finally:
                for future in running:
                    future.cancel()
                with self._counting:
                    self.seconds += time.perf_counter() - begin

    def _replies(
        self,
        layout: Layout,
        batch: tuple[int, ...],
        leaves: Sequence[Any],
        arrays: Sequence[Any],
        running: list[futures.Future[Any]],
    ) -> list[Any]:
        """Calls the engine for each member of the batch, and joins what comes back."""
        places = list(itertools.product(*map(range, batch)))
        results: Iterable[Callable[[], Any]]
        results = (self._started(layout, _of(i, leaves), running) for i in places)
        if self._at_once:
            results = list(results)
        shapes = [(), *[a.shape[len(batch) :] for a in leaves]]
        columns = Columns(layout, batch, leaves)
        for i, result in zip(places, results, strict=True):
            columns.put(i, self._reply(layout, shapes, result, arrays, i))
        return columns.joined()

    def _reply(
        self,
        layout: Layout,
        shapes: Sequence[tuple[int, ...]],
        result: Callable[[], Any],
        arrays: Sequence[Any],
        i: tuple[int, ...] = (),
    ) -> list[Any]:
        """The parts of what comes back of one call.

        Args:
            layout: What it has to be.
            shapes: Of the value and of the leaves in this call.
            result: Makes the call, or waits for the executor.
            arrays: The leaves of all members as they came, for errors.
            i: Which member it is.
        """
        with self._counting:
            self.calls += 1
        try:
            returned = result()
        except _reticulate.WrongThreadError:
            raise  # no failure of the engine, which was not called
        except Exception as error:
            lost = isinstance(error, (futures.BrokenExecutor, futures.CancelledError))
            if lost and self._executor is not None:
                raise RuntimeError(_LOST.format(layout.name, _said(error))) from error
            with self._counting:
                self.failures += 1
            if self._instead is None:
                came = _of(i, [np.asarray(a) for a in arrays])
                raise RuntimeError(_failed(layout, came, error)) from error
            return layout.instead(self._instead, shapes)
        return layout.parts(returned, shapes)

    def _started(
        self, layout: Layout, member: Sequence[Any], running: list[futures.Future[Any]]
    ) -> Callable[[], Any]:
        """Starts a call if there is an executor; returns what gives its result."""
        own = [member]
        if len(self._functions) > 1:  # neither sees what the other does to its arguments
            own.append([a.copy() for a in member])
        calls: list[Callable[[], Any]] = []
        for f, leaves in zip(self._functions, own, strict=True):
            if self._executor is None:
                calls.append(partial(f, *layout.pack(leaves)))
            else:
                running.append(self._submitted(layout, f, leaves))
                calls.append(running[-1].result)
        return calls[0] if len(calls) == 1 else lambda: tuple(call() for call in calls)

    def _submitted(self, layout: Layout, f: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        try:
            return self._executor.submit(f, *layout.pack(leaves))
        except Exception as error:
            raise RuntimeError(_LOST.format(layout.name, _said(error))) from error


def _of(i: tuple[int, ...], leaves: Sequence[Any]) -> list[Any]:
    """What the engine gets for member `i`: arrays, also where they have no dimensions."""
    return [a[(*i, ...)] for a in leaves]


_LOST = (
    "{} got no answer from its executor: {}. A worker has died or could not load the engine, the "
    "engine cannot be sent to it, or the executor is shut down."
)


def _failed(layout: Layout, member: Sequence[Any], error: Exception) -> str:
    show = partial(np.array2string, separator=", ", threshold=100, floatmode="unique")
    given = [f"\n  {path} = {show(a)}" for path, a in zip(layout.paths, member, strict=True)]
    return f"{layout.name} raised {_said(error)}{''.join(given)}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _floating(dtype: Any) -> Any:
    try:
        found = None if dtype is None else np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    except TypeError:
        found = None
    if found is None or found.kind != "f":
        raise TypeError(
            f"dtype must be a real floating dtype such as 'float64', got {dtype!r}. A complex "
            "argument can be passed as two, its real and its imaginary part."
        )
    return found


def _number(on_error: Any) -> float | None:
    if isinstance(on_error, str) and on_error == "raise":
        return None
    numbers = (int, float, np.integer, np.floating)
    if isinstance(on_error, bool) or not isinstance(on_error, numbers):
        raise ValueError(f"on_error must be 'raise' or a number such as -np.inf, got {on_error!r}.")
    return float(on_error)


def _insist_on_executor(executor: Any, functions: Sequence[Any]) -> None:
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
                f"The engine cannot be sent to the processes of the executor: {_said(error)}. "
                "Define it at the top level of a module, without a lambda or closure; or use a "
                "ThreadPoolExecutor."
            ) from error
