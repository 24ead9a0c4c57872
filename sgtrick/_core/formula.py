"""The formula `stop(f) + L(x - stop(x))`, and the maps that it is made of.

`z = x - stop(x)` is zero in value and the identity in derivative, and `L` is linear in `z`. So the
sum has the value of `f` and the derivative of `L`. It is written as `stop(f) - L(stop(x) - x)`,
since `-0.0 - 0.0` is `-0.0` and `-0.0 + 0.0` is not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core._tensorflow import unconverted
from sgtrick._leaves import Leaf


@unconverted
def formula(
    fx: Any,
    leaves: Sequence[Leaf],
    hessian_times: Callable[[list[Any]], list[Any]] | None = None,
    *,
    order: int | None,
) -> Any:
    """Returns `fx + sum_i <gx_i + 1/2 (H z)_i, z_i>`, where the caller has stopped `fx` and `gx_i`.

    Args:
        fx: The value, shape `B + R`.
        leaves: Points and Jacobians.
        hessian_times: Maps the `z_i` to the `(H z)_i`, each of the shape and dtype of its `gx_i`.
        order: Through which order derivatives are known. The next one is not finite, where the
            formula alone would have zero. None: all are.

    Returns:
        A tensor of the shape and dtype of `fx`, and of its value whatever the leaves hold.
    """
    # Where z is itself a factor of gradients, the guard of the sum comes too late.
    minus_z = [minus_zero(leaf.x, guard=True) for leaf in leaves]
    g = [leaf.gx for leaf in leaves]
    if hessian_times is not None:
        g = [g_i - hz_i / 2 for g_i, hz_i in zip(g, hessian_times(minus_z), strict=True)]
    leaves = [leaf._replace(gx=g_i) for leaf, g_i in zip(leaves, g, strict=True)]
    terms = linear(leaves, minus_z, fx.dtype)
    if order is not None:
        terms = [_unknown_beyond(order, _zero_or_guarded(tf.add_n(terms)))]
    return with_linear(fx, terms)


def _unknown_beyond(order: int, t: Any) -> Any:
    """Returns `t + t^(order + 1/2)`, for a `t` that is zero.

    The power adds nothing to derivatives through `order`. To the next one it adds what is not
    finite, in every direction: `0^(-1/2)` times the derivative of `t`, which is infinite or NaN.
    """
    if t.dtype.is_complex:
        re, im = tf.math.real(t), tf.math.imag(t)
        power = (re + im) ** (order + 0.5)
        return tf.complex(re + power, im + power)
    return t + t ** (order + 0.5)


def linear(leaves: Sequence[Leaf | None], z: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the terms `<gx_i, z_i>`; a leaf that is None has none."""
    return [
        cast(inner(leaf.gx, z_i, leaf.batch_ndims), dtype)
        for leaf, z_i in zip(leaves, z, strict=True)
        if leaf is not None
    ]


def minus_zero(x: Any, *, guard: bool = False) -> Any:
    """Returns `-z = stop(x) - x`; NaN where `x` is not finite, or with `guard` cut off there."""
    minus_z = tf.stop_gradient(x) - x
    return _zero_or_guarded(minus_z) if guard else minus_z


def with_linear(y: Any, minus_terms: Sequence[Any]) -> Any:
    """Returns `y - sum(minus_terms)` for terms that are zero: the value of `y` to the last bit.

    The derivative of an entry with a NaN is cut off.
    """
    h = y - _zero_or_guarded(tf.add_n(minus_terms))
    h.set_shape(y.shape)
    return h


def inner(c: Any, z: Any, batch_ndims: Any) -> Any:
    """Returns `<c, z>` over the domain of `z`, its dimensions after the batch.

    Shapes `B + E + D` and `B + D` give `B + E`. Zero entries of `z` count as zero and pull
    zero upstream back to zero, even where `c` is not finite.
    """
    z = tf.cast(z, c.dtype)
    rank, z_rank = _rank(c), _rank(z)
    product = _times(c, _insert_ones(z, batch_ndims, rank - z_rank))
    return _sum(product, rank - (z_rank - batch_ndims), rank)


def cast(t: Any, dtype: Any) -> Any:
    """`tf.cast` that takes the real part without complaint."""
    return tf.cast(tf.math.real(t) if t.dtype.is_complex and not dtype.is_complex else t, dtype)


def transpose(leaf: Leaf, upstream: Any) -> Any:
    """The transpose of `z -> <gx, z>`: `B + R` to `B + D`, contracting the range."""
    gx, b = leaf.gx, leaf.batch_ndims
    domain_ndims = _rank(leaf.x) - b
    last = _rank(gx) - domain_ndims
    u = _insert_ones(tf.cast(upstream, gx.dtype), last, domain_ndims)
    pulled = _times(tf.math.conj(gx) if gx.dtype.is_complex else gx, u)
    return cast(_sum(pulled, b, last), leaf.x.dtype)


def _times(c: Any, z: Any) -> Any:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite."""
    if not c.dtype.is_complex:
        return tf.math.multiply_no_nan(c, z)
    # The registered gradient of multiply_no_nan forgets to conjugate, so: by real parts.
    a, b = tf.math.real(c), tf.math.imag(c)
    re, im = tf.math.real(z), tf.math.imag(z)
    return tf.complex(_times(a, re) - _times(b, im), _times(a, im) + _times(b, re))


def _zero_or_guarded(t: Any) -> Any:
    """A tensor that is zero by construction, cut off where it came out NaN."""
    if t.dtype.is_complex:
        return tf.where(tf.equal(t, 0), t, tf.zeros([], t.dtype))
    # The same in kernels that TensorFlow runs at once and does not hand to another thread.
    return tf.math.multiply_no_nan(t, tf.cast(tf.math.is_finite(tf.stop_gradient(t)), t.dtype))


def _sum(t: Any, first: Any, last: Any) -> Any:
    """The sum over the dimensions from `first` to before `last`."""
    if not (isinstance(first, int) and isinstance(last, int)):
        return tf.reduce_sum(t, tf.range(first, last))
    return tf.reduce_sum(t, list(range(first, last))) if first < last else t


def _insert_ones(t: Any, axis: Any, count: Any) -> Any:
    """Makes room for broadcasting: `count` dimensions of size 1 before `axis`."""
    if isinstance(count, int) and (count == 0 or (isinstance(axis, int) and axis == 0)):
        return t  # leading ones are implied
    if isinstance(axis, int) and isinstance(count, int) and t.shape.is_fully_defined():
        shape = t.shape.as_list()
        return tf.reshape(t, [*shape[:axis], *[1] * count, *shape[axis:]])
    shape = tf.shape(t)
    return tf.reshape(t, tf.concat([shape[:axis], tf.ones([count], tf.int32), shape[axis:]], 0))


def _rank(t: Any) -> Any:
    """An int where it is known, else a tensor."""
    return tf.rank(t) if t.shape.rank is None else t.shape.rank
