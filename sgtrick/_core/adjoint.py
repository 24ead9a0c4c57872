"""The dot-product test: whether one function is the transpose of another.

For a linear `L` and its transpose, `<u, L t> = <L' u, t>`. Where TensorFlow transposed `L` and lost
a part on the way, at a host call say, or where `L` is not linear, the two sides differ for almost
all `u` and `t`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def holds(us: Sequence[Any], lt: Sequence[Any], lu: Sequence[Any], ts: Sequence[Any]) -> Any:
    """Whether `<us, lt> = <lu, ts>` to within rounding; true where the sums are not finite.

    Args:
        us: Upstream gradients.
        lt: `L ts`, like `us`; None is zero.
        lu: `L' us`, like `ts`; None is zero.
        ts: Tangents.
    """
    left, right = _terms(us, lt), _terms(lu, ts)
    if not left and not right:
        return tf.constant(True)
    wide = any(t.dtype == tf.float64 for t in [*left, *right])
    sum_ = functools.partial(_sum, tf.float64 if wide else tf.float32)
    sums = [*map(sum_, left), *(-sum_(t) for t in right)]
    size = tf.add_n([sum_(tf.abs(t)) for t in [*left, *right]])
    eps = max(_eps(t.dtype) for t in (*us, *ts) if t is not None)
    # Rounding in L itself is not bounded by eps: half of the digits decide.
    difference = tf.add_n(sums)
    fits = tf.abs(difference) <= eps**0.5 * size
    # Not as "not greater", which TensorFlow's optimizer makes "less or equal", false for NaN.
    # Stopped, for the second JVP of is_nan fails in a function.
    return fits | tf.math.is_nan(tf.stop_gradient(difference))


def is_multiple(many: Sequence[Any], ones: Sequence[Any], factor: int) -> Any:
    """Whether `many` are `factor` times `ones`, to within rounding; true where they are NaN."""
    if len(many) != len(ones):
        return tf.constant(False)
    fits = []
    for m, o in zip(many, ones, strict=True):
        expected = tf.cast(factor, o.dtype) * o
        wrong = tf.reduce_sum(tf.abs(m - expected))
        size = tf.reduce_sum(tf.abs(expected))
        near = wrong <= tf.cast(_eps(o.dtype) ** 0.5, size.dtype) * size
        fits.append(near | tf.math.is_nan(tf.stop_gradient(wrong)))
    return tf.reduce_all(tf.stack(fits))


def probe(like: Any) -> Any:
    """A direction that no structure favours: fixed pseudo-random numbers of the size of 1."""
    dtype = like.dtype
    size = like.shape.num_elements()
    numbers = _numbers(dtype.real_dtype)
    if size is not None and size <= len(numbers):
        flat = tf.constant(numbers[:size])
        t = tf.reshape(flat, like.shape)
    else:
        flat = tf.constant(numbers)
        n = tf.size(like)
        t = tf.reshape(tf.tile(flat, [n // len(numbers) + 1])[:n], tf.shape(like))
        t.set_shape(like.shape)
    return (
        tf.complex(t, t[..., ::-1]) if dtype.is_complex and like.shape.rank else tf.cast(t, dtype)
    )


@functools.cache
def _numbers(dtype: Any) -> Any:
    # A prime count, so that tiling them never falls into step with the rows of a matrix.
    return np.random.default_rng(0).normal(size=1009).astype(dtype.as_numpy_dtype)


def _terms(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [
        tf.math.real(tf.math.conj(p) * q) if p.dtype.is_complex else p * q
        for p, q in (
            (tf.convert_to_tensor(p), tf.convert_to_tensor(q))
            for p, q in zip(a, b, strict=True)
            if p is not None and q is not None
        )
    ]


def _sum(dtype: Any, t: Any) -> Any:
    return tf.cast(tf.reduce_sum(t), dtype)


def _eps(dtype: Any) -> float:
    if dtype == tf.bfloat16:  # which NumPy does not know
        return 2.0**-7
    return float(np.finfo(dtype.real_dtype.as_numpy_dtype).eps)
