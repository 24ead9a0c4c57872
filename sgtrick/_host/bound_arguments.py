"""Arguments of an engine: tensors with a common batch, each with its own event dimensions."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, shapes, structures
from sgtrick._arguments import dtypes as of_dtypes
from sgtrick._host.checks import too_few_dimensions
from sgtrick._types import Argnums, Args, DTypeLike, Kwargs, Structure, Tensor


class SentLeaf(NamedTuple):
    """A leaf that is sent to the engine as an array, without the numbers in it.

    Attributes:
        path: Its name.
        event: Its event shape, as far as it is known.
        dtype: The dtype of its gradient; None for a leaf that is not floating.
        is_point: Whether it has derivatives.
        is_text: Whether it was passed as text, of which TensorFlow makes bytes.
    """

    path: str
    event: shapes.Shape
    dtype: DTypeLike | None
    is_point: bool
    is_text: bool


class Leaf(NamedTuple):
    """A leaf of the arguments.

    Attributes:
        path: Its name.
        x: The tensor; or a number or text of Python, which the engine gets as it is.
        ndims: Its number of event dimensions.
        is_selected: Whether its argument has gradients.
        is_text: Whether it was passed as text.
    """

    path: str
    x: Any
    ndims: int
    is_selected: bool = True
    is_text: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it is sent as an array."""
        return isinstance(self.x, tf.Tensor)

    @property
    def is_floating(self) -> bool:
        """Whether it is an array of the engine's dtype."""
        return self.is_tensor and bool(self.x.dtype.is_floating)

    @property
    def is_point(self) -> bool:
        """Whether it has derivatives."""
        return self.is_selected and self.is_floating

    @property
    def batch_ndims(self) -> int:
        """The number of its batch dimensions."""
        return int(self.x.shape.rank - self.ndims) if self.is_tensor else 0

    @property
    def event(self) -> shapes.Shape:
        """Its event shape, as far as it is known."""
        return tuple(self.x.shape[self.batch_ndims :].as_list()) if self.is_tensor else ()

    @property
    def sent(self) -> SentLeaf | None:
        """What is sent; None for what the engine gets as it is."""
        if not self.is_tensor:
            return None
        is_floating = self.x.dtype.is_floating  # asked once: an eager call takes microseconds
        dtype = self.x.dtype.as_numpy_dtype if is_floating else None
        return SentLeaf(
            self.path, self.event, dtype, self.is_selected and is_floating, self.is_text
        )


class BoundArguments(NamedTuple):
    """The arguments of a call, by position.

    Attributes:
        names: Their names.
        like: Their structure, with None as the leaves.
        leaves: Their leaves.
        selected: The positions of those that have gradients, in the order of these.
        dtype: The dtype of the value.
    """

    names: Sequence[str]
    like: Structure
    leaves: list[Leaf]
    selected: Sequence[int]
    dtype: DTypeLike


def bind(
    function: calls.Callee,
    args: Args,
    kwargs: Kwargs,
    event_ndims: Structure,
    argnums: Argnums | None,
    name: str,
    default: DTypeLike,
) -> BoundArguments:
    """The arguments of a call. Defaults that it leaves out are not among them.

    Args:
        function: The engine.
        args: The arguments by position.
        kwargs: The arguments by keyword.
        event_ndims: As the caller stated it.
        argnums: As the caller stated it.
        name: The name of the engine in errors.
        default: The dtype of the value if no argument is floating.
    """
    call = function.bind(args, kwargs)
    usual = function.defaulted(call)  # other forms pass all defaults on
    by_keyword = [key for key in call.keywords if key not in usual]
    if by_keyword:
        raise TypeError(
            f"{name} has keyword-only arguments {by_keyword}, but engines are called by position. "
            "Make them positional, or bind them with functools.partial."
        )
    names = function.names(call)[: call.positional]
    while names and (
        names[-1] in call.left_out
        or (names[-1] in usual and call.values[len(names) - 1] is None)  # out=None of NumPy
    ):
        names.pop()
    for key, value in zip(names, call.values, strict=False):
        if key in call.left_out and type(value) not in _OF_PYTHON:
            raise TypeError(
                f"{name} is called with {names[-1]}, which comes after the default {key}="
                f"{value!r}. All before it are sent as arrays, and that would be another value. "
                f"Bind {key} with functools.partial, or pass it."
            )
    values = tuple(call.values[: len(names)])
    selected: Sequence[int] = range(len(names))
    if argnums is not None:
        selected = function.positions(argnums, call)
        for k in selected:
            if k >= len(names):
                raise ValueError(
                    f"argnums={argnums!r} selects an argument of {name} that the call leaves to "
                    "its default. Pass it."
                )
    by_argument = _event_ndims_of(event_ndims, names, values, call.positional)
    flat = [
        Leaf(path, leaf, n, k in selected)
        for k, (key, arg, ndims) in enumerate(zip(names, values, by_argument, strict=True))
        for path, leaf, n in _with_event_ndims(key, arg, ndims)
    ]
    for leaf in flat:
        _refuse_foreign(name, leaf)
    # Only the structure: TensorFlow keeps callbacks alive, and tensors keep their graph alive.
    is_flat = not any(map(tf.nest.is_nested, values))
    like = (None,) * len(values) if is_flat else _emptied(values, names)
    leaves, dtype = _read(flat, default)
    return BoundArguments(names, like, leaves, selected, dtype)


def _emptied(values: Args, names: Sequence[str]) -> Structure:
    """The arguments with None as their leaves."""
    try:
        return tf.nest.map_structure(lambda _: None, values)
    except (TypeError, ValueError):
        copies = tuple(map(structures.copied, values))
        for value, copy, name in zip(values, copies, names, strict=True):
            if copy is None and tf.nest.is_nested(value):
                raise structures.no_structure(value, name) from None
        return tf.nest.map_structure(lambda _: None, copies)


# What the engine gets as it is. Nothing has been recorded of these.
_OF_PYTHON = (bool, int, float, str, bytes)


def _event_ndims_of(
    stated: Structure, names: Sequence[str], args: Args, count: int
) -> Sequence[Structure]:
    """`event_ndims`, one for each argument; `count` includes those that the call leaves out."""
    if not _is_by_argument(stated):
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


def _is_by_argument(event_ndims: Structure) -> TypeGuard[tuple[Structure, ...]]:
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
        if not shapes.is_int(n) or n < 0:
            raise ValueError(
                "event_ndims must be a non-negative int, or one for each argument, got "
                f"{n!r} for {name}{path}."
            )
    return [(name + path, leaf, n) for path, leaf, n in flat]


_TENSORS = {"jax": "Array", "torch": "Tensor"}
_CALLS = {
    "jax": "jax.pure_callback(engine, shapes, jax.lax.stop_gradient(x))",
    "torch": "engine(x.detach().numpy())",
}


def _refuse_foreign(engine: str, leaf: Leaf) -> None:
    """Raises for tensors of JAX and PyTorch, from which TensorFlow would take only the value.

    Or for a Keras variable that holds one. Neither framework is imported here. Other forms take
    these tensors as arrays, unless they are being differentiated, which
    `structures.check_supported` finds; engines have a use for them, which the error says.
    """
    for framework, kind in _TENSORS.items():
        tensor = getattr(sys.modules.get(framework), kind, None)
        if tensor is None:
            continue
        if isinstance(leaf.x, tensor) or isinstance(getattr(leaf.x, "value", None), tensor):
            raise TypeError(
                f"{engine} takes tensors of TensorFlow, and {leaf.path} is one of {framework}, "
                "which would get no gradient. Call the engine without from_numpy instead: "
                f"value, gradient = {_CALLS[framework]}, and then "
                "sgtrick.keras.custom_gradient(value, gradient, x)."
            )


def _read(flat: Sequence[Leaf], default: DTypeLike) -> tuple[list[Leaf], DTypeLike]:
    """The leaves as tensors, and the dtype of the value."""
    leaves, floating = list[Leaf](), []
    for leaf in flat:
        shape: shapes.Shape = ()
        if type(leaf.x) not in _OF_PYTHON:
            # The dtype of a variable can differ from that in which a Keras layer reads it.
            x = structures.to_tensor(leaf.x, leaf.path)
            if any(x is other.x for other in leaves):  # passed twice: each place has its gradient
                x = standing_for(x, tf.identity(x))
            is_text = isinstance(leaf.x, (np.ndarray, np.str_)) and leaf.x.dtype.kind == "U"
            leaf = leaf._replace(x=x, is_text=is_text)
            if x.dtype.is_complex:
                raise TypeError(
                    f"{leaf.path} is complex ({x.dtype.name}), and an engine takes real arrays. "
                    "Pass the real and the imaginary part as two arguments."
                )
            if x.shape.rank is None:
                raise ValueError(
                    f"{leaf.path} has an unknown rank. Set its rank, for example by "
                    "tf.ensure_shape."
                )
            shape = tuple(x.shape.as_list())
        if len(shape) < leaf.ndims:
            raise too_few_dimensions(leaf.path, shape, leaf.ndims)
        if leaf.is_floating:
            floating.append(leaf.x.dtype.name)
            if leaf.x.dtype.size < 4:
                # Gradients are added up over the batch, and in half precision this stops at 2,048.
                dtype = of_dtypes.widest(["float32", tf.as_dtype(default).name])
                leaf = leaf._replace(x=standing_for(leaf.x, tf.cast(leaf.x, dtype)))
        leaves.append(leaf)
    # A Python float has no dtype of its own.
    return leaves, tf.as_dtype(of_dtypes.widest(floating) or default).as_numpy_dtype


def broadcast_batches(leaves: Sequence[Leaf]) -> tuple[list[Tensor], tf.TensorShape]:
    """The leaves broadcast to a common batch shape, and its static shape.

    Autodiff of the broadcast sums the gradients of a repeated tensor.
    """
    if not leaves:
        return [], tf.TensorShape([])
    batches = [tf.TensorShape(leaf.x.shape[: leaf.batch_ndims]) for leaf in leaves]
    try:
        batch = functools.reduce(tf.broadcast_static_shape, batches)
    except ValueError as error:
        shown = (f"{leaf.path} {shapes.show(tuple(leaf.x.shape.as_list()))}" for leaf in leaves)
        raise ValueError(
            f"{', '.join(shown)} have batch shapes that do not broadcast, with event_ndims="
            f"{[leaf.ndims for leaf in leaves]}. All dimensions before the event dimensions are "
            "batch: check event_ndims."
        ) from error
    if len(leaves) == 1 or all(b.is_fully_defined() and b == batch for b in batches):
        return [leaf.x for leaf in leaves], batch
    shape = batch.as_list() if batch.is_fully_defined() else None
    if shape is None:
        dynamic = [tf.shape(leaf.x)[: leaf.batch_ndims] for leaf in leaves]
        shape = functools.reduce(tf.broadcast_dynamic_shape, dynamic)
    out = []
    for leaf in leaves:
        event = tf.shape(leaf.x)[leaf.batch_ndims :]
        y = tf.broadcast_to(leaf.x, tf.concat([shape, event], 0))
        y.set_shape(batch.concatenate(leaf.event))
        out.append(standing_for(leaf.x, y))
    return out, batch


def padded(leaf: Leaf, batch_ndims: int) -> Tensor:
    """The tensor with `batch_ndims` batch dimensions, missing ones added with size 1."""
    lacking = batch_ndims - leaf.batch_ndims
    return standing_for(leaf.x, leaf.x[(tf.newaxis,) * lacking + (...,)]) if lacking else leaf.x


def standing_for(x: Tensor, y: Tensor) -> Tensor:
    """Returns `y`, of which errors know that who asks for it asks for `x`."""
    if tf.executing_eagerly() and y is not x:
        setattr(y, structures.ORIGIN, x)
    return y
