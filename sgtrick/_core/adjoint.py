"""The dot-product test: whether one function is the transpose of another.

For a linear `L` and its transpose, `<u, L t> = <L' u, t>`. If TensorFlow lost a part of `L` when
transposing it, for example at a host call, or if `L` is not linear, the two sides differ for almost
all `u` and `t`. But `t` must not be where `L'` was obtained by differentiating `L`: by Euler's
theorem, `L'(t) t = L(t)` for every `L` that is positively homogeneous, such as an absolute value, a
norm, or sorting. So `L` is differentiated at `far_probes`, and tested at `probes`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._tensorflow import tracing
from sgtrick._types import Array, DType, Gradient, Tangent, Tensor

# Tensors, and as many others of the same dtypes.
Paired = tuple[list[Tensor], list[Tensor]]


def holds(
    us: Sequence[Tensor], lt: Sequence[Tangent], lu: Sequence[Gradient], ts: Sequence[Tensor]
) -> Tensor:
    """Whether `<us, lt> = <lu, ts>` up to rounding; true if the sums are not finite.

    Args:
        us: Upstream gradients.
        lt: `L ts`, like `us`; None is zero.
        lu: `L' us`, like `ts`; None is zero.
        ts: Tangents.
    """
    (lt, us), (lu, ts) = paired(lt, us), paired(lu, ts)
    return tracing.as_one(_Balance(len(us)), *lt, *lu, *us, *ts)


@dataclasses.dataclass(frozen=True)
class _Balance:
    """Whether the first `count` products have the same sum as the others."""

    count: int

    def __call__(self, *tensors: Tensor) -> Tensor:
        half = len(tensors) // 2
        terms = list(map(_term, tensors[:half], tensors[half:]))
        if not terms:
            return tf.constant(True)
        wide = any(t.dtype == tf.float64 for t in terms)
        dtype = tf.float64 if wide else tf.float32
        sums = [tf.cast(tf.reduce_sum(t), dtype) for t in terms]
        sizes = [tf.cast(tf.reduce_sum(tf.abs(t)), dtype) for t in terms]
        difference = tf.add_n([s if i < self.count else -s for i, s in enumerate(sums)])
        return are_near(difference, tf.add_n(sizes), max(_eps(t.dtype) for t in tensors))


def are_near(difference: Tensor, size: Tensor, eps: float | None = None) -> Tensor:
    """Whether differences are rounding, entry by entry; true where they are NaN.

    Args:
        difference: Differences of numbers.
        size: The sizes of what was added up to compute these numbers.
        eps: The rounding unit, by default that of the dtype.
    """
    # Rounding in what is compared is not bounded by eps, so compare only half of the digits.
    tolerance = tf.cast((_eps(size.dtype) if eps is None else eps) ** 0.5, size.dtype)
    # Not written as "not greater", which TensorFlow's optimizer turns into "less or equal", false
    # for NaN. Stopped, since the second JVP of is_nan fails in a function.
    return (tf.abs(difference) <= tolerance * size) | tf.math.is_nan(tf.stop_gradient(difference))


def probes(likes: Sequence[Tensor]) -> list[Tensor]:
    """Generic directions: fixed pseudo-random numbers of order 1."""
    return [_direction(t, k, far=False) for k, t in enumerate(likes)]


def far_probes(likes: Sequence[Tensor]) -> list[Tensor]:
    """Other ones, about a thousand times as large and of the opposite signs.

    A function that clips, or that depends on signs or on the order of entries, is not linear in the
    same way here and there, entry by entry.
    """
    return [_direction(t, k, far=True) for k, t in enumerate(likes)]


_MANY = 1024  # a power of two, so that scaling does not round


def _direction(like: Tensor, k: int, *, far: bool) -> Tensor:
    size = like.shape.num_elements()
    if size is not None and size <= _COUNT:
        return tf.constant(numbers(tuple(like.shape), like.dtype, k, far=far))
    flat = tf.constant(numbers((_COUNT,), like.dtype, k, far=far))
    n = tf.size(like)
    t = tf.reshape(tf.tile(flat, [n // _COUNT + 1])[:n], tf.shape(like))
    t.set_shape(like.shape)
    return t


_COUNT = 1009  # a prime number, so that tiles never align with the rows of a matrix


@functools.lru_cache(1024)
def numbers(shape: tuple[int, ...], dtype: DType, k: int, *, far: bool) -> Array:
    """Those for the tensor at position `k`."""
    e = np.random.default_rng(k).uniform(size=[2, *shape])
    # A third has the other sign: neighbours differ, and signs alone do not cancel out.
    few = np.indices(e.shape).sum(0) % 3 == 2
    signs = np.where(few, -1, 1)
    # The smaller of any two entries is the larger one far away, and of two with different signs
    # also the one whose size is smaller.
    re, im = -signs * _MANY * 2 ** (e**2 - 1 + few) if far else signs * 2 ** (e - few)
    both: Array = re + 1j * im if dtype.is_complex else re
    return both.astype(dtype.as_numpy_dtype)


def paired(some: Sequence[Gradient], others: Sequence[Tensor | None]) -> Paired:
    """The pairs without None, as tensors of one dtype: such as gradients and tangents."""
    pairs = [
        (tf.convert_to_tensor(a), b)  # IndexedSlices, for a table that is gathered from
        for a, b in zip(some, others, strict=True)
        if a is not None and b is not None
    ]
    return [a for a, _ in pairs], [tf.cast(b, a.dtype) for a, b in pairs]


def _term(p: Tensor, q: Tensor) -> Tensor:
    if p.dtype.is_complex:
        return tf.math.real(tf.math.conj(p) * q)
    return structures.wide(p) * structures.wide(q)


def _eps(dtype: DType) -> float:
    if dtype == tf.bfloat16:  # NumPy does not know it
        return 2.0**-7
    return float(np.finfo(dtype.real_dtype.as_numpy_dtype).eps)
