"""An engine as one record: what it takes, what it gives, and the functions that answer for it."""

import contextlib
import dataclasses
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from sgtrick._host.executors import MainThreadExecutor
from sgtrick._types import Argnums, DTypeLike, Function, Structure


class Question(NamedTuple):
    """What an engine can be asked.

    Attributes:
        what: The answer, in errors.
        argument: The argument of `from_numpy` whose function answers; None for the engine itself.
        counter: Counts the calls.
        vectors: What it is asked with, in addition to the arguments, a letter for each vector: "u"
            is like the value, others are like the arguments.
        like_value: Whether the answer is like the value, and not like the arguments.
    """

    what: str
    argument: str | None
    counter: str
    vectors: str
    like_value: bool

    @property
    def is_first(self) -> bool:
        """Whether the engine itself answers."""
        return self.argument is None


QUESTIONS = {
    "value": Question("the value", None, "calls", "", True),
    "value and Jacobian": Question("the value", None, "calls", "", True),
    "vjp": Question("the VJP", "vjp", "vjp_calls", "u", False),
    "jvp": Question("the JVP", "jvp", "jvp_calls", "t", True),
    "hessp": Question("the Hessian times v", "hessp", "hess_calls", "v", False),
    "hessp of a sum": Question("the Hessian times v", "hessp", "hess_calls", "uv", False),
}

COUNTERS = ["calls", "vjp_calls", "jvp_calls", "hess_calls", "failures", "nonfinite", "seconds"]


class WrongUseError(TypeError):
    """An engine that cannot work at any point as declared, so `on_error` does not apply."""


@dataclasses.dataclass(eq=False)
class Engine:
    """A function of arrays with its derivatives, and how to call it.

    Attributes:
        name: Its name in errors.
        takes: The event dimensions of its arguments, as stated.
        argnums: The arguments that have gradients, as stated; None for all.
        gives: Its value, a `Space`, or a function that finds it, from the structure of the
            arguments and their leaves.
        functions: The functions that answer each of the `QUESTIONS`. If they are two, the value
            and its Jacobian come from one each.
        dtype: The dtype to which floating arguments are cast.
        scheme: The name of finite differences, if the Jacobian comes from these.
        vectorized: Whether the functions take all members of a batch in one call.
        broadcasts: Whether these then get arguments that all members share with batch dimensions of
            size 1; if not, as views of the common batch shape.
        executor: Evaluates the members in parallel.
        instead: The number that replaces the value where the engine fails.
        counters: How many calls of each kind were made, how many failed, at how many points
            something was not finite, and the wall time.
    """

    name: str
    takes: Structure
    argnums: Argnums | None
    gives: Any
    functions: Mapping[str, Sequence[Function]]
    dtype: np.dtype[Any]
    scheme: str | None = None
    vectorized: bool = False
    broadcasts: bool = False
    executor: futures.Executor | None = None
    instead: float | None = None
    counters: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(COUNTERS, 0)
    )

    def __post_init__(self) -> None:
        # An executor sets its own limit.
        self.turn: contextlib.AbstractContextManager[None] = (
            OneAtATime(self) if self.executor is None else contextlib.nullcontext()
        )
        # A serial executor gets one call at a time: after a failure, the rest is not wanted.
        self.is_concurrent = not isinstance(self.executor, (MainThreadExecutor, type(None)))
        self.callable = set[tuple[int, int]]()  # functions, with how many arguments
        self._counting, self._warned = threading.Lock(), set[str]()

    def first(self, is_number: bool) -> str:
        """The question for the value: with its Jacobian, or without."""
        comes_apart = "value" in self.functions and not is_number
        has_both = "value and Jacobian" in self.functions and not comes_apart
        return "value and Jacobian" if has_both else "value"

    def hessp(self, is_number: bool) -> str | None:
        """The question for the product with the Hessian, if there is an answer."""
        key = "hessp" if is_number else "hessp of a sum"
        return key if key in self.functions else None

    def count(self, **numbers: float) -> None:
        """Adds to the counters."""
        with self._counting:
            for counter, number in numbers.items():
                self.counters[counter] += number

    def warn_once(self, kind: str, message: str) -> None:
        """Warns of the first event of a kind, where the engine is defined."""
        if kind not in self._warned:
            self._warned.add(kind)
            (f, *_), *_ = self.functions.values()
            code = getattr(f, "__code__", None)
            place = (code.co_filename, code.co_firstlineno) if code else (self.name, 0)
            warnings.warn_explicit(message, RuntimeWarning, *place)


# TensorFlow calls from any thread, and most engines expect one call at a time; so do several that
# share a solver. Reentrant, because an engine may call itself or another one.
_TURN = threading.RLock()
_HOLDERS: list[tuple[str, int]] = []  # the engine and the thread that have it, for each time
_PATIENCE = 60.0  # seconds between two looks at it: one operation may take long


class OneAtATime:
    """A scope for the calls of an engine, that only one thread is in at a time.

    Raises:
        RuntimeError: The engine that is in it waits for TensorFlow, which may wait for this one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        if not _TURN.acquire(blocking=False):
            self._wait()
        _HOLDERS.append((self._engine.name, threading.get_ident()))

    def __exit__(self, *_: object) -> None:
        _HOLDERS.pop()
        _TURN.release()

    def _wait(self) -> None:
        before = None
        while not _TURN.acquire(timeout=_PATIENCE):
            name, thread = (_HOLDERS or [("", 0)])[-1]
            frame = sys._current_frames().get(thread)
            now = (id(frame), frame.f_lasti) if frame and _is_of_tensorflow(frame) else None
            if now and now == before:
                raise RuntimeError(
                    "An engine waits for its turn, since engines are called one at a time, and the "
                    "one that is being called waits for TensorFlow, which may be waiting for this "
                    "one. If an engine runs a tf.function that calls another engine, give that one "
                    "an executor, such as concurrent.futures.ThreadPoolExecutor(1)."
                )
            if frame and not now:
                where = "".join(traceback.format_stack(frame, 5))
                message = _WAITS.format(self._engine.name, _PATIENCE, name)
                self._engine.warn_once("waiting", f"{message}\n{where}")
            before = now


_WAITS = (
    "{0} has waited for {1:g} seconds, since engines are called one at a time, and {2} is being "
    "called. If {2} waits for this call, in a thread or a process of its own, both wait for ever: "
    "give {0} an executor, such as concurrent.futures.ThreadPoolExecutor(1). This is where {2} is:"
)


def _is_of_tensorflow(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("tensorflow.")


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


def number(on_error: object) -> float | None:
    """The number that replaces the value where an engine fails, None if it raises."""
    if isinstance(on_error, str) and on_error == "raise":
        return None
    numbers = (int, float, np.integer, np.floating)
    if isinstance(on_error, bool) or not isinstance(on_error, numbers):
        raise ValueError(f"on_error must be 'raise' or a number such as -np.inf, got {on_error!r}.")
    return float(on_error)
