"""A composition of pieces: what it should give, and what it gives."""

import dataclasses
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sgtrick
from fuzz import pieces
from matrix.problem import SLIPS, compare

# For what four transformations make of rounding.
TOLERANCES = {
    "float64": 1e-7, "complex128": 1e-7, "float32": 2e-2, "complex64": 2e-2, "float16": 0.1,
}  # fmt: skip
LIBRARY = pathlib.Path(sgtrick.__file__).parent


@dataclasses.dataclass(frozen=True)
class Program:
    """`steps[-1](...steps[0](form(function, rule)))` at a point.

    Attributes:
        function: The true function.
        rule: How its Jacobian is computed.
        form: What makes a function of the two.
        steps: Transformations, the innermost first.
        shape: Of a member.
        members: How many members the batch has, in each step that maps.
        dtype: The name of that of the point.
    """

    function: type
    rule: Callable[..., Any]
    form: Callable[..., Any]
    steps: tuple[Callable[..., Any], ...]
    shape: tuple[int, ...]
    members: int = 2
    dtype: str = "float64"

    def point(self) -> Any:
        maps = sum(step in pieces.OVER_MEMBERS for step in self.steps)
        shape = (self.members,) * maps + self.shape
        n = np.arange(np.prod(shape)).reshape(shape)
        x = np.sin(1.0 + n) * 1.2
        return (x + 0.5j * np.cos(n) if self.is_complex else x).astype(self.dtype)

    @property
    def is_complex(self) -> bool:
        return self.dtype.startswith("complex")

    def expected(self) -> np.ndarray | None:
        """By eager tapes of the true function in 64 bits, None where there is nothing to expect."""
        f = self.function.true
        for step in self.steps:
            f = pieces.BY_TAPES[step](f)
        try:
            return f(
                tf.cast(self.point(), tf.complex128 if self.is_complex else tf.float64)
            ).numpy()
        except Exception:  # as where a tape has no gradient of nothing
            return None

    def verdict(self) -> str:
        """`right`, `loud`, `skipped` where native code fails as well, or what is wrong."""
        expected = self.expected()
        if expected is None or not np.all(np.isfinite(expected)):
            return "skipped"
        came = self._judged(self.form(self.function, self.rule), expected)
        if came in ("right", "loud"):
            return came
        native = self.function.true
        if self.rule in pieces.CALLING_FUNCTIONS:  # which TensorFlow differentiates in fewer modes
            called = tf.function(native)
            native = lambda x: called(x)  # noqa: E731 - a strategy runs functions as a whole
        return "skipped" if self._judged(native, expected) != "right" else came

    def _judged(self, f: Callable[..., Any], expected: np.ndarray) -> str:
        tf.debugging.disable_traceback_filtering()  # which hides what TensorFlow has raised itself
        try:
            for step in self.steps:
                f = step(f)
            y = f(tf.constant(self.point()))
        except Exception as error:
            raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            slipped = isinstance(error, SLIPS) and LIBRARY in raised_in.parents
            slipped |= "RecursionError" in str(error)  # AutoGraph raises others by it
            return f"{type(error).__name__}: {error}" if slipped else "loud"
        finally:
            tf.debugging.enable_traceback_filtering()
            # tf.map_fn and tf.scan set it, and leave it there if their body raises: then strategies
            # fail in all that follows.
            tf.compat.v1.get_variable_scope()._caching_device = None
        tolerance = TOLERANCES[self.dtype]
        atol = tolerance * (1 + np.abs(expected).max(initial=0))
        if y is None and not expected.any():
            return "right"
        y = None if y is None else tf.convert_to_tensor(y)  # from slices, too
        came = compare(y, expected, tolerance, atol)
        return {"right": "right", "NaN": "loud"}.get(came, f"{y}, expected {expected}")

    def __repr__(self) -> str:
        steps = "".join(f"{step.__name__}, " for step in self.steps)
        return (
            f"Program({self.function.__name__}, {self.rule.__name__}, {self.form.__name__}, "
            f"({steps}), {self.shape}, {self.members}, {self.dtype!r})"
        )
