"""A function evaluated at a point under a tape, and its embedded derivatives there.

Its gradient is a function in turn, so that second derivatives are compared as first ones are.
"""

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
    split,
    unit_roundoff,
)
from sgtrick._core import unknown
from sgtrick._tensorflow import tapes
from sgtrick._types import Array, Gradient, Tape, Tensor

UNEXPLAINED = (
    "The gradient is NaN, and no function refused it: a rule returned NaN, or autodiff computed it."
)


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
        self._tape, self._named = _taped(function, xs)
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
            again = self._gradient(*_taped(self._function, self.xs), upstream)
            gradient = again if messages else gradient
        return gradient, " ".join(messages) or why or UNEXPLAINED

    def pushed(self, direction: Array) -> Array:
        """The derivatives `[m]` of the value along a direction, in forward mode."""
        with tf.autodiff.ForwardAccumulator(self.xs, split(direction, self.xs)) as accumulator:
            ys = [y for _, y in self._function(self.xs)]
        zero = tf.UnconnectedGradients.ZERO
        return concatenate([accumulator.jvp(y, unconnected_gradients=zero) for y in ys])

    def _gradient(self, tape: Tape, ys: Named, upstream: Array) -> Array:
        gradients = _gradients(tape, ys, self.xs, upstream)
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


def gradient_of(
    function: OfLeaves, names_of_xs: Sequence[str], random: np.random.Generator | None
) -> OfLeaves:
    """The gradient as a function: all rows of the Jacobian, or one row of a random projection."""
    seed = None if random is None else int(random.integers(2**32))

    def gradient(xs: Sequence[Tensor]) -> Named:
        tape, ys = _taped(function, xs)
        names = names_of_entries(ys)
        upstreams = np.eye(len(names))
        if seed is not None:
            upstreams = np.random.default_rng(seed).choice([-1.0, 1.0], (1, len(names)))
        found = []
        for name, upstream in zip(names, upstreams, strict=False):
            prefix = f"{name} by " if len(names) > 1 else ""
            gradients = _gradients(tape, ys, xs, upstream)
            for leaf, x, g in zip(names_of_xs, xs, gradients, strict=True):
                g = tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                # No more accurate than the value: the function may compute in its dtype.
                dtype = max([g, *(y for _, y in ys)], key=unit_roundoff).dtype
                found.append((prefix + leaf, tf.cast(g, dtype)))
        return found

    return gradient


def _taped(function: OfLeaves, xs: Sequence[Tensor]) -> tuple[Tape, Named]:
    """The outputs of a function, and a tape for their gradients with respect to `xs`."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(xs)
        ys = function(xs)
    return tape, ys


def _gradients(tape: Tape, ys: Named, xs: Sequence[Tensor], upstream: Array) -> list[Gradient]:
    """The gradients of the outputs whose weight is not zero: others may refuse."""
    tensors = [y for _, y in ys]
    used = [
        (y, u)
        for y, u in zip(tensors, split(upstream, tensors), strict=True)
        if np.any(concatenate([u]))
    ]
    return list(tape.gradient([y for y, _ in used], xs, [u for _, u in used]))
