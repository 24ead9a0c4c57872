"""Which constants of a traced function are written in its code, and which were computed.

A number that a rule multiplies with is a constant for TensorFlow, whether it is the 2 of `2 * u` or
was computed by NumPy at this point. Python tells them apart: a number in code is one object, which
the code holds, and a number that is computed is another object, whatever its value.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import func_graph, ops

from sgtrick._types import Operation


class TracedGraph(func_graph.FuncGraph):  # type: ignore[misc]
    """A graph that knows which of its constants are written in the code that is being traced.

    Attributes:
        written: The names of these. Integers are among them, however they were computed: they have
            no derivatives.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.written = set[str]()
        self._tracer = sys._getframe(1).f_code
        # Objects are kept: the identity of one that is freed may be that of another one later.
        self._codes, self._literals = dict[int, types.CodeType](), dict[int, object]()

    # Each operation is created by this method, and the stack tells by what code, and of what.
    def _create_op_internal(self, op_type: str, *args: Any, **kwargs: Any) -> Operation:
        op = super()._create_op_internal(op_type, *args, **kwargs)
        numbers: list[object] = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._tracer:
            code = frame.f_code
            if id(code) not in self._codes:
                self._codes[id(code)] = code
                for c in (code, *_called_in(frame)):
                    self._literals.update((id(n), n) for n in _numbers_in(c.co_consts))
            if code is ops._create_graph_constant.__code__:
                numbers = tf.nest.flatten(frame.f_locals["value"])
            frame = frame.f_back
        if numbers and all(_is_whole(n) or id(n) in self._literals for n in numbers):
            self.written.add(op.name)
        return op


def _called_in(frame: types.FrameType) -> list[types.CodeType]:
    """The codes of functions that a frame may have called: they may have returned a number."""
    values = [*frame.f_locals.values(), *map(frame.f_globals.get, frame.f_code.co_names)]
    return [f.__code__ for f in values if isinstance(f, types.FunctionType)]


def _numbers_in(constants: tuple[object, ...]) -> Iterator[object]:
    for c in constants:
        if isinstance(c, tuple):
            yield from _numbers_in(c)
        elif isinstance(c, types.CodeType):  # a function within
            yield from _numbers_in(c.co_consts)
        elif isinstance(c, (float, complex)):
            yield c


def _is_whole(n: object) -> bool:
    """Whether a number, or an array of them, is of a type of integers."""
    return isinstance(n, int) or (isinstance(n, (np.ndarray, np.generic)) and n.dtype.kind in "biu")
