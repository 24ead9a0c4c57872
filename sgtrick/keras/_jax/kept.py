"""Values whose derivative is a rule, as an operation of JAX.

That is `jax.custom_jvp`, but JAX drops the rule of that where a loop (`jax.lax.scan`) is
differentiated twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sgtrick._types import Structure

Arrays: TypeAlias = Sequence[Array]
# From the values, what else they depend on, and tangents of both, to tangents of the values. A
# tangent may be `ad.Zero`.
TangentRule: TypeAlias = Callable[[Structure, Structure, Structure, Structure], Structure]


def keep(kept: Structure, by: Structure, rule: TangentRule) -> Structure:
    """Returns `kept`, with the tangents that a rule returns."""
    leaves, tree = jax.tree.flatten((kept, by))
    count = len(jax.tree.leaves(kept))

    def flat_rule(primals: Arrays, tangents: Arrays) -> Arrays:
        found = rule(*tree.unflatten(primals), *tree.unflatten(tangents))
        return jax.tree.leaves(found, is_leaf=_is_zero)  # type: ignore[no-any-return]

    values = _keep_p.bind(*leaves, count=count, rule=flat_rule) if count else []
    return jax.tree.structure(kept).unflatten(values)


def moves(tangents: Structure) -> bool:
    """Whether one of these tangents may not be zero."""
    return not all(map(_is_zero, jax.tree.leaves(tangents, is_leaf=_is_zero)))


def as_arrays(tangents: Structure) -> Structure:
    """The tangents as arrays."""
    return jax.tree.map(ad.instantiate_zeros, tangents, is_leaf=_is_zero)


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, ad.Zero)


def _first(*args: Any, count: int, rule: object) -> list[Any]:
    del rule
    return list(args[:count])


def _jvp(
    primals: Arrays, tangents: Arrays, *, count: int, rule: Callable[..., Arrays]
) -> tuple[Arrays, Arrays]:
    return _keep_p.bind(*primals, count=count, rule=rule), rule(primals, tangents)


def _batch(
    args: Arrays, dims: Sequence[int | None], *, count: int, rule: Callable[..., Arrays]
) -> tuple[Arrays, list[int]]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)

    def mapped(primals: Arrays, tangents: Arrays) -> Arrays:
        def member(primals: Arrays, given: Arrays) -> Arrays:
            rest = iter(given)
            all_tangents = [
                ad.Zero(t.aval.update(shape=t.aval.shape[1:]))
                if isinstance(t, ad.Zero)
                else next(rest)
                for t in tangents
            ]
            return list(map(ad.instantiate_zeros, rule(primals, all_tangents)))

        given = [t for t in tangents if not _is_zero(t)]
        return jax.vmap(member)(list(primals), given)  # type: ignore[no-any-return]

    args = [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]
    return _keep_p.bind(*args, count=count, rule=mapped), [0] * count


_keep_p = Primitive("sgtrick_keep")
_keep_p.multiple_results = True
_keep_p.def_impl(_first)
_keep_p.def_abstract_eval(_first)
ad.primitive_jvps[_keep_p] = _jvp
batching.primitive_batchers[_keep_p] = _batch
mlir.register_lowering(_keep_p, mlir.lower_fun(_first, multiple_results=True))
