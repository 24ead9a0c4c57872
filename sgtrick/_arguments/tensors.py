"""TensorFlow's operations for the value form, with support for unknown shapes and ranks."""

import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._arguments.backend import Backend
from sgtrick._types import Ndims, Tensor


def _rank(t: Tensor) -> Ndims:
    """An int if it is known, else a tensor."""
    return tf.rank(t) if t.shape.rank is None else t.shape.rank


def _conj(t: Tensor) -> Tensor:
    return tf.math.conj(t) if t.dtype.is_complex else t


def _times(c: Tensor, z: Tensor) -> Tensor:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite."""
    if not c.dtype.is_complex:
        return tf.math.multiply_no_nan(c, z)
    # The registered gradient of multiply_no_nan does not conjugate, so use real parts.
    a, b = tf.math.real(c), tf.math.imag(c)
    re, im = tf.math.real(z), tf.math.imag(z)
    return tf.complex(_times(a, re) - _times(b, im), _times(a, im) + _times(b, re))


def _sum(t: Tensor, first: Ndims, last: Ndims) -> Tensor:
    if not (isinstance(first, int) and isinstance(last, int)):
        return tf.reduce_sum(t, tf.range(first, last))
    return tf.reduce_sum(t, list(range(first, last))) if first < last else t


def _insert_ones(t: Tensor, axis: Ndims, count: Ndims) -> Tensor:
    if isinstance(count, int) and (count == 0 or (isinstance(axis, int) and axis == 0)):
        return t  # leading ones are implied
    if isinstance(axis, int) and isinstance(count, int) and t.shape.is_fully_defined():
        shape = t.shape.as_list()
        return tf.reshape(t, [*shape[:axis], *[1] * count, *shape[axis:]])
    shape = tf.shape(t)
    return tf.reshape(t, tf.concat([shape[:axis], tf.ones([count], tf.int32), shape[axis:]], 0))


def _swap(t: Tensor, i: Ndims, j: Ndims) -> Tensor:
    rank = tf.rank(t)
    front, middle = tf.range(rank - i - j), tf.range(rank - i - j, rank - j)
    return tf.transpose(t, tf.concat([front, tf.range(rank - j, rank), middle], 0))


def _may_be_of_one_value(fx: Tensor, gx: Tensor, x: Tensor, batch_ndims: Ndims) -> bool:
    """Whether `gx` may lack the dimensions of a value of one entry, or be of rank 0."""
    if any(n not in (1, None) for n in structures.static_shape(fx) or ()):
        return False
    has_all = None not in (fx.shape.rank, gx.shape.rank, x.shape.rank) and (
        gx.shape.rank == fx.shape.rank + x.shape.rank
    )
    return not has_all and (tf.is_tensor(batch_ndims) or batch_ndims == 0)


def _check_at_run_time(
    fx: Tensor, gx: Tensor, x: Tensor, batch_ndims: Ndims | None, names: shapes.Names
) -> tuple[Tensor, Ndims]:
    """The checks of `shapes` as graph ops; returns `gx` and `len(B)`."""
    b = batch_ndims
    if not tf.is_tensor(b):  # that of another leaf whose rank is unknown is a tensor
        known = structures.static_shape(fx), structures.static_shape(gx), structures.static_shape(x)
        b = shapes.infer_batch_ndims(*known, b, names)
    fx_shape, gx_shape, x_shape = tf.shape(fx), tf.shape(gx), tf.shape(x)
    if b is None:
        is_batch = tf.equal(tf.rank(gx), tf.rank(x)) & structures.equal_shapes(
            fx_shape, x_shape[: tf.rank(fx)]
        )
        b = tf.where(is_batch, tf.rank(fx), 0)
    if _may_be_of_one_value(fx, gx, x, b):
        # A gx of rank 0 is the same partial derivative for every entry.
        lacks = tf.equal(tf.rank(gx), 0) | tf.equal(tf.rank(gx), tf.rank(x))
        lacks &= tf.equal(tf.size(fx), 1) & tf.equal(b, 0)
        shape = tf.concat([fx_shape, x_shape], 0)
        n = tf.where(lacks, tf.size(shape) - tf.rank(gx), 0)
        gx_shape = tf.concat([shape[:n], gx_shape], 0)
        gx = tf.broadcast_to(gx, gx_shape)
    fits = (
        tf.equal(tf.size(fx_shape[:b]), b)
        & structures.equal_shapes(fx_shape[:b], x_shape[:b])
        & structures.equal_shapes(gx_shape, tf.concat([fx_shape, x_shape[b:]], 0))
    )
    message = (
        f"{names.gx}, {names.fx} and {names.x} do not fit together. Their shapes, listed below, "
        "must be B + R + D, B + R and B + D, with batch, range and domain shapes B, R and D."
    )
    gx = structures.checked(fits, gx, message, fx, x)
    if isinstance(b, int):
        gx.set_shape(fx.shape.concatenate(x.shape[b:]))
    return gx, b


TENSORFLOW = Backend(
    name="TensorFlow",
    to_tensor=structures.to_tensor,
    dtype_of=lambda t: t.dtype.name,
    shape_of=structures.static_shape,
    rank=_rank,
    as_dtype=tf.cast,
    real=tf.math.real,
    conj=_conj,
    zeros_like=tf.zeros_like,
    add=tf.add_n,
    times=_times,
    broadcast_to=tf.broadcast_to,
    insert_ones=_insert_ones,
    swap=_swap,
    sum=_sum,
    pack=tf.nest.pack_sequence_as,
    check_at_run_time=_check_at_run_time,
    shaped_like=structures.shaped_like,
)
