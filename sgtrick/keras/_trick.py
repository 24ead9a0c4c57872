"""The value form on `keras.ops`, for the backends jax and torch, which keep overrides."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import backend, ops

from sgtrick import _dtypes
from sgtrick._leaves import Leaf
from sgtrick.keras import _backends

Product = Callable[[list[Any]], list[Any]]


def embed(fx: Any, leaves: Sequence[Leaf], product: Product | None) -> Any:
    """Returns `fx` with the derivative `sum_i <gx_i, dx_i>`, that of `gx` being `product`.

    Args:
        fx: The value, shape `B + R`.
        leaves: Points and Jacobians.
        product: Maps the `z_i` to the `(H z)_i`, each of the shape and dtype of its `gx_i`. Nothing
            is known of what comes after: its derivative raises. None: that of `gx` does.
    """
    batch_ndims = [leaf.batch_ndims for leaf in leaves]
    fx, gs = ops.stop_gradient(fx), [ops.stop_gradient(leaf.gx) for leaf in leaves]
    return _backends.native().embed(fx, gs, [leaf.x for leaf in leaves], batch_ndims, product)


def unstopped(fx: Any, leaves: Sequence[Leaf], product: Product | None) -> Any:
    """Returns `fx + sum_i <gx_i, x_i - stop(x_i)>`, in which `fx` and `gx` keep their derivatives.

    `product` is as in `embed`, and adds to the derivative of `gx`.
    """
    for leaf in leaves:
        term = inner(leaf.gx, _backends.native().zero(leaf.x), leaf.batch_ndims)
        fx = fx + cast(term, dtype_of(fx))
    if product is None:
        return fx
    nothing = [leaf._replace(gx=ops.zeros_like(leaf.gx)) for leaf in leaves]
    return fx + embed(ops.zeros_like(fx), nothing, product)


def push(gs: Sequence[Any], zs: Sequence[Any], batch_ndims: Sequence[int], like: Any) -> Any:
    """Returns `sum_i <g_i, z_i>`, of the shape and dtype of `like`."""
    y = ops.zeros_like(like)
    for g, z, b in zip(gs, zs, batch_ndims, strict=True):
        y = y + cast(inner(g, z, b), dtype_of(y))
    return y


def inner(c: Any, z: Any, batch_ndims: int) -> Any:
    """Returns `<c, z>` over the domain of `z`, its dimensions after the batch.

    Shapes `B + E + D` and `B + D` give `B + E`. Zero entries of `z` count as zero and pull
    zero upstream back to zero, even where `c` is not finite.
    """
    z = cast(z, dtype_of(c))
    shape, b = tuple(z.shape), batch_ndims
    ones = [1] * (len(c.shape) - len(shape))
    z = ops.broadcast_to(ops.reshape(z, [*shape[:b], *ones, *shape[b:]]), c.shape)
    domain = tuple(range(len(c.shape) - (len(shape) - b), len(c.shape)))
    product = _backends.native().times(c, z)
    return ops.sum(product, domain) if domain else product


def cast(t: Any, dtype: str) -> Any:
    """`ops.cast` that takes the real part without complaint."""
    if _dtypes.is_complex(dtype_of(t)) and not _dtypes.is_complex(dtype):
        t = ops.real(t)
    return ops.cast(t, dtype)


def dtype_of(t: Any) -> str:
    """The name of a dtype."""
    return str(backend.standardize_dtype(t.dtype))
