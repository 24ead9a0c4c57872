"""What an engine is given and what it has to return: the contract of host calls, and its errors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from sgtrick import _shapes

Shape = tuple[int, ...]


class Layout:
    """What flat arrays are as arguments of an engine, and what has to come back.

    Attributes:
        name: What errors call the engine.
        paths: Of the leaves of the arguments: "x['a']".
        event_ndims: How many dimensions of each leaf belong to one call.
        dtypes: Of the gradients by leaf; None for a leaf that has no derivatives.
        has_aux: Whether there is something beside the value.
        places: Which leaves have derivatives.
        gradient_dtypes: Of the gradients by these.
        outputs: The dtypes of what comes back: value, gradients of leaves with derivatives, aux.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[Any],
        paths: Sequence[str],
        event_ndims: Sequence[int],
        dtypes: Sequence[Any],
        value_dtype: Any,
        aux_dtype: Any,
    ) -> None:
        self.name, self.paths, self.event_ndims = name, paths, event_ndims
        self.dtypes, self.has_aux = dtypes, aux_dtype is not None
        self.places = [k for k, dtype in enumerate(dtypes) if dtype is not None]
        self._without = [k for k, dtype in enumerate(dtypes) if dtype is None]
        self.gradient_dtypes = [np.dtype(dtypes[k]) for k in self.places]
        self.outputs = [np.dtype(value_dtype), *self.gradient_dtypes]
        if aux_dtype is not None:
            self.outputs.append(np.dtype(aux_dtype))
        # The structure alone: TensorFlow keeps callbacks, and tensors would keep their graph.
        self._args = tf.nest.map_structure(lambda _: None, args)
        self._nested = any(map(tf.nest.is_nested, args))
        self.has_derivatives = bool(self.gradient_dtypes)

    def pack(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Leaves as the arguments that the engine takes."""
        if not self._nested:
            return leaves
        return tf.nest.pack_sequence_as(self._args, leaves)  # type: ignore[no-any-return]

    def incoming(self, arrays: Sequence[Any], dtype: Any) -> list[Any]:
        """Copies for the engine, which may change and keep them: the buffers are TensorFlow's.

        Args:
            arrays: The leaves as they came.
            dtype: What those that have derivatives are cast to.

        Raises:
            ValueError: A leaf has too few dimensions.
        """
        leaves = []
        for a, path, ndims, own in zip(
            arrays, self.paths, self.event_ndims, self.dtypes, strict=True
        ):
            if own is not None:
                leaf = copy(a, dtype)
            else:  # a string would end at its last byte that is not zero
                leaf = np.array(a, object if isinstance(a, bytes) else None)
            if leaf.ndim < ndims:
                raise too_few_dimensions(path, leaf.shape, ndims)
            leaves.append(leaf)
        return leaves

    def gradients(
        self, gradient: Any, batch: Shape, events: Sequence[Shape], what: str = "the gradient"
    ) -> list[Any]:
        """The gradients by the leaves that have derivatives, checked; None where one is not known.

        Args:
            gradient: What the engine returned for it.
            batch: The batch shape of the call.
            events: The shapes of the leaves, without batch.
            what: What errors call it.

        Raises:
            TypeError: It is no array of real numbers, or is by a leaf without derivatives.
            ValueError: A wrong shape or structure.
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
                    f"{what} of {self.name} by {self.paths[k]} must be None, got {show(parts[k])}: "
                    f"{self.paths[k]} has a dtype without derivatives."
                )
        return found

    def split(self, gradient: Any, what: str) -> Sequence[Any]:
        """The leaves of what has the structure of the arguments.

        Raises:
            ValueError: It has another structure.
        """
        like: Any = self._args
        if gradient is None:  # there is nothing to differentiate by
            return [None] * len(self.paths)
        if len(like) == 1:
            if not self._nested:
                is_tuple = isinstance(gradient, tuple) and len(gradient) == 1
                return gradient if is_tuple else (gradient,)
            (like,) = like
        return list(_split(gradient, like, f"{what} of {self.name}"))

    def checked(
        self,
        value: Any,
        shape: Shape | None,
        what: str,
        by: str | None = None,
        events: Sequence[Shape] = (),
    ) -> Any:
        """`value` as an array of real numbers, of this shape unless None; NaN where masked.

        With `events`, the shapes of the leaves, errors say what most likely led to another shape.
        """
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = self._named(what, by)
            raise TypeError(f"{what} is no array, but {show(value)}: {error}") from error
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{self._named(what, by)} must be real numbers, got {show(value)}.")
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            array = np.where(np.ma.getmaskarray(value), np.nan, array)
        if shape is not None and array.shape != shape:
            # R has no numbers but vectors of length one.
            if type(value) in (int, float) and math.prod(shape) == 1:
                return array.reshape(shape)
            raise ValueError(
                f"{self._named(what, by)} must have the shape {_shapes.show(shape)}, got "
                f"{_shapes.show(array.shape)}.{_usual_cause(array.shape, shape, events)}"
            )
        return array

    def _named(self, what: str, by: str | None) -> str:
        return f"{what} of {self.name}" + (f" by {by}" if by else "")


class Reply(Protocol):
    """What is asked of an engine, and what has to come back: arrays, here called parts.

    A call is of one member or, vectorized, of a batch: its arrays have the batch shape in front.
    """

    name: str
    has_aux: bool
    paths: Sequence[str]
    event_ndims: Sequence[int]

    def incoming(self, arrays: Sequence[Any], dtype: Any) -> list[Any]:
        """Copies of the leaves for the engine."""
        ...

    def arguments(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """What the engine is called with."""
        ...

    def shapes(self, batch: Shape, events: Sequence[Shape]) -> list[Shape]:
        """Of the parts but aux, whose shape only the engine knows."""
        ...

    def parts(
        self, returned: Any, batch: Shape, events: Sequence[Shape], leaves: Sequence[Any]
    ) -> list[Any]:
        """The parts of what an engine returned for `leaves`, checked; None for one not known."""
        ...

    def instead(self, value: float, batch: Shape, events: Sequence[Shape]) -> list[Any]:
        """The parts for a call that failed, where `value` is to be taken."""
        ...

    def outgoing(self, parts: Sequence[Any]) -> list[Any]:
        """Copies for TensorFlow, in its dtypes: engines may return the same buffer each time."""
        ...


class ValueAndGradient:
    """The reply `(value, gradient)` or `((value, aux), gradient)`."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self.name, self.has_aux = layout, layout.name, layout.has_aux
        self.paths, self.event_ndims = layout.paths, layout.event_ndims

    def incoming(self, arrays: Sequence[Any], dtype: Any) -> list[Any]:
        """Copies of the leaves for the engine."""
        return self._layout.incoming(arrays, dtype)

    def arguments(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """What the engine is called with."""
        return self._layout.pack(leaves)

    def shapes(self, batch: Shape, events: Sequence[Shape]) -> list[Shape]:
        """Of the value and the gradients."""
        return [batch, *(batch + events[k] for k in self._layout.places)]

    def parts(
        self, returned: Any, batch: Shape, events: Sequence[Shape], leaves: Sequence[Any]
    ) -> list[Any]:
        """The value, the gradients by leaves that have derivatives, and aux if there is any.

        Raises:
            TypeError: No `(value, gradient)`, or `((value, aux), gradient)`, of real numbers.
            ValueError: A wrong shape or structure.
        """
        del leaves
        layout, name = self._layout, self.name
        if not _is_pair(returned) or (returned[1] is None and layout.has_derivatives):
            raise TypeError(
                f"{name} must return {self._wanted()}, got {show(returned)}, a value without a "
                "gradient. Return both; or pass the function for the gradient as grad=; or write "
                "the function in PyTorch or JAX, which derive it, and use from_torch or from_jax."
            )
        value, gradient = returned
        aux = []
        if layout.has_aux:
            if not _is_pair(value):
                raise TypeError(
                    f"{name} must return {self._wanted()}, got {show(value)} for (value, aux)."
                )
            value, aux = value[0], [np.array(layout.checked(value[1], None, "aux"))]
            if aux[0].shape[: len(batch)] != batch:
                raise ValueError(
                    f"aux of {name} must have the batch shape {_shapes.show(batch)} in front, "
                    f"got {_shapes.show(aux[0].shape)}."
                )
        value = layout.checked(value, batch, "the value", events=events)
        return [value, *layout.gradients(gradient, batch, events), *aux]

    def _wanted(self) -> str:
        return "((value, aux), gradient)" if self.has_aux else "(value, gradient)"

    def instead(self, value: float, batch: Shape, events: Sequence[Shape]) -> list[Any]:
        """The parts for a call that failed: a value without a slope, and NaN for aux."""
        parts = [np.zeros(shape) for shape in self.shapes(batch, events)]
        parts[0][...] = value
        return [*parts, np.full(batch, np.nan)] if self._layout.has_aux else parts

    def outgoing(self, parts: Sequence[Any]) -> list[Any]:
        """Copies for TensorFlow, in its dtypes."""
        return list(map(copy, parts, self._layout.outputs))


class Columns:
    """The parts of several replies, each in one array.

    `ones` is how many dimensions of size 1 each reply has in front.
    """

    def __init__(self, reply: Reply, batch: Shape, events: Sequence[Shape], ones: int) -> None:
        self._ones = ones
        self._name, self._has_aux, self._batch = reply.name, reply.has_aux, batch
        # Whatever the dtypes, float64 holds it until all is there.
        self._columns = [np.empty(shape) for shape in reply.shapes(batch, events)]
        self._auxes: list[Any] = []
        self._failed: list[Shape] = []
        self._unknown: set[int] = set()

    def put(self, i: Shape, parts: Sequence[Any], *, failed: bool = False) -> None:
        """Takes the parts for the member `i`; the members come in their order."""
        if self._ones:
            parts = [p if p is None else p.reshape(p.shape[self._ones :]) for p in parts]
        for k, column in enumerate(self._columns):
            part = parts[k]
            if part is None:
                self._unknown.add(k)
                part = np.nan
            column[i] = part
        if self._has_aux:
            self._auxes.append(parts[-1])
        if failed:
            self._failed.append(i)

    def nonfinite(self) -> int:
        """For how many members that did not fail a part that is known is not finite."""
        known = [None if k in self._unknown else c for k, c in enumerate(self._columns)]
        return count_nonfinite(known, self._batch, self._failed)

    def joined(self) -> list[Any]:
        """The arrays."""
        return [*self._columns, self._stacked_auxes()] if self._has_aux else self._columns

    def _stacked_auxes(self) -> Any:
        """All aux of one shape; a NaN, as of a call that failed, stands for any."""
        shapes = {aux.shape for aux in self._auxes if aux.shape or not np.isnan(aux)}
        if len(shapes) > 1:
            raise ValueError(
                f"aux of {self._name} must have the same shape for all members of a batch, "
                f"got {' and '.join(map(_shapes.show, sorted(shapes)))}."
            )
        shape = shapes.pop() if shapes else ()
        auxes = [np.broadcast_to(aux, shape) for aux in self._auxes]
        return np.reshape(auxes, self._batch + shape)


def count_nonfinite(parts: Sequence[Any], batch: Shape, but: Sequence[Shape] = ()) -> int:
    """For how many members of a batch some part that is known is not finite.

    Args:
        parts: Arrays, None for one that is not known.
        batch: The batch shape.
        but: Members that are left out.
    """
    bad: Any = None
    for part in parts:
        if part is not None:
            finite = np.isfinite(part)
            if np.count_nonzero(finite) < finite.size:
                bad = np.zeros(batch, bool) if bad is None else bad
                bad |= ~finite.reshape((*batch, -1)).all(-1)
    if bad is None:
        return 0
    for i in but:
        bad[i] = False
    return int(np.count_nonzero(bad))


def split_shapes(leaves: Sequence[Any], event_ndims: Sequence[int]) -> tuple[Shape, list[Shape]]:
    """The batch shape to which the leaves broadcast, and their shapes without batch."""
    shapes, events = [], []
    for a, n in zip(leaves, event_ndims, strict=True):
        front = a.ndim - n
        shapes.append(a.shape[:front])
        events.append(a.shape[front:])
    if not shapes or all(shape == shapes[0] for shape in shapes[1:]):
        return shapes[0] if shapes else (), events
    return np.broadcast_shapes(*shapes), events


def _usual_cause(came: Shape, batch: Shape, events: Sequence[Shape]) -> str:
    """What most likely led to the shape of a value."""
    if events and batch and came == ():
        return (
            " The engine is vectorized, so it returns a value for each member of the batch: sum "
            "over the point alone, say with axis=-1, or leave vectorized=True away."
        )
    if any(came == batch + event for event in events):
        return (
            " That is the shape of the point: sum over it, or state event_ndims=0 if each number "
            "is a point of its own."
        )
    return ""


def too_few_dimensions(path: str, shape: _shapes.Shape, ndims: int) -> ValueError:
    """What is raised for an argument with fewer dimensions than one call of the engine takes."""
    return ValueError(
        f"{path} has shape {_shapes.show(shape)}, but the engine is declared to take arrays of "
        f"{ndims} dimension{'s' * (ndims > 1)}, event_ndims={ndims}. State event_ndims, for "
        "example event_ndims=0 for a number; and pass a list of numbers as an array, for a list "
        "is a structure."
    )


def _split(value: Any, like: Any, what: str) -> Iterator[Any]:
    """The parts of `value` that stand where `like` has leaves."""
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


def copy(array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return np.array(array)
    with np.errstate(all="ignore"):  # the range of one dtype is wider than that of the other
        return np.array(array, dtype)


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, (tuple, list)) and len(returned) == 2


def show(value: Any) -> str:
    """What a value is, in a line."""
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
