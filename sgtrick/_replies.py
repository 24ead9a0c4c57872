"""What an engine is given and what it has to return: the contract of host calls, and its errors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick import _shapes


class Layout:
    """What flat arrays are as arguments of an engine, and what has to come back.

    Attributes:
        name: What errors call the engine.
        paths: Of the leaves of the arguments: "x['a']".
        event_ndims: How many dimensions of each leaf belong to one call.
        dtypes: Of the gradients by leaf; None for a leaf that has no derivatives.
        has_aux: Whether there is something beside the value.
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
        self.outputs = [np.dtype(d) for d in (value_dtype, *dtypes, aux_dtype) if d is not None]
        # The structure alone: TensorFlow keeps callbacks, and tensors would keep their graph.
        self._args = tf.nest.map_structure(lambda _: None, args)
        self._nested = any(map(tf.nest.is_nested, args))
        self._has_derivatives = any(d is not None for d in dtypes)

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
                leaf = _copy(a, dtype)
            else:  # a string would end at its last byte that is not zero
                leaf = np.array(a, object if isinstance(a, bytes) else None)
            if leaf.ndim < ndims:
                raise too_few_dimensions(path, leaf.shape, ndims)
            leaves.append(leaf)
        return leaves

    def batch(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The dimensions in front of those of one call, which all leaves have in common."""
        return leaves[0].shape[: leaves[0].ndim - self.event_ndims[0]] if leaves else ()

    def split(self, gradient: Any) -> Sequence[Any]:
        """The leaves of a gradient, which has the structure of the arguments.

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
        return list(_split(gradient, like, f"the gradient of {self.name}"))

    def parts(self, returned: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The parts of what an engine returned, checked.

        Args:
            returned: What it returned.
            shapes: Of the value and of the leaves in this call.

        Returns:
            Arrays: the value, the gradients by leaves that have derivatives, and aux if there is
            any.

        Raises:
            TypeError: No `(value, gradient)`, or `((value, aux), gradient)`, of real numbers.
            ValueError: A wrong shape or structure.
        """
        wanted = "((value, aux), gradient)" if self.has_aux else "(value, gradient)"
        if not _is_pair(returned) or (returned[1] is None and self._has_derivatives):
            raise TypeError(
                f"{self.name} must return {wanted}, got {_show(returned)}, a value without a "
                "gradient. Return both; or pass the function for the gradient as grad=; or write "
                "the function in PyTorch or JAX, which derive it, and use from_torch or from_jax."
            )
        value, gradient = returned
        aux = []
        if self.has_aux:
            if not _is_pair(value):
                raise TypeError(
                    f"{self.name} must return {wanted}, got {_show(value)} for (value, aux)."
                )
            value, aux = value[0], [np.array(self._checked(value[1], None, "aux"))]
            batch = shapes[0]
            if aux[0].shape[: len(batch)] != batch:
                raise ValueError(
                    f"aux of {self.name} must have the batch shape {_shapes.show(batch)} in front, "
                    f"got {_shapes.show(aux[0].shape)}."
                )
        parts = [self._checked(value, shapes[0], "the value")]
        for k, part in enumerate(self.split(gradient)):
            if self.dtypes[k] is None:
                if part is not None:
                    raise TypeError(
                        f"the gradient of {self.name} by {self.paths[k]} must be None, got "
                        f"{_show(part)}: {self.paths[k]} has a dtype without derivatives."
                    )
            elif part is None:
                # Not known, as whoever asks for it is to see.
                parts.append(np.full(shapes[k + 1], np.nan))
            else:
                parts.append(self._checked(part, shapes[k + 1], "the gradient", self.paths[k]))
        return parts + aux

    def instead(self, value: float, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The parts for a call that failed: a value without a slope, and NaN for aux."""
        parts = [np.full(shapes[0], value)]
        for shape, dtype in zip(shapes[1:], self.dtypes, strict=True):
            if dtype is not None:
                parts.append(np.zeros(shape))
        return [*parts, np.full(shapes[0], np.nan)] if self.has_aux else parts

    def outgoing(self, parts: Sequence[Any]) -> list[Any]:
        """Copies for TensorFlow, in its dtypes: engines may return the same buffer each time."""
        return list(map(_copy, parts, self.outputs))

    def _checked(self, value: Any, shape: Any, what: str, by: str | None = None) -> Any:
        """`value` as an array of real numbers, of this shape unless None."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = self._named(what, by)
            raise TypeError(f"{what} is no array, but {_show(value)}: {error}") from error
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{self._named(what, by)} must be real numbers, got {_show(value)}.")
        if shape is not None and array.shape != shape:
            # R has no numbers but vectors of length one.
            if type(value) in (int, float) and math.prod(shape) == 1:
                return array.reshape(shape)
            raise ValueError(
                f"{self._named(what, by)} must have the shape {_shapes.show(shape)}, got "
                f"{_shapes.show(array.shape)}."
            )
        return array

    def _named(self, what: str, by: str | None) -> str:
        return f"{what} of {self.name}" + (f" by {by}" if by else "")


class Columns:
    """The parts of several replies, each in one array."""

    def __init__(self, layout: Layout, batch: tuple[int, ...], leaves: Sequence[Any]) -> None:
        self._layout, self._batch = layout, batch
        shapes = [a.shape for a, d in zip(leaves, layout.dtypes, strict=True) if d is not None]
        # Whatever the dtypes, float64 holds it until all is there.
        self._columns = [np.empty(shape) for shape in (batch, *shapes)]
        self._auxes: list[Any] = []

    def put(self, i: tuple[int, ...], reply: list[Any]) -> None:
        """Takes the reply for the member `i`; the members come in their order."""
        if self._layout.has_aux:
            self._auxes.append(reply.pop())
        for k, part in enumerate(reply):
            self._columns[k][i] = part

    def joined(self) -> list[Any]:
        """The arrays."""
        return [*self._columns, self._stacked_auxes()] if self._layout.has_aux else self._columns

    def _stacked_auxes(self) -> Any:
        """All aux of one shape; a NaN, as of a call that failed, stands for any."""
        shapes = {aux.shape for aux in self._auxes if aux.shape or not np.isnan(aux)}
        if len(shapes) > 1:
            raise ValueError(
                f"aux of {self._layout.name} must have the same shape for all members of a batch, "
                f"got {' and '.join(map(_shapes.show, sorted(shapes)))}."
            )
        shape = shapes.pop() if shapes else ()
        auxes = [np.broadcast_to(aux, shape) for aux in self._auxes]
        return np.reshape(auxes, self._batch + shape)


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
            raise ValueError(f"{what} must be a dict of {sorted(like)}, got {_show(value)}.")
        for key in sorted(like):
            yield from _split(value[key], like[key], f"{what}[{key!r}]")
    elif isinstance(like, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise ValueError(f"{what} must be a tuple of {len(like)}, got {_show(value)}.")
        for i, (v, child) in enumerate(zip(value, like, strict=True)):
            yield from _split(v, child, f"{what}[{i}]")
    elif tf.nest.is_nested(like):  # attrs classes, dataclasses
        tf.nest.assert_same_structure(like, value)
        yield from tf.nest.flatten(value)
    else:
        yield value


def _copy(array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return np.array(array)
    with np.errstate(all="ignore"):  # the range of one dtype is wider than that of the other
        return np.array(array, dtype)


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, (tuple, list)) and len(returned) == 2


def _show(value: Any) -> str:
    """What a value is, in a line."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dict of {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} ({', '.join(map(_show, value))})"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if shape == ():
        return f"{type(value).__name__} {value}"
    if dtype is not None and shape is not None:
        return f"{type(value).__name__} of shape {list(shape)} and dtype {dtype}"
    return f"{type(value).__name__} {value!r}"[:200]
