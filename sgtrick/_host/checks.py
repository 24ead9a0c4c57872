"""Checks of what an engine returns, whose errors say what to do."""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._types import Array, Structure

Shape = tuple[int, ...]


def real_array(
    value: object, shape: shapes.Shape, what: str, by: str | None = None, cause: Any = None
) -> Array:
    """`value` as an array of real numbers, NaN where masked, of this shape.

    Args:
        value: What an engine returned.
        shape: The shape, with None for any dimension.
        what: What errors call it: "the gradient of f".
        by: For a derivative, what it is taken by.
        cause: From the shape that came, the most likely cause if it is wrong.

    Raises:
        TypeError: It is not an array of real numbers.
        ValueError: It has another shape.
    """
    if type(value) is np.ndarray:
        array = value
    else:
        if _is_masked(value):
            value = _unmasked(value)  # np.asarray drops masks
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{_named(what, by)} must be an array of real numbers, got {show(value)}: "
                + str(error).removesuffix(".")
                + "."
                + (cause(()) if cause and by else "")
                + _ALONE * (isinstance(value, tuple) and not by)
            ) from error
        if value is None:
            raise TypeError(
                f"{_named(what, by)} must be real numbers, got None: did you forget to return?"
            )
    if not is_real(array.dtype):
        hint = " If there are several outputs, pass their shapes as value_shape."
        raise TypeError(
            f"{_named(what, by)} must be real numbers, got {show(value)}."
            + (hint if isinstance(value, Mapping) and by is None else "")
        )
    if array.shape != shape and not shapes.compatible(array.shape, shape):
        # A number in R is a vector of length one; solvers return [value] or [[value]].
        is_number = type(value) in (int, float) or (by is None and array.ndim > len(shape))
        known = [1 if n is None else n for n in shape]
        if is_number and array.size == math.prod(known) == 1:
            return array.reshape(known)
        raise ValueError(
            f"{_named(what, by)} must have the shape {shapes.show(shape)}, got "
            f"{shapes.show(array.shape)}." + (cause(array.shape) if cause else "")
        )
    return array


def _named(what: str, by: str | None) -> str:
    return f"{what} with respect to {by}" if by else what


def _is_masked(value: object) -> bool:
    """Whether an entry of an array, or of nested lists of arrays, is masked."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_masked, value))
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _unmasked(value: object) -> Structure:
    """The value with NaN for masked entries."""
    if isinstance(value, (list, tuple)):
        return list(map(_unmasked, value))
    if not isinstance(value, np.ma.MaskedArray):
        return value
    return np.where(np.ma.getmaskarray(value), np.nan, value.data)


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether these are integers or floating numbers, those of other packages (bfloat16) too."""
    return dtype.kind in "fiu" or (dtype.kind == "V" and np.can_cast(dtype, np.float64))


@functools.cache
def eps(dtype: np.dtype[Any]) -> float:
    """The distance of 1 from the next number of a floating dtype; 0 for integers, which are exact.

    As `np.finfo` has it, which does not know bfloat16.
    """
    return 0.0 if dtype.kind in "iu" else float(np.spacing(np.ones((), dtype)))


_ALONE = " With grad= or vjp=, an engine returns its value alone."


def cause_of_shape(batch: Shape, value: shapes.Shape, events: Sequence[Shape], came: Shape) -> str:
    """The most likely cause of a wrong shape of a value that is one array.

    Args:
        batch: The batch shape of the call.
        value: The shape of the value, without batch.
        events: The event shapes of the arguments.
        came: The shape that came.
    """
    if batch and shapes.compatible(came, value):
        return (
            " The engine is called for the whole batch, so it must return one value for each "
            "batch member: sum only over the event dimensions, for example with axis=-1, or leave "
            "out vectorized=True."
        )
    if any(came == batch + event for event in events):
        return (
            " That is the shape of the point. If the value is an array, pass its shape, "
            f"value_shape={came[len(batch) :]}; if it is one number, sum over the point; if each "
            "number is a point of its own, pass event_ndims=0."
        )
    if came[: len(batch)] == batch:
        return f" If the value is an array, pass its shape, value_shape={came[len(batch) :]}."
    return ""


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
    elif structures.is_sequence(like):
        if not structures.is_sequence(value) or len(value) != len(like):
            hint = " A list is a structure: if it is one array, pass it as tf.stack of the list."
            raise ValueError(
                f"{what} must be a {type(like).__name__} of {len(like)}, got {show(value)}."
                + hint * isinstance(like, list)
            )
        for i, (v, child) in enumerate(zip(value, like, strict=True)):
            yield from split(v, child, f"{what}[{i}]")
    elif tf.nest.is_nested(like):  # attrs classes, dataclasses
        tf.nest.assert_same_structure(like, value)
        yield from tf.nest.flatten(value)
    else:
        yield value


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


def refuse_options(form: str, given: Mapping[str, object]) -> None:
    """Raises a TypeError for options that do not exist, with advice for some."""
    for name in given:
        advice = _ADVICE.get(name, "")
        raise TypeError(f"{form}() got an unexpected keyword argument {name!r}.{advice}")


_MAPPED = (
    " The function of one member is mapped and compiled. If it cannot be, use from_numpy with its "
    "gradient by the framework, such as jax.value_and_grad(f)."
)
_ADVICE = {
    "has_aux": " Return further results as outputs of a dict, whose shapes are value_shape, with "
    "None as their gradients; or compute them from the draws.",
    "hess": " For second derivatives pass hessp: lambda x, v: hessian(x) @ v; or, by differences "
    "of the gradient, lambda x, v: (gradient(x + h * v) - gradient(x - h * v)) / (2 * h).",
    "static_argnums": " Bind values that are not arrays beforehand: functools.partial(f, n=3).",
    "vmap": _MAPPED,
    "jit": _MAPPED,
    "executor": " The framework evaluates a batch in one call.",
}


# The error for a derivative by an argument that has none.
DATA = (
    "{0} was asked for a derivative with respect to {1}, which argnums={2!r} leaves out: it is "
    "data. Add it to argnums and return its gradient, or use tf.stop_gradient of it."
)
