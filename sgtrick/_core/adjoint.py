"""The dot-product test: whether one function is the transpose of another.

For a linear `L` and its transpose, `<u, L t> = <L' u, t>`. If TensorFlow lost a part of `L` when
transposing it, for example at a host call, or if `L` is not linear, the two sides differ for almost
all `u` and `t`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._core._tensorflow import tracing
from sgtrick._core.types import Array, DType, Gradient, Tangent, Tensor


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
    left, right = _pairs(us, lt), _pairs(lu, ts)
    tensors = [t for pair in [*left, *right] for t in pair]
    return tracing.as_one(_Balance(len(left)), *tensors)


@dataclasses.dataclass(frozen=True)
class _Balance:
    """Whether the first `count` products have the same sum as the others."""

    count: int

    def __call__(self, *tensors: Tensor) -> Tensor:
        terms = [_term(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        if not terms:
            return tf.constant(True)
        wide = any(t.dtype == tf.float64 for t in terms)
        dtype = tf.float64 if wide else tf.float32
        sums = [tf.cast(tf.reduce_sum(t), dtype) for t in terms]
        sizes = [tf.cast(tf.reduce_sum(tf.abs(t)), dtype) for t in terms]
        difference = tf.add_n([s if i < self.count else -s for i, s in enumerate(sums)])
        return are_near(difference, tf.add_n(sizes), max(_eps(t.dtype) for t in tensors))


def is_multiple(many: Sequence[Tensor], ones: Sequence[Tensor], factor: int) -> Tensor:
    """Whether `many` are `factor` times `ones`, up to rounding; true where they are NaN."""
    if len(many) != len(ones):
        return tf.constant(False)
    return tracing.as_one(_Multiple(factor), *many, *ones)


@dataclasses.dataclass(frozen=True)
class _Multiple:
    """Whether the first half of the tensors are `factor` times the others."""

    factor: int

    def __call__(self, *tensors: Tensor) -> Tensor:
        n = len(tensors) // 2
        fits = []
        for m, o in zip(tensors[:n], tensors[n:], strict=True):
            expected = tf.cast(self.factor, o.dtype) * o
            wrong = tf.reduce_sum(tf.abs(m - expected))
            fits.append(are_near(wrong, tf.reduce_sum(tf.abs(expected)), _eps(o.dtype)))
        return tf.reduce_all(tf.stack(fits))


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


def probe(like: Tensor) -> Tensor:
    """A generic direction: fixed pseudo-random numbers of order 1."""
    dtype = like.dtype
    size = like.shape.num_elements()
    numbers = _numbers(dtype.real_dtype)
    if size is not None and size <= len(numbers):
        t = tf.constant(numbers[:size].reshape(like.shape))
    else:
        flat = tf.constant(numbers)
        n = tf.size(like)
        t = tf.reshape(tf.tile(flat, [n // len(numbers) + 1])[:n], tf.shape(like))
        t.set_shape(like.shape)
    return (
        tf.complex(t, t[..., ::-1]) if dtype.is_complex and like.shape.rank else tf.cast(t, dtype)
    )


@functools.cache
def _numbers(dtype: DType) -> Array:
    # A prime count, so that tiles never align with the rows of a matrix.
    return np.random.default_rng(0).normal(size=1009).astype(dtype.as_numpy_dtype)


def _pairs(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The pairs without None, which means zero."""
    return [
        (tf.convert_to_tensor(p), tf.convert_to_tensor(q))
        for p, q in zip(a, b, strict=True)
        if p is not None and q is not None
    ]


def _term(p: Tensor, q: Tensor) -> Tensor:
    return tf.math.real(tf.math.conj(p) * q) if p.dtype.is_complex else p * q


def _eps(dtype: DType) -> float:
    if dtype == tf.bfloat16:  # NumPy does not know it
        return 2.0**-7
    return float(np.finfo(dtype.real_dtype.as_numpy_dtype).eps)
