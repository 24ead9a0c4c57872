"""What an engine is called with and must return, and the errors if it does not."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._core import shapes
from sgtrick._core.types import Args, Array, DTypeLike, Structure

Shape = tuple[int, ...]
# The arrays that make up an answer, such as the value and each gradient; None for unknown ones.
Parts = list[Any]


class CallSpec:
    """How flat arrays form the arguments of an engine, and what it must return.

    Attributes:
        name: The engine's name in error messages.
        paths: The names of the leaves of the arguments, such as "x['a']".
        event_ndims: The number of event dimensions of each leaf.
        dtypes: The gradient dtype of each leaf; None for a leaf without derivatives.
        has_aux: Whether the engine returns aux beside the value.
        places: The indices of the leaves that have derivatives.
        gradient_dtypes: The gradient dtypes of those leaves.
        tells_failures: Whether the results tell for which batch members the engine failed.
        outputs: The dtypes of the results: value, gradients of leaves with derivatives, whether the
            engine failed, aux.
    """

    def __init__(
        self,
        name: str,
        args: Args,
        paths: Sequence[str],
        event_ndims: Sequence[int],
        dtypes: Sequence[DTypeLike | None],
        value_dtype: DTypeLike,
        aux_dtype: DTypeLike | None,
        *,
        tells_failures: bool,
    ) -> None:
        self.name, self.paths, self.event_ndims = name, paths, event_ndims
        self.dtypes, self.has_aux = dtypes, aux_dtype is not None
        self.tells_failures = tells_failures
        self.places = [k for k, dtype in enumerate(dtypes) if dtype is not None]
        self._without = [k for k, dtype in enumerate(dtypes) if dtype is None]
        self.gradient_dtypes = [np.dtype(dtypes[k]) for k in self.places]
        self.outputs = [np.dtype(value_dtype), *self.gradient_dtypes]
        if tells_failures:
            self.outputs.append(np.dtype(bool))
        if aux_dtype is not None:
            self.outputs.append(np.dtype(aux_dtype))
        # Only the structure: TensorFlow keeps callbacks alive, and tensors keep their graph alive.
        self._args = tf.nest.map_structure(lambda _: None, args)
        self._nested = any(map(tf.nest.is_nested, args))
        self.has_derivatives = bool(self.gradient_dtypes)

    def pack(self, leaves: Sequence[Array]) -> Sequence[Structure]:
        """Packs leaves into the arguments of the engine."""
        if not self._nested:
            return leaves
        return tf.nest.pack_sequence_as(self._args, leaves)  # type: ignore[no-any-return]

    def incoming(self, arrays: Sequence[Array | bytes], dtype: DTypeLike) -> list[Array]:
        """Copies for the engine, which may modify and keep them; the originals are TensorFlow's.

        Args:
            arrays: The leaves as TensorFlow passed them.
            dtype: The dtype to which leaves with derivatives are cast.

        Raises:
            ValueError: A leaf has too few dimensions.
        """
        leaves = []
        for a, path, ndims, own in zip(
            arrays, self.paths, self.event_ndims, self.dtypes, strict=True
        ):
            if own is not None:
                leaf = copy(a, dtype)
            else:  # as a NumPy string, bytes would lose trailing zeros
                leaf = np.array(a, object if isinstance(a, bytes) else None)
            if leaf.ndim < ndims:
                raise too_few_dimensions(path, leaf.shape, ndims)
            leaves.append(leaf)
        return leaves

    def gradients(
        self, gradient: Structure, batch: Shape, events: Sequence[Shape], what: str = "the gradient"
    ) -> Parts:
        """The checked gradients of the leaves that have derivatives; None for unknown ones.

        Args:
            gradient: The gradient that the engine returned.
            batch: The batch shape of the call.
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
            else self.checked(parts[k], batch + events[k], what, self.paths[k])
            for k in self.places
        ]
        for k in self._without:
            if parts[k] is not None:
                raise TypeError(
                    f"{self._named(what, self.paths[k])} must be None, got {show(parts[k])}: "
                    f"{self.paths[k]} has a dtype without derivatives."
                )
        return found

    def split(self, gradient: Structure, what: str) -> Sequence[Structure]:
        """The leaves of a gradient that has the structure of the arguments.

        Raises:
            ValueError: It has a different structure.
        """
        like: Structure = self._args
        if gradient is None:  # no argument has derivatives
            return [None] * len(self.paths)
        if len(like) == 1:
            if not self._nested:
                is_tuple = isinstance(gradient, tuple) and len(gradient) == 1
                return gradient if is_tuple else (gradient,)
            (like,) = like
        return list(_split(gradient, like, f"{what} of {self.name}"))

    def checked(
        self,
        value: object,
        shape: Shape | None,
        what: str,
        by: str | None = None,
        events: Sequence[Shape] = (),
    ) -> Array:
        """`value` as an array of real numbers, NaN where masked, of shape `shape` unless None.

        Given `events`, the shapes of the leaves, errors name the likely cause of a wrong shape.
        """
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = self._named(what, by)
            raise TypeError(
                f"{what} must be an array of real numbers, got {show(value)}: {error}"
            ) from error
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{self._named(what, by)} must be real numbers, got {show(value)}.")
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            array = np.where(np.ma.getmaskarray(value), np.nan, array)
        if shape is not None and array.shape != shape:
            # A number in R is a vector of length one.
            if type(value) in (int, float) and math.prod(shape) == 1:
                return array.reshape(shape)
            raise ValueError(
                f"{self._named(what, by)} must have the shape {shapes.show(shape)}, got "
                f"{shapes.show(array.shape)}.{_usual_cause(array.shape, shape, events)}"
            )
        return array

    def _named(self, what: str, by: str | None) -> str:
        return f"{what} of {self.name}" + (f" with respect to {by}" if by else "")


def _usual_cause(came: Shape, batch: Shape, events: Sequence[Shape]) -> str:
    """The most likely cause of a wrong value shape."""
    if events and batch and came == ():
        return (
            " The engine is vectorized, so it must return one value for each batch member: sum "
            "only over the event dimensions, for example with axis=-1, or remove vectorized=True."
        )
    if any(came == batch + event for event in events):
        return (
            " That is the shape of the point: sum over it, or pass event_ndims=0 if each number "
            "is a point of its own."
        )
    return ""


def too_few_dimensions(path: str, shape: shapes.Shape, ndims: int) -> ValueError:
    """The error for an argument with fewer dimensions than `event_ndims`."""
    return ValueError(
        f"{path} has shape {shapes.show(shape)}, but the engine is declared to take arrays of "
        f"{ndims} dimension{'s' * (ndims > 1)}, event_ndims={ndims}. Pass event_ndims, for "
        "example event_ndims=0 for a number. Convert a list of numbers to an array: a list is a "
        "structure of arguments."
    )


def _split(value: Structure, like: Structure, what: str) -> Iterator[Structure]:
    """The parts of `value` at the leaves of `like`."""
    if isinstance(like, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(like):
            raise ValueError(f"{what} must be a dict of {sorted(like)}, got {show(value)}.")
        for key in sorted(like):
            yield from _split(value[key], like[key], f"{what}[{key!r}]")
    elif isinstance(like, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise ValueError(f"{what} must be a tuple of {len(like)}, got {show(value)}.")
        for i, (v, child) in enumerate(zip(value, like, strict=True)):
            yield from _split(v, child, f"{what}[{i}]")
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
