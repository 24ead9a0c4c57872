"""A function evaluated at a point under a tape, and its embedded derivatives there."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check.leaves import (
    Named,
    OfLeaves,
    concatenate,
    names_of_entries,
    recorded,
    split,
    tape_gradients,
)
from sgtrick._core import unknown
from sgtrick._tensorflow import tapes
from sgtrick._types import Array, Tape, Tensor

UNEXPLAINED = "The gradient is NaN, and no function says why."


class Recorded:
    """A function at a point.

    Attributes:
        xs: The leaves of the point.
        x: Their entries, `[n]`.
        ys: The outputs.
        names: The names of their entries.
        value: Their entries, `[m]`.
        connected: For each leaf of the point, whether the tape has returned a gradient.
    """

    def __init__(self, function: OfLeaves, xs: Sequence[Tensor]) -> None:
        self._function, self.xs, self.x = function, xs, concatenate(xs)
        self._tape, self._named = recorded(function, xs)
        self.ys = [y for _, y in self._named]
        self.names, self.value = names_of_entries(self._named), concatenate(self.ys)
        self.connected = [False] * len(xs)

    def pulled(self, upstream: Array) -> tuple[Array, str]:
        """The gradient `[n]` of a projection of the value, NaN if it is refused, and why it is.

        Refusals are exceptions, or NaN where nothing can raise, as around a `tf.function`. Then the
        function runs again, eagerly, where the messages of all refusals are noted.
        """
        gradient, why = np.full_like(self.x, np.nan), ""
        try:
            with warnings.catch_warnings():  # the report says why
                warnings.filterwarnings("ignore", tapes.NAN_WARNING, RuntimeWarning)
                gradient = self._gradient(self._tape, self._named, upstream)
        except (NotImplementedError, LookupError, tf.errors.InvalidArgumentError) as error:
            if isinstance(error, (KeyError, IndexError)):  # a mistake in the user's code
                raise
            why = str(error)
        if np.all(np.isfinite(gradient)):
            return gradient, ""
        # Some functions run only in a graph.
        with _eagerly(), unknown.noted() as messages, contextlib.suppress(RuntimeError):
            again = self._gradient(*recorded(self._function, self.xs), upstream)
            gradient = again if messages else gradient
        return gradient, " ".join(messages) or why or UNEXPLAINED

    def pushed(self, direction: Array) -> Array:
        """The derivatives `[m]` of the value along a direction, in forward mode."""
        with tf.autodiff.ForwardAccumulator(self.xs, split(direction, self.xs)) as accumulator:
            ys = [y for _, y in self._function(self.xs)]
        zero = tf.UnconnectedGradients.ZERO
        return concatenate([accumulator.jvp(y, unconnected_gradients=zero) for y in ys])

    def _gradient(self, tape: Tape, ys: Named, upstream: Array) -> Array:
        gradients = tape_gradients(tape, ys, self.xs, upstream)
        connected = [g is not None for g in gradients]
        self.connected = list(map(any, zip(self.connected, connected, strict=True)))
        pairs = zip(self.xs, gradients, strict=True)
        return concatenate(
            [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for x, g in pairs]
        )


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """A scope in which every `tf.function` runs eagerly, so that it can raise."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
