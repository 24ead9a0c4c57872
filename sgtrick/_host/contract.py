"""What an engine is called with and must return, and the errors if it does not."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes
from sgtrick._host.value_shape import ValueShape
from sgtrick._types import Args, Array, DTypeLike, Structure

Shape = tuple[int, ...]
# The arrays that make up an answer, such as the value and each gradient; None for unknown ones.
Parts = list[Any]


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """How flat arrays form the arguments of an engine, and what it must return.

    Attributes:
        name: The engine's name in error messages.
        args: The arguments, with None as their leaves.
        paths: The names of the leaves of the arguments, such as "x['a']".
        event_ndims: The number of event dimensions of each leaf.
        dtypes: The gradient dtype of each leaf; None for a leaf without derivatives.
        value: The shape or shapes of the value of one batch member.
        value_dtype: The dtype of the value for TensorFlow.
        aux_dtype: That of aux; None if the engine returns no aux.
        has_gradient: Whether the engine returns the gradient with the value.
        tells_failures: Whether the results tell for which batch members the engine failed.
    """

    name: str
    args: Args
    paths: Sequence[str]
    event_ndims: Sequence[int]
    dtypes: Sequence[DTypeLike | None]
    value: ValueShape
    value_dtype: DTypeLike
    aux_dtype: DTypeLike | None
    has_gradient: bool
    tells_failures: bool

    @functools.cached_property
    def places(self) -> list[int]:
        """The indices of the leaves that have derivatives."""
        return [k for k, dtype in enumerate(self.dtypes) if dtype is not None]

    @functools.cached_property
    def _without(self) -> list[int]:
        """The indices of the others."""
        return [k for k, dtype in enumerate(self.dtypes) if dtype is None]

    @functools.cached_property
    def gradient_dtypes(self) -> list[np.dtype[Any]]:
        """The gradient dtypes of those leaves."""
        return [np.dtype(self.dtypes[k]) for k in self.places]

    @functools.cached_property
    def outputs(self) -> list[np.dtype[Any]]:
        """The dtypes of the values, of their gradients, of whether it failed, and of aux."""
        values = [np.dtype(self.value_dtype)] * len(self.value.shapes)
        gradients = self.gradient_dtypes * len(values) if self.has_gradient else []
        aux = [] if self.aux_dtype is None else [np.dtype(self.aux_dtype)]
        return [*values, *gradients, *[np.dtype(bool)] * self.tells_failures, *aux]

    @functools.cached_property
    def _nested(self) -> bool:
        return any(map(tf.nest.is_nested, self.args))

    def pack(self, leaves: Sequence[Any]) -> Sequence[Structure]:
        """Packs leaves into the arguments of the engine."""
        if not self._nested:
            return leaves
        return tf.nest.pack_sequence_as(self.args, leaves)  # type: ignore[no-any-return]

    def values(
        self,
        value: Structure,
        batch: Shape,
        events: Sequence[Shape] = (),
        what: str = "the value",
    ) -> list[Array]:
        """The checked leaves of a value, or of its tangent.

        Args:
            value: What the engine returned.
            batch: The batch shape of the call.
            events: The shapes of the leaves of the arguments, for errors that name a likely cause.
            what: What error messages call the value.

        Raises:
            TypeError: A leaf is not an array of real numbers.
            ValueError: The shape or structure is wrong.
        """
        if self.value.like is None:  # a fast path for the usual case
            return [self.checked(value, batch + self.value.shapes[0], what, events=events)]
        return [
            self.checked(leaf, (*batch, *shape), what + path, events=events)
            for leaf, path, shape in zip(
                split(value, self.value.like, f"{what} of {self.name}"),
                self.value.paths,
                self.value.shapes,
                strict=True,
            )
        ]

    def rows(self, jacobian: Structure) -> list[Structure]:
        """The gradients of the leaves of the value."""
        if self.value.like is None or jacobian is None:  # no argument has derivatives
            return [jacobian] * len(self.value.shapes)
        return list(split(jacobian, self.value.like, f"the gradient of {self.name}"))

    def gradients(
        self, gradient: Structure, front: Shape, events: Sequence[Shape], what: str = "the gradient"
    ) -> Parts:
        """The checked gradients of the leaves that have derivatives; None for unknown ones.

        Args:
            gradient: The gradient that the engine returned.
            front: The batch shape of the call and, of a Jacobian, the shape of the value.
            events: The shapes of the leaves, without batch.
            what: What error messages call the gradient.

        Raises:
            TypeError: A gradient is not an array of real numbers, or belongs to a leaf without
                derivatives.
            ValueError: The shape or structure is wrong.
        """
        parts = self.split(gradient, what)
        found = [
            None
            if parts[k] is None
            else self.checked(parts[k], front + events[k], what, self.paths[k])
            for k in self.places
        ]
        for k in self._without:
            if parts[k] is not None:
                raise TypeError(
                    f"{self._named(what, self.paths[k])} must be None, got {show(parts[k])}: "
                    f"{self.paths[k]} has a dtype without derivatives. Return None there, or cast "
                    f"{self.paths[k]} to a float."
                )
        return found

    def split(self, gradient: Structure, what: str) -> Sequence[Structure]:
        """The leaves of a gradient that has the structure of the arguments.

        Raises:
            ValueError: It has a different structure.
        """
        like: Structure = self.args
        if gradient is None:  # no argument has derivatives
            return [None] * len(self.paths)
        if len(like) == 1:
            if not self._nested:
                is_tuple = isinstance(gradient, tuple) and len(gradient) == 1
                return gradient if is_tuple else (gradient,)
            (like,) = like
        return list(split(gradient, like, f"{what} of {self.name}"))

    def checked(
        self,
        value: object,
        shape: shapes.Shape | None,
        what: str,
        by: str | None = None,
        events: Sequence[Shape] = (),
    ) -> Array:
        """`value` as an array of real numbers, NaN where masked, of this shape if it is known.

        Given `events`, the shapes of the leaves, errors name the likely cause of a wrong shape.
        """
        if isinstance(value, (list, tuple)) and any(map(np.ma.isMaskedArray, value)):
            value = np.ma.array(value)  # np.asarray would drop the masks
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = self._named(what, by)
            raise TypeError(
                f"{what} must be an array of real numbers, got {show(value)}: {error}"
            ) from error
        if array.dtype.kind not in "fiu":
            hint = " If there are several outputs, pass their shapes as value_shape."
            raise TypeError(
                f"{self._named(what, by)} must be real numbers, got {show(value)}."
                + (hint if isinstance(value, Mapping) and by is None else "")
            )
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            array = np.where(np.ma.getmaskarray(value), np.nan, array)
        if shape is not None and array.shape != shape and not _fits(array.shape, shape):
            # A number in R is a vector of length one; solvers return [value] or [[value]].
            is_number = type(value) in (int, float) or (by is None and array.ndim > len(shape))
            known = [1 if n is None else n for n in shape]
            if is_number and array.size == math.prod(known) == 1:
                return array.reshape(known)
            raise ValueError(
                f"{self._named(what, by)} must have the shape {shapes.show(shape)}, got "
                f"{shapes.show(array.shape)}.{self._usual_cause(array.shape, shape, events)}"
            )
        return array

    def _named(self, what: str, by: str | None) -> str:
        return f"{what} of {self.name}" + (f" with respect to {by}" if by else "")

    def _usual_cause(self, came: Shape, expected: shapes.Shape, events: Sequence[Shape]) -> str:
        """The most likely cause of a wrong shape of a value that is one array."""
        if not events or len(self.value.shapes) > 1:
            return ""
        (value,) = self.value.shapes
        batch = expected[: len(expected) - len(value)]
        if batch and _fits(came, value):
            return (
                " The engine is called for the whole batch, so it must return one value for each "
                "batch member: sum only over the event dimensions, for example with axis=-1, or "
                "leave out vectorized=True."
            )
        if any(came == batch + event for event in events):
            return (
                " That is the shape of the point. If the value is an array, pass its shape, "
                f"value_shape={came[len(batch) :]}; if it is one number, sum over the point; if "
                "each number is a point of its own, pass event_ndims=0."
            )
        if came[: len(batch)] == batch:
            return f" If the value is an array, pass its shape, value_shape={came[len(batch) :]}."
        return ""


def _fits(shape: Shape, expected: shapes.Shape) -> bool:
    """Whether a shape is the expected one, in which None stands for any dimension."""
    return len(shape) == len(expected) and all(
        n in (None, m) for m, n in zip(shape, expected, strict=True)
    )


def too_few_dimensions(path: str, shape: shapes.Shape, ndims: int) -> ValueError:
    """The error for an argument with fewer dimensions than `event_ndims`."""
    hint = " Convert a list of numbers to an array: a list is a structure of arguments."
    return ValueError(
        f"{path} has shape {shapes.show(shape)}, but the engine is declared to take arrays of "
        f"{ndims} dimension{'s' * (ndims > 1)}, event_ndims={ndims}. If this is one point, pass "
        f"event_ndims={len(shape)} for this argument."
        + (hint if re.search(r"\[\d+\]$", path) else "")
    )


def split(value: Structure, like: Structure, what: str) -> Iterator[Structure]:
    """The parts of `value` at the leaves of `like`."""
    if isinstance(like, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(like):
            raise ValueError(f"{what} must be a dict of {sorted(like)}, got {show(value)}.")
        for key in sorted(like):
            yield from split(value[key], like[key], f"{what}[{key!r}]")
    elif isinstance(like, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise ValueError(f"{what} must be a tuple of {len(like)}, got {show(value)}.")
        for i, (v, child) in enumerate(zip(value, like, strict=True)):
            yield from split(v, child, f"{what}[{i}]")
    elif tf.nest.is_nested(like):  # attrs classes, dataclasses
        tf.nest.assert_same_structure(like, value)
        yield from tf.nest.flatten(value)
    else:
        yield value


def copy(array: Any, dtype: DTypeLike) -> Array:
    if array.dtype == dtype:
        return np.array(array)
    with np.errstate(all="ignore"):  # numbers outside the range of a narrower dtype overflow
        return np.array(array, dtype)


def show(value: object) -> str:
    """A one-line description of a value."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dict of {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} ({', '.join(map(show, value))})"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if shape == ():
        return f"{type(value).__name__} {value}"
    if dtype is not None and shape is not None:
        return f"{type(value).__name__} of shape {list(shape)} and dtype {dtype}"
    return f"{type(value).__name__} {value!r}"[:200]
