"""An executor for engines that may only be called from the thread that created them."""

import concurrent.futures
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from sgtrick._host import reticulate
from sgtrick._types import Args, Function, Kwargs

T = TypeVar("T")


class MainThreadExecutor(concurrent.futures.Executor):
    """Runs submitted work on the thread that created the executor.

    TensorFlow calls the host functions of a `tf.function` from its own threads. R closures,
    embedded interpreters, GUI toolkits and MPI codes may only be called from the thread that they
    live on, and hang or abort elsewhere. So `run` swaps the threads: the computation runs on a
    worker thread, and this thread serves the engine calls that the computation submits.

        >>> import threading
        >>> import sgtrick
        >>> executor = sgtrick.MainThreadExecutor()
        >>> def engine(x):
        ...     return x + 1, threading.current_thread() is threading.main_thread()
        >>> executor.run(lambda: executor.submit(engine, 1).result())
        (2, True)

    Pass it as `executor=` to `from_numpy`, and call the sampler or optimiser through `run`. Calls
    are executed one at a time, in the order in which they were submitted. Calls that are submitted
    from the executor's own thread are executed immediately.

    It is a `concurrent.futures.Executor`, and can be used in a `with` statement.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Work | None] | None = None  # while run serves it
        self._shut_down = False

    def run(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Calls `fn` on a worker thread and serves submitted work until it returns.

        Args:
            fn: The computation, for example a `tf.function` that samples. Thread-local state such
                as a `tf.device` scope or a tape has to be set up inside it.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What `fn` returns. Exceptions of `fn` are raised here. An interrupt (Ctrl-C) cancels
            pending work, so that `fn` ends at its next engine call; a second interrupt does not
            wait for that.

        Raises:
            RuntimeError: `run` was called on another thread, within another `run`, or after
                `shutdown`.
            TypeError: `fn` is an R function, which cannot run on a worker thread.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "run must be called on the thread that made the MainThreadExecutor, because that "
                f"thread serves its work, got a call on {threading.current_thread().name}."
            )
        reticulate.check_python(fn)
        with self._lock:
            if self._queue is not None:
                raise RuntimeError(
                    "run was called by work that a run of the same executor is serving, so its "
                    "thread is busy. Call the function directly there."
                )
            self._check_service()
            submitted = self._queue = queue.SimpleQueue()
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = contextvars.copy_context()

        def compute() -> None:
            try:
                outcome.set_result(context.run(fn, *args, **kwargs))
            except BaseException as error:  # raised again on the thread that waits for it
                outcome.set_exception(error)
            submitted.put(None)

        worker = threading.Thread(target=compute, name="MainThreadExecutor.run", daemon=True)
        worker.start()
        try:
            while (work := submitted.get()) is not None:
                work.do()
        finally:
            self._stop_serving()
            worker.join()
        return outcome.result()

    def submit(
        self, fn: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> "concurrent.futures.Future[T]":
        """Schedules `fn(*args, **kwargs)` on the executor's thread.

        Returns:
            The future of its result.

        Raises:
            RuntimeError: After `shutdown`, or on another thread while no `run` serves it.
        """
        work = _Work(concurrent.futures.Future(), fn, args, kwargs)
        with self._lock:
            self._check_service()
            here = threading.get_ident() == self._thread
            if not here and self._queue is None:
                raise RuntimeError(
                    "MainThreadExecutor.submit was called from another thread outside of run, so "
                    "no thread serves it. Wrap the computation: executor.run(lambda: ...)."
                )
            if not here and self._queue is not None:
                self._queue.put(work)
        if here:
            work.do()
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuses further work.

        Args:
            wait: Whether to wait until submitted work is finished. Ignored on the executor's own
                thread, which is the one that executes it.
            cancel_futures: Whether to cancel submitted work that has not started.
        """
        done = _Work(concurrent.futures.Future(), lambda: None, (), {})
        with self._lock:
            self._shut_down = True
            if self._queue is None:
                return
            if cancel_futures:
                _cancel_all(self._queue)
            self._queue.put(done)
        if wait and threading.get_ident() != self._thread:
            concurrent.futures.wait([done.future])

    def _stop_serving(self) -> None:
        with self._lock:
            assert self._queue is not None
            left, self._queue = self._queue, None
        _cancel_all(left)

    def _check_service(self) -> None:
        if self._shut_down:
            raise RuntimeError("MainThreadExecutor was shut down. Create a new one.")


class _Work(NamedTuple):
    """A submitted call and the future of its result."""

    future: "concurrent.futures.Future[Any]"
    fn: Function
    args: Args
    kwargs: Kwargs

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.fn(*self.args, **self.kwargs)
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise  # an interrupt also has to end run
        else:
            self.future.set_result(result)


def _cancel_all(submitted: "queue.SimpleQueue[_Work | None]") -> None:
    """Cancels queued work, so that waiting for its result raises `CancelledError`."""
    ended = False
    while True:
        try:
            work = submitted.get_nowait()
        except queue.Empty:
            break
        if work is None:
            ended = True
        else:
            work.future.cancel()
            work.future.set_running_or_notify_cancel()
    if ended:
        submitted.put(None)
