"""A function evaluated at a point under a tape, and its embedded derivatives there.

Its gradient is a function in turn, so that second derivatives are compared as first ones are.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check.vectors import (
    Named,
    OfLeaves,
    concatenate,
    names_of_entries,
    split,
    unit_roundoff,
    unit_vectors,
)
from sgtrick._tensorflow import ongoing, tapes
from sgtrick._types import Array, Gradient, Tape, Tensor

UNEXPLAINED = (
    "The gradient is NaN, and no function refused it: a rule returned NaN, or autodiff computed it."
)
# Rules have to be linear in what they get, upstream gradients or tangents. They are asked with
# these multiples of it, since one that forgets it, squares it, clips it or takes its absolute value
# may be right at 1. If an answer overflows, it is asked for with the second pair.
MULTIPLES = ((128.0, -64.0), (1.0, -0.5))
# In a second derivative the same is true of the upstream gradient of the first.
INNER_MULTIPLE = -2.0


class Recorded:
    """What a tape records of a function at a point.

    Attributes:
        xs: The leaves of the point.
        x: Their entries, `[n]`.
        ys: The outputs.
        value: Their entries, `[m]`.
        connected: For each leaf of the point, whether the tape has returned a gradient.
    """

    def __init__(self, function: OfLeaves, xs: Sequence[Tensor]) -> None:
        self._function, self.xs, self.x = function, xs, concatenate(xs)
        self._tape, self._named = _taped(function, xs)
        self.ys = [y for _, y in self._named]
        self.value = concatenate(self.ys)
        self.connected = [False] * len(xs)

    @property
    def names(self) -> list[str]:
        """The names of the entries of the outputs."""
        return names_of_entries(self._named)

    def pulled(self, upstream: Array) -> tuple[Array, str]:
        """The gradient of a projection of the value, NaN if it is refused, and why it is.

        It is asked for twice, `[2, n]`, with `MULTIPLES` of the projection. Refusals are
        exceptions, or NaN where nothing can raise, as around a `tf.function`. Then the function
        runs again, eagerly, where the messages of all refusals are noted.
        """
        gradient, why = np.full((2, len(self.x)), np.nan), ""
        try:
            with warnings.catch_warnings():  # the report says why
                warnings.filterwarnings("ignore", tapes.NAN_WARNING, RuntimeWarning)
                gradient = _asked(lambda u: self._gradient(self._tape, self._named, u), upstream)
        except (NotImplementedError, LookupError, tf.errors.InvalidArgumentError) as error:
            if isinstance(error, (KeyError, IndexError)):  # a mistake in the user's code
                raise
            why = str(error)
        if np.all(np.isfinite(gradient)):
            return gradient, ""
        with _eagerly(), ongoing.collecting_messages() as messages:
            try:
                tape, ys = _taped(self._function, self.xs)
                again = _asked(lambda u: self._gradient(tape, ys, u), upstream)
                gradient = again if messages else gradient
            except Exception as error:  # what runs only in a graph may raise anything
                if why and isinstance(error, (TypeError, ValueError)):
                    raise  # a mistake in a rule, which was another error in the graph
        return gradient, " ".join(messages) or why or UNEXPLAINED

    def pushed(self, direction: Array) -> Array:
        """The derivatives of the value along a direction, in forward mode, asked for twice too."""

        def jvp(t: Array) -> Array:
            with tf.autodiff.ForwardAccumulator(self.xs, split(t, self.xs)) as accumulator:
                ys = [y for _, y in self._function(self.xs)]
            zero = tf.UnconnectedGradients.ZERO
            return concatenate([accumulator.jvp(y, unconnected_gradients=zero) for y in ys])

        return _asked(jvp, direction)

    def _gradient(self, tape: Tape, ys: Named, upstream: Array) -> Array:
        gradients = _gradients(tape, ys, self.xs, upstream)
        connected = [g is not None for g in gradients]
        self.connected = list(map(any, zip(self.connected, connected, strict=True)))
        pairs = zip(self.xs, gradients, strict=True)
        return concatenate(
            [tf.zeros_like(x) if g is None else tf.convert_to_tensor(g) for x, g in pairs]
        )


def _asked(rule: Callable[[Array], Array], vector: Array) -> Array:
    """Two answers of what has to be linear, both for `vector`."""
    for multiples in MULTIPLES:
        answers = np.stack([rule(c * vector) / c for c in multiples])
        if np.all(np.isfinite(answers)):
            break
    return answers


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
    function: OfLeaves, names_of_xs: Sequence[str], weights: Array | None = None
) -> OfLeaves:
    """The gradient as a function: that of a projection of the value, or of each of its entries."""

    def gradient(xs: Sequence[Tensor]) -> Named:
        tape, ys = _taped(function, xs)
        if weights is None:
            names = names_of_entries(ys)
            prefixes = [f"{name} by " if len(names) > 1 else "" for name in names]
            rows = zip(prefixes, unit_vectors(len(names)), strict=True)
        else:
            rows = zip([""], [weights], strict=True)
        found = []
        for prefix, upstream in rows:
            gradients = _gradients(tape, ys, xs, INNER_MULTIPLE * upstream)
            for leaf, x, g in zip(names_of_xs, xs, gradients, strict=True):
                g = tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                # No more accurate than the value: the function may compute in its dtype.
                dtype = max([g, *(y for _, y in ys)], key=unit_roundoff).dtype
                found.append((prefix + leaf, tf.cast(g, dtype) / INNER_MULTIPLE))
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
