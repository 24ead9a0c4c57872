"""The formula `stop(f) + L(x - stop(x))`, and the same meaning as a pullback for eager execution.

`z = x - stop(x)` is zero in value and the identity in derivative, and `L` is linear in `z`. So the
sum has the value of `f` and the derivative of `L`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._leaves import Leaf


def embed(fx: Any, leaves: Sequence[Leaf], scope: Callable[[], Any]) -> Any:
    """Returns `fx`, stopped, with the Jacobians of `leaves`: of first order by construction.

    One meaning by two kernels. Traced code gets the formula, which no transformation can drop. Code
    that runs eagerly gets a pullback, which TensorFlow honours there and which takes a fraction of
    the time.

    Args:
        fx: The value, shape `B + R`.
        leaves: Points and Jacobians.
        scope: Makes the device scope of backward ops.
    """
    if not leaves or not eager():
        return formula(fx, leaves)
    return with_pullback(
        fx,
        [leaf.x for leaf in leaves],
        lambda upstream: [transpose(leaf, upstream) for leaf in leaves],
        scope,
    )


def formula(
    fx: Any,
    leaves: Sequence[Leaf],
    hessian_times: Callable[[list[Any]], list[Any]] | None = None,
    *,
    stop: Callable[[Any], Any] = tf.stop_gradient,
) -> Any:
    """Returns `stop(fx) + sum_i <stop(gx_i) + 1/2 (H z)_i, z_i>`.

    Args:
        fx: The value, shape `B + R`.
        leaves: Points and Jacobians.
        hessian_times: Maps the `z_i` to the `(H z)_i`, each of the shape and dtype of its `gx_i`.
        stop: What is applied to `fx` and to the Jacobians.

    Returns:
        A tensor of the shape and dtype of `fx`, and of its value whatever the leaves hold.
    """
    # Where z is itself a factor of gradients, the guard of the sum comes too late.
    guard = hessian_times is not None or stop is not tf.stop_gradient
    z = [zero(leaf.x, guard=guard) for leaf in leaves]
    g = [stop(leaf.gx) for leaf in leaves]
    if hessian_times is not None:
        g = [g_i + hz_i / 2 for g_i, hz_i in zip(g, hessian_times(z), strict=True)]
    leaves = [leaf._replace(gx=g_i) for leaf, g_i in zip(leaves, g, strict=True)]
    return with_linear(stop(fx), linear(leaves, z, fx.dtype))


def linear(leaves: Sequence[Leaf | None], z: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns the terms `<gx_i, z_i>`; a leaf that is None has none."""
    return [
        cast(inner(leaf.gx, z_i, leaf.batch_ndims), dtype)
        for leaf, z_i in zip(leaves, z, strict=True)
        if leaf is not None
    ]


def zero(x: Any, *, guard: bool = False) -> Any:
    """Returns `z = x - stop(x)`; NaN where `x` is not finite, or with `guard` cut off there."""
    z = x - tf.stop_gradient(x)
    return _zero_or_guarded(z) if guard else z


def with_linear(y: Any, terms: Sequence[Any]) -> Any:
    """Returns `y + sum(terms)` for terms that are zero, with the value of `y` even if they are NaN.

    The derivative of an entry with a NaN is cut off.
    """
    if not terms:
        return y
    h = y + _zero_or_guarded(tf.add_n(terms))
    h.set_shape(y.shape)
    return h


def with_pullback(
    y: Any,
    xs: Sequence[Any],
    pullback: Callable[[Any], Sequence[Any]],
    scope: Callable[[], Any],
) -> Any:
    """Returns `y`, stopped, with a pullback to `xs`. For eager execution only.

    TensorFlow drops overrides in traced code, never in code that runs eagerly.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def override(*xs: Any) -> Any:
        del xs

        def in_scope(upstream: Any) -> Sequence[Any]:
            with scope():
                return pullback(upstream)

        return tf.stop_gradient(y), in_scope

    return override(*xs)


def eager() -> bool:
    """Whether ops run at once, so that overrides are safe."""
    return bool(tf.executing_eagerly())


def inner(c: Any, z: Any, batch_ndims: Any) -> Any:
    """Returns `<c, z>` over the domain of `z`, its dimensions after the batch.

    Shapes `B + E + D` and `B + D` give `B + E`. Zero entries of `z` count as zero and pull
    zero upstream back to zero, even where `c` is not finite.
    """
    z = tf.cast(z, c.dtype)
    rank, z_rank = _rank(c), _rank(z)
    product = _times(c, _insert_ones(z, batch_ndims, rank - z_rank))
    first = rank - (z_rank - batch_ndims)
    if not isinstance(first, int):
        return tf.reduce_sum(product, tf.range(first, rank))
    return tf.reduce_sum(product, list(range(first, rank))) if first < rank else product


def cast(t: Any, dtype: Any) -> Any:
    """`tf.cast` that takes the real part without complaint."""
    return tf.cast(tf.math.real(t) if t.dtype.is_complex and not dtype.is_complex else t, dtype)


def transpose(leaf: Leaf, upstream: Any) -> Any:
    """The transpose of `z -> <gx, z>`: `B + R` to `B + D`, contracting the range."""
    gx = tf.stop_gradient(leaf.gx)
    b, domain_ndims = leaf.batch_ndims, leaf.x.shape.rank - leaf.batch_ndims
    range_axes = list(range(b, gx.shape.rank - domain_ndims))
    upstream = tf.cast(upstream, gx.dtype)
    u = _insert_ones(upstream, b + len(range_axes), domain_ndims)
    pulled = _times(tf.math.conj(gx) if gx.dtype.is_complex else gx, u)
    return cast(tf.reduce_sum(pulled, range_axes) if range_axes else pulled, leaf.x.dtype)


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
    return tf.where(tf.equal(t, 0), t, tf.zeros([], t.dtype))


def _insert_ones(t: Any, axis: Any, count: Any) -> Any:
    """Makes room for broadcasting: `count` dimensions of size 1 before `axis`."""
    if isinstance(count, int) and (count == 0 or (isinstance(axis, int) and axis == 0)):
        return t  # leading ones are implied
    if t.shape.is_fully_defined():
        shape = t.shape.as_list()
        return tf.reshape(t, [*shape[:axis], *[1] * count, *shape[axis:]])
    shape = tf.shape(t)
    return tf.reshape(t, tf.concat([shape[:axis], tf.ones([count], tf.int32), shape[axis:]], 0))


def _rank(t: Any) -> Any:
    """An int where it is known, else a tensor."""
    return tf.rank(t) if t.shape.rank is None else t.shape.rank
