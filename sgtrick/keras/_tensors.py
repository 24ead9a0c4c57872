"""The operations that Keras supplies to the value form, on jax and torch."""

import functools
import operator

from keras import backend, ops

from sgtrick._arguments import shapes, structures
from sgtrick._arguments.backend import Backend
from sgtrick._types import Ndims
from sgtrick.keras import _backends, _structures
from sgtrick.keras._types import Tensor, TensorLike


def _to_tensor(value: TensorLike, name: str, *, dtype: str | None = None) -> Tensor:
    try:
        return ops.convert_to_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise structures.no_tensor(value, name, error) from error


def _dtype_of(t: Tensor) -> str:
    try:
        return str(backend.standardize_dtype(t.dtype))
    except ValueError:  # Keras does not know that of the keys of JAX
        return str(t.dtype)


def _shape_of(t: Tensor) -> shapes.Shape | None:
    shape = t.shape  # on tensorflow, rules may get tensors of unknown rank
    return None if getattr(shape, "rank", 0) is None else tuple(shape)


def _broadcast_to(t: Tensor, shape: shapes.Shape) -> Tensor:
    if backend.backend() == "torch":  # whose broadcast_to has no rule for batched gradients
        return t.expand(tuple(shape))
    return ops.broadcast_to(t, shape)


def _times(c: Tensor, z: Tensor) -> Tensor:
    return _backends.native().times(c, _broadcast_to(z, c.shape))


def _insert_ones(t: Tensor, axis: int, count: int) -> Tensor:
    shape = tuple(t.shape)
    return ops.reshape(t, [*shape[:axis], *[1] * count, *shape[axis:]])


def _swap(t: Tensor, i: int, j: int) -> Tensor:
    n = len(t.shape)
    return ops.transpose(t, [*range(n - i - j), *range(n - j, n), *range(n - i - j, n - j)])


def _sum(t: Tensor, first: int, last: int) -> Tensor:
    return ops.sum(t, tuple(range(first, last))) if first < last else t


def _check(
    fx: Tensor, gx: Tensor, x: Tensor, batch_ndims: int | None, names: shapes.Names
) -> tuple[Tensor, Ndims]:
    """Checks known dimensions; the others of symbolic tensors are checked when called."""
    known = tuple(fx.shape), tuple(gx.shape), tuple(x.shape)
    inferred = shapes.infer_batch_ndims(*known, batch_ndims, names)
    return gx, len(fx.shape) if inferred is None else inferred


def _shaped_like(t: Tensor, like: Tensor, name: str, like_name: str) -> Tensor:
    shapes.check_equal(_shape_of(t), _shape_of(like), name, like_name)
    return t


KERAS = Backend(
    name=backend.backend(),
    to_tensor=_to_tensor,
    dtype_of=_dtype_of,
    shape_of=_shape_of,
    rank=lambda t: len(t.shape),
    as_dtype=ops.cast,
    real=ops.real,
    conj=ops.conj,
    zeros_like=ops.zeros_like,
    add=functools.partial(functools.reduce, operator.add),
    times=_times,
    broadcast_to=_broadcast_to,
    insert_ones=_insert_ones,
    swap=_swap,
    sum=_sum,
    pack=_structures.pack,
    check_at_run_time=_check,
    shaped_like=_shaped_like,
)
