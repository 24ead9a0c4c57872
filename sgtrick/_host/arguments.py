"""Arguments of an engine: tensors with a common batch, each with its own event dimensions."""

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, shapes, structures
from sgtrick._arguments import dtypes as of_dtypes
from sgtrick._host import foreign
from sgtrick._host.contract import too_few_dimensions
from sgtrick._types import Args, DTypeLike, Kwargs, Structure, Tensor


def by_position(
    function: calls.Callee,
    args: Args,
    kwargs: Kwargs,
    event_ndims: Structure,
    name: str,
    *,
    own: int = 0,
) -> tuple[Args, list[tuple[str, Any, int]]]:
    """The arguments of an engine, and `(path, leaf, event_ndims)` for every leaf of them.

    Defaults that the call leaves out are not among them: the engine has them itself.

    Args:
        function: The engine.
        args: The arguments of the call.
        kwargs: Those by keyword.
        event_ndims: As the caller stated it.
        name: The name of the engine in errors.
        own: How many of the arguments, the first ones, are the instance or class of a method. They
            have no leaves.
    """
    call = function.bind(args, kwargs)
    given = [key for key in call.keywords if key not in call.left_out]
    if given:
        raise TypeError(
            f"{name} has keyword-only arguments {given}, but engines are called by position. Make "
            "them positional, or bind them with functools.partial."
        )
    names = function.names(call)[: call.positional]
    while names and names[-1] in call.left_out:
        names.pop()
    for key, value in zip(names, call.values, strict=False):
        if key in call.left_out and type(value) is not float:
            raise TypeError(
                f"{name} is called with {names[-1]}, which comes after the default {key}="
                f"{value!r}. All before it are sent as arrays, and that would be another value. "
                f"Bind {key} with functools.partial, or pass it."
            )
    given_args = tuple(call.values[: len(names)])
    by_argument = _event_ndims_of(event_ndims, names[own:], given_args[own:], call.positional - own)
    flat = []
    for key, arg, ndims in zip(names[own:], given_args[own:], by_argument, strict=True):
        foreign.refuse_tensors(name, key, arg)
        flat += _with_event_ndims(key, arg, ndims)
    return given_args, flat


def _event_ndims_of(
    stated: Structure, names: Sequence[str], args: Args, count: int
) -> Sequence[Structure]:
    """`event_ndims`, one for each argument; `count` includes those that the call leaves out."""
    if not is_by_argument(stated):
        if tf.nest.is_nested(stated) and len(names) > 1:
            raise ValueError(
                f"event_ndims={stated} is the structure of one argument, but there are "
                f"{len(names)} ({', '.join(names)}). Pass a tuple with one entry for each."
            )
        return [stated] * len(names)
    if len(stated) != len(names) and not len(names) < len(stated) <= count:
        raise ValueError(
            f"event_ndims must be an int, or a tuple with one entry for each of the {len(names)} "
            f"arguments ({', '.join(names)}), got {stated}."
            + f" For the parts of {names[0]}, pass a list."
            * (len(names) == 1)
        )
    if len(names) == 1 < len(stated) and _paths(args[0]) == _paths(stated):
        raise ValueError(
            f"event_ndims={stated} is a tuple, with one entry for each argument. But {names[0]} "
            "has as many parts, and the others are left out, so it may be meant for these: then "
            f"pass a list, {[*stated]}. If not, state each part of {names[0]} in the first entry."
        )
    return stated[: len(names)]


def is_by_argument(event_ndims: Structure) -> TypeGuard[tuple[Structure, ...]]:
    """Whether there is an entry for each argument; a list or a dict is the structure of one."""
    return isinstance(event_ndims, tuple) and not hasattr(event_ndims, "_fields")


def _paths(structure: Structure) -> list[str]:
    return [path for path, _ in structures.flatten(structure)]


def _with_event_ndims(name: str, arg: Structure, ndims: Structure) -> list[tuple[str, Any, int]]:
    """`(path, leaf, event_ndims)` for every leaf of an argument."""
    if not tf.nest.is_nested(ndims):
        flat = [(path, leaf, ndims) for path, leaf in structures.flatten(arg)]
    else:
        flat = structures.pair(arg, ndims, name, f"the event_ndims of {name}")
    for path, _, n in flat:
        if not (shapes.is_int(n) or isinstance(n, np.integer)) or n < 0:
            raise ValueError(
                "event_ndims must be a non-negative int, or one for each argument, got "
                f"{n!r} for {name}{path}."
            )
    return [(name + path, leaf, n) for path, leaf, n in flat]


def tensors_of(
    flat: Sequence[tuple[str, Any, int]], default: DTypeLike
) -> tuple[list[Tensor], list[DTypeLike | None], DTypeLike]:
    """The leaves as tensors, the dtypes of their gradients, and the dtype of the value."""
    # Convert first: a variable's dtype can differ from the one in which a Keras layer reads it.
    read = [
        None if type(leaf) is float else structures.to_tensor(leaf, path) for path, leaf, _ in flat
    ]
    # A Python float has no dtype of its own: it takes that of the others, or the engine's.
    floating = [x.dtype.name for x in read if x is not None and x.dtype.is_floating]
    common = tf.as_dtype(of_dtypes.widest(floating) or default)
    xs, dtypes = [], []
    for (path, leaf, ndims), x in zip(flat, read, strict=True):
        if x is None:
            x = structures.to_tensor(leaf, path, dtype=common)
        if x.dtype.is_complex:
            raise TypeError(
                f"{path} is complex ({x.dtype.name}), and an engine takes real arrays. Pass the "
                "real and the imaginary part as two arguments."
            )
        shape = structures.static_shape(x)
        if shape is not None and len(shape) < ndims:
            raise too_few_dimensions(path, shape, ndims)
        if x.dtype.is_floating and x.dtype.size < 4:
            # Gradients are added up over the batch, and in half precision a sum stops at 2,048.
            x = tf.cast(x, of_dtypes.widest(["float32", tf.as_dtype(default).name]))
        xs.append(x)
        dtypes.append(x.dtype.as_numpy_dtype if x.dtype.is_floating else None)
    return xs, dtypes, common.as_numpy_dtype


def broadcast_batches(
    xs: Sequence[Tensor], event_ndims: Sequence[int], paths: Sequence[str]
) -> tuple[list[Tensor], tf.TensorShape]:
    """The tensors broadcast to a common batch shape, and its static shape.

    Autodiff of the broadcast sums the gradients of a repeated tensor.
    """
    if not xs:
        return [], tf.TensorShape([])
    batches = [_front(x, n) for x, n in zip(xs, event_ndims, strict=True)]
    try:
        batch = functools.reduce(tf.broadcast_static_shape, batches)
    except ValueError as error:
        shown = ", ".join(
            f"{p} {shapes.show(structures.static_shape(x))}" for p, x in zip(paths, xs, strict=True)
        )
        raise ValueError(
            f"{shown} have batch shapes that do not broadcast, with event_ndims="
            f"{list(event_ndims)}. All dimensions before the event dimensions are batch: check "
            "event_ndims."
        ) from error
    if len(xs) == 1 or all(b.is_fully_defined() and b == batch for b in batches):
        return list(xs), batch
    shape = batch.as_list() if batch.is_fully_defined() else None
    if shape is None:
        xs = [_with_event(x, n, path) for x, n, path in zip(xs, event_ndims, paths, strict=True)]
        shape = functools.reduce(
            tf.broadcast_dynamic_shape,
            [tf.shape(x)[: tf.rank(x) - n] for x, n in zip(xs, event_ndims, strict=True)],
        )
    out = []
    for x, n in zip(xs, event_ndims, strict=True):
        y = tf.broadcast_to(x, tf.concat([shape, tf.shape(x)[tf.rank(x) - n :]], 0))
        known = x.shape.rank is not None
        y.set_shape(batch.concatenate(x.shape[x.shape.rank - n :] if known else [None] * n))
        out.append(y)
    return out, batch


def padded(xs: Sequence[Tensor], event_ndims: Sequence[int], batch_ndims: int) -> list[Tensor]:
    """The tensors with `batch_ndims` batch dimensions each, missing ones added with size 1."""
    tensors = []
    for x, n in zip(xs, event_ndims, strict=True):
        lacking = batch_ndims + n - x.shape.rank
        tensors.append(x[(tf.newaxis,) * lacking + (...,)] if lacking else x)
    return tensors


def _with_event(x: Tensor, event_ndims: int, path: str) -> Tensor:
    """Returns `x`, checked to have at least `event_ndims` dimensions (at run time in graphs)."""
    if x.shape.rank is not None:
        return x
    message = f"event_ndims={event_ndims}, but {path} has fewer dimensions:"
    return structures.checked(tf.rank(x) >= event_ndims, x, message)


def _front(x: Tensor, event_ndims: int) -> tf.TensorShape:
    """The static batch shape."""
    return x.shape if x.shape.rank is None else x.shape[: x.shape.rank - event_ndims]
