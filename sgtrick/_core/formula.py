"""The formula `stop(f) + L(x - stop(x))`.

`z = x - stop(x)` has the value zero and the identity as its derivative, and `L` is linear in `z`.
So the sum has the value of `f` and the derivative of `L`. It is written as
`stop(f) - L(stop(x) - x)`, since `-0.0 - 0.0` is `-0.0` but `-0.0 + 0.0` is not.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._core._tensorflow.autograph import unconverted
from sgtrick._core.structures import Leaf
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Tensor


@unconverted
def formula(
    fx: Tensor,
    leaves: Sequence[Leaf],
    hessian_times: Callable[[list[Tensor]], list[Tensor]] | None = None,
    *,
    order: int | None,
    stopped: bool,
) -> Tensor:
    """Returns `fx + sum_i <gx_i + 1/2 (H z)_i, z_i>`.

    Args:
        fx: The value, shape `B + R`.
        leaves: Points and Jacobians.
        hessian_times: Maps the `z_i` to the `(H z)_i`, each of the shape and dtype of its `gx_i`.
        order: The highest order of known derivatives. The next one is made not finite, since the
            formula alone would give zero. None: all derivatives are known.
        stopped: Whether `fx` and `gx_i` are stopped, as the formula assumes.

    Returns:
        A tensor of the shape, dtype and value of `fx`, whatever values the leaves have.
    """
    # If z is a factor of gradients, those of gx or of H z, guarding the sum is too late.
    guard = hessian_times is not None or not stopped
    minus_z = [minus_zero(leaf.x, guard=guard) for leaf in leaves]
    g = [leaf.gx for leaf in leaves]
    if hessian_times is not None:
        g = [g_i - hz_i / 2 for g_i, hz_i in zip(g, hessian_times(minus_z), strict=True)]
    leaves = [leaf._replace(gx=g_i) for leaf, g_i in zip(leaves, g, strict=True)]
    terms = TENSORFLOW.linear(leaves, minus_z, fx.dtype.name)
    if order is not None:
        terms = [_unknown_beyond(order, _zero_or_guarded(tf.add_n(terms)))]
    return with_linear(fx, terms)


def _unknown_beyond(order: int, t: Tensor) -> Tensor:
    """Returns `t + t^(order + 1/2)`, for a `t` that is zero.

    The power adds nothing to derivatives up to `order`. To the next one it adds `0^(-1/2)` times
    the derivative of `t`, which is infinite or NaN in every direction.
    """
    if t.dtype.is_complex:
        re, im = tf.math.real(t), tf.math.imag(t)
        power = (re + im) ** (order + 0.5)
        return tf.complex(re + power, im + power)
    return t + t ** (order + 0.5)


def minus_zero(x: Tensor, *, guard: bool = False) -> Tensor:
    """Returns `-z = stop(x) - x`: NaN where `x` is not finite, or stopped there with `guard`."""
    minus_z = tf.stop_gradient(x) - x
    return _zero_or_guarded(minus_z) if guard else minus_z


def with_linear(y: Tensor, minus_terms: Sequence[Tensor]) -> Tensor:
    """Returns `y - sum(minus_terms)` for terms that are zero: the value of `y` to the last bit.

    Entries whose terms are NaN get no derivative.
    """
    h = y - _zero_or_guarded(tf.add_n(minus_terms))
    h.set_shape(y.shape)
    return h


def _zero_or_guarded(t: Tensor) -> Tensor:
    """A tensor that is zero by construction, replaced by a constant zero where it is NaN."""
    if t.dtype.is_complex:
        return tf.where(tf.equal(t, 0), t, tf.zeros([], t.dtype))
    # The same, by kernels that TensorFlow runs inline and does not hand to another thread.
    return tf.math.multiply_no_nan(t, tf.cast(tf.math.is_finite(tf.stop_gradient(t)), t.dtype))
