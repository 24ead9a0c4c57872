"""Products that are zero wherever a tangent or an upstream gradient is zero."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sgtrick.keras._jax.kept import keep


def zero(x: Array) -> Array:
    """Zero with the identity as its derivative; `x - stop(x)` would be NaN at infinity."""
    return keep(jnp.zeros_like(x), x, lambda _zero, _x, _, moved: moved)


def times(c: Array, z: Array) -> Array:
    """Returns `c * z`, and zero where `z` is zero even if `c` is not finite.

    `jnp.where` gives the same values, but its transpose would test `z` for zeros instead of the
    upstream gradient.
    """
    return _times_p.bind(c, z)


def _times(c: Array, z: Array) -> Array:
    return jnp.where(z == 0, jnp.zeros_like(z), c * z)


def _times_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array | ad.Zero, Array | ad.Zero]
) -> tuple[Array, Array]:
    (c, z), (dc, dz) = primals, tangents
    terms = [] if isinstance(dc, ad.Zero) else [times(z, dc)]
    terms += [] if isinstance(dz, ad.Zero) else [times(c, dz)]
    return times(c, z), sum(terms[1:], terms[0])


def _times_transpose(u: Array | ad.Zero, c: Array, z: Any) -> tuple[None, Array | ad.Zero]:
    assert not ad.is_undefined_primal(c), "tangents are the second factor"
    return None, ad.Zero(z.aval) if isinstance(u, ad.Zero) else times(c, u)


def _times_batch(args: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return times(*(batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True))), 0


_times_p = Primitive("sgtrick_times")
_times_p.def_impl(jax.jit(_times))
_times_p.def_abstract_eval(lambda _, z: z)
ad.primitive_jvps[_times_p] = _times_jvp
ad.primitive_transposes[_times_p] = _times_transpose
batching.primitive_batchers[_times_p] = _times_batch
mlir.register_lowering(_times_p, mlir.lower_fun(_times, multiple_results=False))
