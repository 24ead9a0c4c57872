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
        value_dtype: Of the value.
        aux_dtype: Of what there is beside the value, None if there is nothing.
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
        self.dtypes, self.value_dtype, self.aux_dtype = dtypes, value_dtype, aux_dtype
        self._args = args
        self._nested = any(map(tf.nest.is_nested, args))

    def pack(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Leaves as the arguments that the engine takes."""
        if not self._nested:
            return leaves
        return tf.nest.pack_sequence_as(self._args, leaves)  # type: ignore[no-any-return]

    def batch(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The dimensions in front of those of one call, which all leaves have in common.

        Raises:
            ValueError: A leaf has too few dimensions.
        """
        for path, a, ndims in zip(self.paths, leaves, self.event_ndims, strict=True):
            if a.ndim < ndims:
                raise too_few_dimensions(path, a.shape, ndims)
        return leaves[0].shape[: leaves[0].ndim - self.event_ndims[0]] if leaves else ()

    def split(self, gradient: Any) -> Sequence[Any]:
        """The leaves of a gradient, which has the structure of the arguments.

        Raises:
            ValueError: It has another structure.
        """
        like: Any = self._args
        if len(like) == 1:
            if not self._nested:
                is_tuple = isinstance(gradient, tuple) and len(gradient) == 1
                return gradient if is_tuple else (gradient,)
            (like,) = like
        return list(_split(gradient, like, f"the gradient of {self.name}"))


class Replies:
    """Values, gradients and aux of several calls, checked one by one."""

    def __init__(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        calls: tuple[int, ...],
        batch: tuple[int, ...],
    ) -> None:
        """For calls over the shape `calls`, the first dimensions of `batch`."""
        self._layout, self._calls = layout, calls
        self._value_shape = batch[len(calls) :]
        # Whatever the dtypes, float64 holds it until all is there.
        self._values = np.zeros(batch)
        self._gradients = [np.zeros(a.shape) for a in leaves]
        self._auxes: dict[tuple[int, ...], Any] = {}

    def put(self, i: tuple[int, ...], returned: Any) -> None:
        """Takes what came back of the call for the member `i`.

        Raises:
            TypeError: No `(value, gradient)`, or `((value, aux), gradient)`, of real numbers.
            ValueError: A wrong shape or structure.
        """
        layout = self._layout
        wanted = "(value, gradient)" if layout.aux_dtype is None else "((value, aux), gradient)"
        if not _is_pair(returned) or returned[1] is None:
            raise TypeError(
                f"{layout.name} must return {wanted}, got {_show(returned)}, a value without a "
                "gradient. Return both; or pass the function for the gradient as grad=; or write "
                "the function in PyTorch or JAX, which derive it, and use from_torch or from_jax."
            )
        value, gradient = returned
        if layout.aux_dtype is not None:
            if not _is_pair(value):
                raise TypeError(
                    f"{layout.name} must return {wanted}, got {_show(value)} for (value, aux)."
                )
            value, aux = value
            self._auxes[i] = np.array(self._checked(aux, None, "aux"))
        self._values[i] = self._checked(value, self._value_shape, "the value")
        # Assigning copies, since engines may return the same buffer each time.
        for column, part, path, dtype in zip(
            self._gradients, layout.split(gradient), layout.paths, layout.dtypes, strict=True
        ):
            if dtype is None:
                if part is not None:
                    raise TypeError(
                        f"the gradient of {layout.name} by {path} must be None, got "
                        f"{_show(part)}: {path} has a dtype without derivatives."
                    )
            elif part is None:
                column[i] = np.nan  # nothing is known, as whoever asks for it is to see
            else:
                shape = column.shape[len(self._calls) :]
                column[i] = self._checked(part, shape, "the gradient", path)

    def put_instead(self, i: tuple[int, ...], value: float) -> None:
        """A value without a slope, for a call that failed."""
        self._values[i] = value
        self._auxes[i] = None

    def joined(self) -> list[Any]:
        """The values, the gradients by leaves that have derivatives, and aux if there is any."""
        layout = self._layout
        joined = [_cast(self._values, layout.value_dtype)]
        for column, dtype in zip(self._gradients, layout.dtypes, strict=True):
            if dtype is not None:
                joined.append(_cast(column, dtype))
        if layout.aux_dtype is not None:
            joined.append(_cast(self._stacked_auxes(), layout.aux_dtype))
        return joined

    def _stacked_auxes(self) -> Any:
        """All aux of one shape, NaN where a call failed."""
        if not self._auxes:
            return np.zeros_like(self._values)  # an empty batch
        shapes = {aux.shape for aux in self._auxes.values() if aux is not None}
        if len(shapes) > 1:
            raise ValueError(
                f"aux of {self._layout.name} must have the same shape for all members of a batch, "
                f"got {' and '.join(map(_shapes.show, sorted(shapes)))}."
            )
        shape = shapes.pop() if shapes else ()
        auxes = [np.full(shape, np.nan) if aux is None else aux for aux in self._auxes.values()]
        return np.reshape(auxes, self._calls + shape)

    def _checked(self, value: Any, shape: Any, what: str, by: str | None = None) -> Any:
        """`value` as an array of real numbers, of this shape unless None."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            what = self._named(what, by)
            raise TypeError(f"{what} is no array, but {_show(value)}: {error}") from error
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{self._named(what, by)} must be real numbers, got {_show(value)}.")
        if shape is not None and type(value) in (int, float) and math.prod(shape) == 1:
            array = array.reshape(shape)  # R has no numbers but vectors of length one
        if shape is not None and array.shape != shape:
            raise ValueError(
                f"{self._named(what, by)} must have the shape {_shapes.show(shape)}, got "
                f"{_shapes.show(array.shape)}."
            )
        return array

    def _named(self, what: str, by: str | None) -> str:
        return f"{what} of {self._layout.name}" + (f" by {by}" if by else "")


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


def _cast(array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # float64's range is wider
        return array.astype(dtype)


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
