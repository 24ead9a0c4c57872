"""The formula `stop(f) + L(x - stop(x))` on `keras.ops`, for the backends jax and torch."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import backend, ops

from sgtrick import _dtypes
from sgtrick._leaves import Leaf
from sgtrick.keras import _backends


def formula(
    fx: Any,
    leaves: Sequence[Leaf],
    hessian_times: Callable[[list[Any]], list[Any]] | None,
    *,
    stop: Callable[[Any], Any],
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
    once = hessian_times is None and stop is ops.stop_gradient
    # Where z is itself a factor of gradients, the guard of the sum comes too late.
    z = [leaf.x - ops.stop_gradient(leaf.x) for leaf in leaves]
    z = z if once else [_zero_or_guarded(z_i) for z_i in z]
    g = [stop(leaf.gx) for leaf in leaves]
    if hessian_times is not None:
        g = [g_i + hz_i / 2 for g_i, hz_i in zip(g, hessian_times(z), strict=True)]
    h = stop(fx)
    for g_i, z_i, leaf in zip(g, z, leaves, strict=True):
        term = inner(g_i, z_i, leaf.batch_ndims, once=once)
        h = h + _zero_or_guarded(cast(term, dtype_of(fx)))
    return h


def inner(c: Any, z: Any, batch_ndims: int, *, once: bool = False) -> Any:
    """Returns `<c, z>` over the domain of `z`, its dimensions after the batch.

    Shapes `B + E + D` and `B + D` give `B + E`. Zero entries of `z` count as zero and pull
    zero upstream back to zero, even where `c` is not finite.
    """
    z = cast(z, dtype_of(c))
    shape, b = tuple(z.shape), batch_ndims
    ones = [1] * (len(c.shape) - len(shape))
    z = ops.broadcast_to(ops.reshape(z, [*shape[:b], *ones, *shape[b:]]), c.shape)
    domain = tuple(range(len(c.shape) - (len(shape) - b), len(c.shape)))
    product = _backends.native().times(c, z, once)
    return ops.sum(product, domain) if domain else product


def cast(t: Any, dtype: str) -> Any:
    """`ops.cast` that takes the real part without complaint."""
    if _dtypes.is_complex(dtype_of(t)) and not _dtypes.is_complex(dtype):
        t = ops.real(t)
    return ops.cast(t, dtype)


def dtype_of(t: Any) -> str:
    """The name of a dtype."""
    return str(backend.standardize_dtype(t.dtype))


def _zero_or_guarded(t: Any) -> Any:
    """A tensor that is zero by construction, cut off where it came out NaN."""
    return ops.where(ops.equal(t, 0), t, ops.zeros_like(t))
