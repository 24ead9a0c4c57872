"""JAX as a framework that differentiates functions."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from sgtrick._host.autodiff import Dims, Leaves
from sgtrick._types import Function, Structure

# In jax since 0.8, in jax.experimental before.
_enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64


class Jax:
    """The `Framework` of functions of arrays of JAX."""

    title, recipe, takes_text = "JAX", "jax.value_and_grad(f)", False
    vjp = staticmethod(jax.vjp)
    jvp = staticmethod(jax.jvp)

    def symmetric(self, gradient: Function, points: Leaves, vs: Leaves) -> Leaves:
        """The product with the Hessian, forward over reverse."""
        return jax.jvp(gradient, (points,), (vs,))[1]  # type: ignore[no-any-return]

    def like(self, u: Any, y: Any) -> Any:
        """A cotangent or tangent `u` as an array like `y`, whose sizes may be symbolic."""
        u, shape = jnp.asarray(u, jnp.result_type(y)), jnp.shape(y)
        for axis, (n, m) in enumerate(zip(u.shape, shape, strict=False)):
            if n is not m and str(n) != str(m):  # a symbolic size may have another name
                u = jnp.take(u, jnp.arange(m), axis)
        return jnp.broadcast_to(u, shape)

    def probe(self, y: Any) -> Any:
        """Irregular numbers of order 1, like `y`."""
        angles = jnp.arange(jnp.size(y), dtype=jnp.result_type(y))
        return jnp.cos(2.4 * angles + 1).reshape(jnp.shape(y))

    def raised(self, f: Function, dims: Dims, groups: Sequence[Leaves]) -> Exception | None:
        """What JAX raises when it traces and lowers the mapped function."""
        try:
            with x64_for(a for group in groups for a in group):
                _mapped(f, dims).lower(*groups)
        except Exception as error:
            return error
        return None

    def shapes(self, f: Function, leaves: Sequence[Any]) -> Structure:
        """The shapes by `jax.eval_shape`."""
        specs = [jax.ShapeDtypeStruct(*s) if isinstance(s, tuple) else s for s in leaves]
        with x64_for(specs):
            returned = jax.eval_shape(f, specs)
        return tf.nest.map_structure(lambda y: tf.TensorShape(jnp.shape(y)), returned)

    def refusal(self, value: Any) -> str | None:
        """Why a value is not an array of floating numbers; None if it is one."""
        if value is None:
            return "got None."
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            return f"got {jnp.result_type(value)}: cast it to a float."
        return None

    def is_connected(self, value: object) -> bool:
        """Always true: JAX itself raises where a value is cut off."""
        del value
        return True

    def advice(self, error: Exception) -> str | None:
        """What to do about code that cannot be traced."""
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
                "Use jax.lax.cond and jnp.where, or from_numpy with jax.value_and_grad(f). Code "
                "that turns an array into a number, as float() does, cannot be differentiated."
            )
        return None

    def compiled(self, f: Function, dims: Dims) -> Function:
        """The mapped function by `jax.jit`, once for each shape."""
        f = _mapped(f, dims)

        def of_arrays(*groups: Leaves) -> Structure:
            with x64_for(a for group in groups for a in group):
                return tf.nest.map_structure(np.asarray, f(*groups))

        return of_arrays


def _mapped(f: Function, dims: Dims) -> Any:
    for in_axes in reversed(dims):
        f = jax.vmap(f, in_axes=in_axes)
    return jax.jit(f)


def x64_for(leaves: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """A scope in which JAX takes these arrays as they are: by itself it truncates 64 bits to 32.

    The mode is left alone if all have 32 bits.
    """
    has_64_bits = any(hasattr(a, "dtype") and a.dtype.itemsize == 8 for a in leaves)
    return _enable_x64(True) if has_64_bits else contextlib.nullcontext()
