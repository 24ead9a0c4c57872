"""JAX: gradients and Hessian-vector products."""

import contextlib

import jax
import jax.experimental
import numpy as np
import tensorflow as tf

from sgtrick._core.types import Function, Structure
from sgtrick._host.derived import Dims, Leaves

# In jax since 0.8, in jax.experimental before.
_enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64


class Jax:
    """The `Framework` of functions of arrays of JAX."""

    def __init__(self, *, jit: bool) -> None:
        self._jit = jax.jit if jit else lambda f: f

    def gradient(self, f: Function, has_aux: bool, dims: Dims) -> Function:
        """See `Framework`."""
        return self._of_arrays(jax.value_and_grad(f, has_aux=has_aux), dims)

    def hessian_times(self, f: Function, dims: Dims) -> Function:
        """See `Framework`."""

        def product(points: Leaves, constants: Leaves, vs: Leaves) -> Structure:
            return jax.jvp(lambda p: jax.grad(f)(p, constants), (points,), (vs,))[1]

        return self._of_arrays(product, dims)

    def why_no_scalar(self, value: Structure) -> str | None:
        """See `Framework`."""
        if not np.shape(value):
            return None
        return (
            f"got an array of shape {list(np.shape(value))}: sum over the point, or pass "
            "event_ndims=0 if each number is a point of its own."
        )

    def is_cut_off(self, f: Function, points: Leaves, constants: Leaves, k: int) -> bool:
        """Never: JAX itself raises where a value is cut off."""
        del f, points, constants, k
        return False

    def advice(self, error: Exception) -> str | None:
        """See `Framework`."""
        if isinstance(error, jax.errors.TracerArrayConversionError):
            return (
                "calls NumPy on a JAX array, which cannot be differentiated. Use jax.numpy, or "
                "from_numpy with a gradient that you supply."
            )
        # jit and vmap cannot trace code that needs the value of an array.
        errors = (
            jax.errors.ConcretizationTypeError,
            jax.errors.NonConcreteBooleanIndexError,
            jax.errors.TracerIntegerConversionError,
        )
        if isinstance(error, errors):
            return (
                "has an if, a loop or an index that depends on values, which cannot be traced. "
                "Pass jit=False and vectorized=False, or use jax.lax.cond and jnp.where. Code that "
                "turns an array into a number, as float() does, cannot be differentiated."
            )
        return None

    def _of_arrays(self, f: Function, dims: Dims) -> Function:
        for in_axes in reversed(dims):
            f = jax.vmap(f, in_axes=in_axes)
        f = self._jit(f)

        def of_arrays(*groups: Leaves) -> Structure:
            # Otherwise JAX would truncate 64-bit arrays, integers too. The mode is left alone for
            # arrays of 32 bits.
            wide = any(a.dtype.itemsize == 8 for group in groups for a in group)
            with _enable_x64(True) if wide else contextlib.nullcontext():
                if self._jit is not jax.jit:
                    groups = tf.nest.map_structure(jax.numpy.asarray, groups)
                return tf.nest.map_structure(np.asarray, f(*groups))

        return of_arrays
