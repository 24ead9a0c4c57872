"""Calls an engine for the members of a batch: in order, on an executor, or for all at once."""

import contextlib
import copy
import itertools
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, structures
from sgtrick._host import checks, reticulate
from sgtrick._host.engine import QUESTIONS, Engine, WrongUseError
from sgtrick._host.layout import Layout, Parts, Shape, broadcast, cast, cast_copy
from sgtrick._types import Args, Array, DTypeLike, Function, Structure

# Mistakes in the code of an engine, to which `on_error` does not apply.
_MISTAKES = (NameError, AttributeError, ImportError, SyntaxError)


class Asking:
    """A question to an engine for all members of a batch, as TensorFlow asks it.

    Attributes:
        engine: The engine.
        layout: How arrays form its arguments, and what it must return.
        key: The question.
        step: For points around the one that was asked for, what errors say of them.
        what: Whose answer it is, in errors.
        numbers: What fills the parts of the answer where the engine fails.
        may_be_unknown: Whether there is an array that says which gradients are unknown.
        tells_failures: Whether there is one that says where a number has replaced the value.
        tells_precision: Whether there is one with the precision in which values came.
        dtypes: The dtypes of the parts, and of these three.
    """

    def __init__(self, engine: Engine, layout: Layout, key: str, step: str = "") -> None:
        question, answer = QUESTIONS[key], layout.answer(key)
        self.engine, self.layout, self.key, self.step = engine, layout, key, step
        self.functions, self._counter = engine.functions[key], question.counter
        self.what = f"{question.argument} of {layout.name}" if question.argument else layout.name
        instead = engine.instead or 0.0
        self.numbers = [instead if part.failed is None else part.failed for part in answer]
        self.may_be_unknown = layout.may_be_unknown(key)
        self.tells_failures = question.is_first and engine.instead is not None
        self.tells_precision = question.is_first and engine.scheme is not None
        flags: list[np.dtype[Any]] = [np.dtype(bool)] * (self.may_be_unknown + self.tells_failures)
        precision = [np.dtype(float)] * self.tells_precision
        self.dtypes = [*(part.dtype for part in answer), *flags, *precision]

    def __call__(self, *arrays: Array | bytes) -> list[Array]:
        """The answer for all members.

        Args:
            arrays: The leaves of the arguments and then those of vectors, with equally many batch
                dimensions, which are broadcast.

        Returns:
            The parts of the answer; if gradients may be unknown, which of them are,
            `[batch..., n]`; for a value, where a number has replaced it, if one is stated, and for
            differences the precision in which it came.
        """
        engine, call = self.engine, _Call(self, arrays)
        with engine.turn:
            begin = time.perf_counter()
            try:
                return call.answer()
            finally:
                for future in call.running:
                    future.cancel()
                counts = {self._counter: call.calls, "seconds": time.perf_counter() - begin}
                engine.count(failures=call.failures, **counts)


class _Failure(NamedTuple):
    """What an engine raised."""

    error: Exception


class _Call:
    """The calls that answer one question."""

    def __init__(self, asked: Asking, arrays: Sequence[Array | bytes]) -> None:
        self._asked, self._arrays = asked, arrays
        self._engine, self._layout, self._key = asked.engine, asked.layout, asked.key
        self.running: list[futures.Future[Structure]] = []
        self.calls, self.failures, self._eps = 0, 0, 0.0

    def answer(self) -> list[Array]:
        """The answer for all members."""
        engine, layout, key = self._engine, self._layout, self._key
        leaves = layout.copies(key, self._arrays, engine.dtype)
        batch, events = layout.batch_and_events(key, leaves)
        if 0 in batch or (batch and not engine.vectorized):
            return self._of_members(leaves, batch, events)
        if not engine.broadcasts:
            # Without a batch, numbers and not arrays.
            leaves = broadcast(leaves, batch, events) if batch else [a[()] for a in leaves]
        answer = self._answered(self._started(leaves))
        if not isinstance(answer, _Failure):
            parts = layout.parts(key, answer, batch, events)
            unknown = self._noted(parts, batch, events)
            # Copies, as engines may return the same buffer each time.
            return self._with_extras(parts, cast_copy, batch, unknown={(): unknown})
        if self._replaces(answer) and math.prod(batch) > 1:
            # One bad member must not reject the others. The failed call may have modified
            # `leaves`, so copy them again.
            return self._of_members(layout.copies(key, self._arrays, engine.dtype), batch, events)
        self._fail(answer)
        return self._with_extras(self._columns(batch, events), cast, batch, failed=[()])

    def _of_members(
        self, leaves: Sequence[Array], batch: Shape, events: Sequence[Shape]
    ) -> list[Array]:
        """The answers for each member, joined. A vectorized engine gets batches of one."""
        layout, key = self._layout, self._key
        one = (1,) * len(batch) if self._engine.vectorized else ()
        leaves = broadcast(leaves, batch, events)
        varies = QUESTIONS[key].like_value and not layout.value.is_known
        is_noted = self._asked.may_be_unknown or self._asked.tells_precision
        places = list(itertools.product(*map(range, batch)))
        results = (self._started(_of(i, leaves, one)) for i in places)
        columns: list[Array] = []
        failed, unknown = list[Shape](), dict[Shape, list[int]]()
        for i, result in zip(
            places, list(results) if self._engine.is_concurrent else results, strict=True
        ):
            answer = self._answered(result)
            if isinstance(answer, _Failure):
                self._fail(answer, i)
                failed.append(i)
                continue
            parts = layout.parts(key, answer, one, events)
            if is_noted:
                unknown[i] = self._noted(parts, one, events)
            if not columns:
                columns = [_column(batch, part.shape[len(one) :], part.dtype) for part in parts]
            elif varies:
                layout.check_same(parts, len(one), columns, batch, QUESTIONS[key].what)
            place: Any = (*i, ...)
            for column, part in zip(columns, parts, strict=True):
                column[place] = part
        columns = columns or self._columns(batch, events)
        for i in failed:
            for column, number in zip(columns, self._asked.numbers, strict=True):
                column[i] = number
        return self._with_extras(columns, cast, batch, failed, unknown)

    def _columns(self, batch: Shape, events: Sequence[Shape]) -> list[Array]:
        """The parts if all calls fail."""
        shapes = self._layout.shapes(self._key, events)
        pairs = zip(shapes, self._asked.numbers, strict=True)
        return [np.full(batch + shape, number) for shape, number in pairs]

    def _noted(self, parts: Parts, batch: Shape, events: Sequence[Shape]) -> list[int]:
        """Which parts are unknown, which become NaN; and notes the precision of values."""
        if self._asked.tells_precision:
            self._eps = max(self._eps, *(checks.eps(part.dtype) for part in parts))
        if not self._asked.may_be_unknown:
            return []
        return self._layout.fill_unknown(self._key, parts, batch, events)

    def _with_extras(
        self,
        parts: Parts,
        owned: Callable[[Array, DTypeLike], Array],
        batch: Shape,
        failed: Sequence[Shape] = (),
        unknown: Mapping[Shape, Sequence[int]] = MappingProxyType({}),
    ) -> list[Array]:
        """The parts, and what comes with them: masks of what failed or is unknown, and so on.

        Args:
            parts: The parts.
            owned: Makes one of them an array of a dtype which nobody else has.
            batch: The batch shape.
            failed: The members for which it failed.
            unknown: For members the indices of parts that it does not know.
        """
        asked, known = self._asked, parts
        found = list(map(owned, parts, asked.dtypes))
        if asked.may_be_unknown:
            flags: Any = np.zeros((*batch, len(parts)), bool)
            for i, ks in unknown.items():
                flags[(*i, ..., ks)] = True
            found.append(flags)
            all_unknown = set(itertools.chain(*unknown.values()))
            known = [part for k, part in enumerate(parts) if k not in all_unknown]
        if asked.tells_failures:
            found.append(np.zeros(batch, bool))
            for i in failed:
                found[-1][i] = True
        if asked.tells_precision:
            found.append(np.full(batch, self._eps))
        if not asked.step:
            note_nonfinite(
                self._engine, self._layout, self._key, known, self._arrays, batch, failed
            )
        return found

    def _started(self, leaves: Sequence[Array]) -> Callable[[], Structure]:
        """Starts a call if there is an executor; returns a function that returns its result."""
        functions = self._asked.functions
        if len(functions) == 1:
            return self._call(functions[0], leaves)
        # Neither function sees how the other modifies its arguments.
        copies = [
            a.copy() if isinstance(a, np.ndarray) and a.flags.writeable else a for a in leaves
        ]
        f, grad = functions
        value, gradient = self._call(f, leaves), self._call(grad, copies)
        return lambda: (_own(value()), gradient())

    def _call(self, f: Function, leaves: Sequence[Array]) -> Callable[[], Structure]:
        engine = self._engine
        if engine.broadcasts:  # of a framework, which takes the leaves as they are
            return partial(f, self._layout, leaves)
        arguments = self._layout.arguments(self._key, leaves)
        if (id(f), len(arguments)) not in engine.callable:
            self._check_arguments(f, arguments)
            engine.callable.add((id(f), len(arguments)))
        if engine.executor is None:
            return partial(f, *arguments)
        try:
            self.running.append(engine.executor.submit(_Owning(f), *arguments))
        except Exception as error:
            raise RuntimeError(_lost(self._layout.name, error)) from error
        return self.running[-1].result

    def _answered(self, result: Callable[[], Structure]) -> Structure:
        """What the engine returned, or a `_Failure`.

        Args:
            result: Makes the call, or waits for the executor.

        Raises:
            RuntimeError: The executor did not answer.
        """
        self.calls += 1
        try:
            return result()
        except (reticulate.WrongThreadError, WrongUseError):
            raise  # not a failure at this point: the engine could not be called, or never works
        except Exception as error:
            lost = isinstance(error, (futures.BrokenExecutor, futures.CancelledError))
            if lost and self._engine.executor is not None:
                raise RuntimeError(_lost(self._layout.name, error)) from error
            return _Failure(error)

    def _replaces(self, failure: _Failure) -> bool:
        """Whether `on_error` replaces what the engine would have returned."""
        return self._engine.instead is not None and not isinstance(failure.error, _MISTAKES)

    def _fail(self, failure: _Failure, i: Shape = ()) -> None:
        """Counts a failed call; raises unless a number replaces its value."""
        self.failures += 1
        is_of_type = isinstance(failure.error, TypeError)
        hint = "".join(map(_LIST.format, self._layout.lists if is_of_type else ()))
        given, asked = shown(self._layout, self._key, self._arrays, i), self._asked
        message = f"{asked.what} raised {said(failure.error)}{given}{asked.step}{hint}"
        if not self._replaces(failure):
            raise RuntimeError(message) from failure.error
        self._engine.warn_once("failure", f"{_REPLACES} {message}")

    def _check_arguments(self, f: Function, arguments: Sequence[Structure]) -> None:
        signature = calls.signature_of(f)
        try:
            if signature is not None:
                signature.bind(*arguments)
        except TypeError as error:
            if calls.is_open(f):
                return
            is_several = len(self._layout.point.paths) > 1
            like_arguments = is_several and set(QUESTIONS[self._key].vectors) & {"t", "v"}
            raise WrongUseError(
                f"{self._asked.what} is called with {len(arguments)} arguments by position, but "
                f"{calls.name_of(f)}{signature} does not take them: {error}."
                + " Vectors like several arguments are one tuple."
                * bool(like_arguments)
            ) from None


_REPLACES = "on_error replaces the first failure. All are counted, in `failures`."
_LIST = (
    "\n{0} is a list, which is a structure. If it is one array, pass it as tf.stack of the list."
)


def note_nonfinite(
    engine: Engine,
    layout: Layout,
    key: str,
    parts: Parts,
    arrays: Sequence[Array | bytes],
    batch: Shape,
    but: Sequence[Shape] = (),
) -> None:
    """Counts the members for which a part is not finite, and warns of the first.

    Args:
        engine: The engine.
        layout: How the arrays form its arguments.
        key: The question.
        parts: Parts of the answer.
        arrays: What was asked with.
        batch: The batch shape.
        but: Members that are not counted.
    """
    wrong: Any = None
    for part in parts:
        finite = np.isfinite(part)
        if not finite.all():
            wrong = np.zeros(batch, bool) if wrong is None else wrong
            wrong |= ~np.reshape(finite, (*batch, -1)).all(-1)
    if wrong is None:
        return
    for i in but:
        wrong[i] = False
    n = len(layout.leaves)
    for a, (_, ndims, *_) in zip(arrays[n:], layout.taken(key)[n:], strict=False):
        # With a vector that is not finite, nothing else can be expected.
        finite = np.isfinite(a)
        wrong = wrong & finite.reshape((*finite.shape[: finite.ndim - ndims], -1)).all(-1)
    if np.any(wrong):
        engine.count(nonfinite=int(np.count_nonzero(wrong)))
        given = shown(layout, key, arrays, tuple(np.argwhere(wrong)[0]))
        engine.warn_once("nonfinite", _NONFINITE.format(layout.name, given))


_NONFINITE = (
    "{0} returned a value or a derivative that is not finite. This is the first; all are counted, "
    "in `nonfinite`.{1}"
)


def shown(layout: Layout, key: str, arrays: Sequence[Array | bytes], i: Shape) -> str:
    """What an engine was called with for member `i`, in errors."""
    show = partial(np.array2string, separator=", ", threshold=100, floatmode="unique")
    leaves = list(map(np.asarray, arrays))
    if i:
        leaves = broadcast(leaves, *layout.batch_and_events(key, leaves))
    pairs = zip(layout.taken(key), leaves, strict=True)
    return "".join(f"\n  {path} = {show(np.asarray(a[i]))}" for (path, *_), a in pairs)


def _column(batch: Shape, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """An array for a part of all members; at least in float64, until all have come."""
    return np.empty(batch + shape, np.promote_types(dtype, np.float64))


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

    def __dask_tokenize__(self) -> object:
        # Dask takes equal calls for one: it would not repeat one that was cancelled or is random.
        return uuid.uuid4().hex


def _own(returned: Structure) -> Structure:
    """What an engine returned, with its numbers in memory of our own."""
    if returned is None or isinstance(returned, (float, int)):
        return returned
    if isinstance(returned, np.ndarray):
        return returned.copy()
    if tf.nest.is_nested(returned) and not isinstance(returned, structures.BUFFERS):
        return tf.nest.map_structure(_own, returned)
    with contextlib.suppress(Exception):  # what is no array will be refused
        array = np.array(returned)
        return array if checks.is_real(array.dtype) else returned
    return returned


def _of(i: Shape, leaves: Sequence[Array], one: Shape) -> list[Any]:
    """The leaves of member `i`, from those of all members: arrays, or numbers of NumPy.

    The member may modify them, so what members share is copied. `one` is the batch shape of a batch
    of one, or empty.
    """
    own = [a[i] if a.flags.writeable else copy.copy(a[i]) for a in leaves]
    return [np.reshape(a, one + np.shape(a)) for a in own] if one else own


def _lost(name: str, error: BaseException) -> str:
    """The message for an executor that did not answer."""
    # A pool that cannot unpickle an answer tells why in the traceback that is its cause.
    cause = f"\n{error.__cause__}" if error.__cause__ else ""
    return (
        f"{name} got no answer from its executor: {said(error).rstrip('.')}. A worker has died or "
        "could not load the engine, the engine cannot be sent to it, the executor is shut down, or "
        "an exception or a result could be pickled by the worker but not unpickled here: raise one "
        f"of Python's built-in exceptions, such as ArithmeticError(str(error)).{cause}"
    )


def said(error: BaseException) -> str:
    """The kind and message of an error."""
    return f"{type(error).__name__}: {error}"
