"""The formula `stop(f) + L(x - stop(x))`, and the same meaning as a pullback.

`z = x - stop(x)` is zero in value and the identity in derivative, and `L` is linear in `z`. So the
sum has the value of `f` and the derivative of `L`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick import _devices
from sgtrick._leaves import Leaf


def embed(
    y: Any,
    xs: Sequence[Any],
    jacobians: Callable[[], Sequence[Leaf | None]],
) -> Any:
    """Returns `y + sum_i <stop(gx_i), z_i>`: `y`, its derivatives included, and Jacobians by `xs`.

    One meaning twice: as the formula, which no transformation can drop, and as a pullback, which
    takes less time, where TensorFlow honours it. Eager execution always does, so there the formula
    is not computed, and the Jacobians are not asked for before a gradient is.

    Args:
        y: The value, shape `B + R`.
        xs: The points.
        jacobians: Returns a leaf for each of `xs`, None where it has no gradient.
    """
    if not xs:
        return y
    if eager():
        return _with_pullback(tf.stop_gradient(y), y, xs, jacobians)
    return _with_both(y, xs, jacobians())


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _with_both(y: Any, xs: Sequence[Any], leaves: Sequence[Leaf | None]) -> Any:
    """Returns the formula, for a tape with its pullback.

    AutoGraph would take a second to rewrite what has nothing for it. Callers' functions stay out.
    """
    leaves = [leaf and leaf._replace(gx=tf.stop_gradient(leaf.gx)) for leaf in leaves]
    h = with_linear(y, linear(leaves, [zero(x) for x in xs], y.dtype))
    return _with_pullback(h, y, xs, lambda: leaves)


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


def _with_pullback(
    value: Any,
    y: Any,
    xs: Sequence[Any],
    jacobians: Callable[[], Sequence[Leaf | None]],
) -> Any:
    """Returns `value`, for a tape with the derivatives of `y` and the Jacobians by `xs`."""

    def pullback(upstream: Any) -> list[Any]:
        return [upstream, *(leaf and transpose(leaf, upstream) for leaf in jacobians())]

    (h,) = overridden([value], [y, *xs], pullback)
    if not tf.executing_eagerly():
        # The tape has the pullback. The graph keeps the derivative of `value`, which is the same,
        # so that it can be stored, loaded and differentiated where the pullback is not known.
        h.op._clear_attr("_gradient_op_type")
    return h


def overridden(
    values: Sequence[Any], inputs: Sequence[Any], pullback: Callable[..., Sequence[Any]]
) -> list[Any]:
    """Returns `values`, whose gradients by `inputs` are those that `pullback` returns.

    Where TensorFlow drops the override, they are those of `values`. The pullback runs on the device
    of the values.
    """

    def gradient(*upstream: Any) -> list[Any]:
        with _devices.of(values[0]):
            return [*[None] * len(values), *pullback(*upstream)]

    if tf.executing_eagerly():
        # Decorated once, and no list of one: either would cost a third to a half of the call.
        outputs = _override(*values, *inputs, n=len(values), gradient=gradient)
        return [outputs] if len(values) == 1 else list(outputs)
    override = tf.custom_gradient(lambda *tensors: (list(tensors[: len(values)]), gradient))
    return list(override(*values, *inputs))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _override(*tensors: Any, n: int, gradient: Any) -> Any:
    return tensors[0] if n == 1 else list(tensors[:n]), gradient


def refusing(y: Any, xs: Sequence[Any], message: str) -> Any:
    """Returns `y`, with a `LookupError` for whoever differentiates it by `xs`."""
    # A sum over nothing: zero whatever the points hold, and connected to them.
    nothing = [cast(tf.reduce_sum(tf.reshape(x, [-1])[:0]), y.dtype) for x in xs]
    return y + tf.raw_ops.PreventGradient(input=tf.add_n(nothing), message=message)


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
    return _sum(product, rank - (z_rank - batch_ndims), rank)


def cast(t: Any, dtype: Any) -> Any:
    """`tf.cast` that takes the real part without complaint."""
    return tf.cast(tf.math.real(t) if t.dtype.is_complex and not dtype.is_complex else t, dtype)


def transpose(leaf: Leaf, upstream: Any) -> Any:
    """The transpose of `z -> <gx, z>`: `B + R` to `B + D`, contracting the range."""
    gx = tf.stop_gradient(leaf.gx)
    b = leaf.batch_ndims
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
    return tf.math.multiply_no_nan(t, tf.cast(tf.math.is_finite(t), t.dtype))


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
