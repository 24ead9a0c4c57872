"""Rules on jax: values whose derivative is a rule, as an operation of JAX.

That is `jax.custom_jvp` and `jax.custom_vjp`. But JAX drops the rule of the one where a loop
(`jax.lax.scan`) is differentiated twice, and the other has no forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from sgtrick._arguments import dtypes
from sgtrick._types import Args, Function, Structure
from sgtrick.keras._types import Derived, Product, Rule

Arrays: TypeAlias = Sequence[Array]
# From the values, what else they depend on, and tangents of both, to tangents of the values. A
# tangent may be `ad.Zero`.
TangentRule: TypeAlias = Callable[[Structure, Structure, Structure, Structure], Structure]
# From residuals and upstream gradients to gradients.
Pull: TypeAlias = Callable[[Arrays, Arrays], Arrays]
AxisData: TypeAlias = Any  # the name and size of the axis of a map; JAX does not export the class


def with_vjp(rule: Rule) -> list[Array]:
    """Returns the outputs of the rule at its inputs, with its derivative."""
    xs = list(rule.inputs)
    if rule.push is not None:
        push, (ys, _) = rule.push, rule(*xs)
        return _keep(ys, xs, lambda _, xs, __, moved: push(xs, _as_arrays(moved)))  # type: ignore[no-any-return]
    ys, _ = rule(*map(jax.lax.stop_gradient, xs))
    smooth = [dtypes.is_differentiable(y.dtype.name) for y in ys]
    kept = [y for y, s in zip(ys, smooth, strict=True) if s]

    def pull(xs: Arrays, us: Arrays) -> Arrays:
        some = iter(us)
        gradients = rule(*xs)[1](*(next(some) if s else None for s in smooth))
        return [jnp.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)]

    # The derivative may be taken after the trace in which the rule was made has ended. So it is
    # traced now, and the tracers that it closes over become arguments.
    traced = jax.make_jaxpr(pull)(xs, kept)

    def gradients(residuals: Arrays, us: Arrays) -> Arrays:
        constants, points = residuals[: len(traced.consts)], residuals[len(traced.consts) :]
        return list(jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, list(constants)))(*points, *us))

    def tangents(kept: Arrays, by: Args, moved: Arrays, moved_by: Args) -> Arrays:
        constants, xs = by
        if _moves(moved) or _reads(gradients, constants, moved_by[0], xs, kept):
            raise LookupError(rule.not_argument)
        points = _guarded(xs, xs, lambda: _check_connected(rule, gradients, constants, xs, kept))
        return _pushed(gradients, [*constants, *points], kept, _as_arrays(moved_by[1]))

    known = iter(_keep(kept, (traced.consts, xs), tangents))
    return [next(known) if s else y for y, s in zip(ys, smooth, strict=True)]


def _reads(gradients: Pull, constants: Arrays, moved: Arrays, xs: Arrays, ys: Arrays) -> bool:
    """Whether a gradient is connected to constants that have a tangent."""
    moving = [not _is_zero(t) for t in moved]

    def of(moved: Arrays, constants: Arrays, xs: Arrays, us: Arrays) -> Arrays:
        some = iter(moved)
        at = [next(some) if moves else c for c, moves in zip(constants, moving, strict=True)]
        return gradients([*at, *xs], us)

    chosen = [c for c, moves in zip(constants, moving, strict=True) if moves]
    likes = jax.tree.map(jax.typeof, (chosen, list(constants), list(xs), list(ys)))
    return any(moving) and depends(of, *likes)


def _check_connected(
    rule: Rule, gradients: Pull, constants: Arrays, xs: Arrays, ys: Arrays
) -> None:
    """Raises if no gradient is connected to the arguments."""

    def of(xs: Arrays, constants: Arrays, us: Arrays) -> Arrays:
        return gradients([*constants, *xs], us)

    if not depends(of, *jax.tree.map(jax.typeof, (list(xs), list(constants), list(ys)))):
        raise LookupError(rule.not_connected)


def prepared(
    gs: Arrays, xs: Arrays, product: Product, message: str
) -> tuple[Arrays, Arrays, Derived]:
    """Returns `gs`, what `product` closes over, and a function that gives `gs` a derivative."""
    # Traced now, since this trace may have ended when the derivative is taken. Not evaluated.
    hessian = jax.make_jaxpr(product)(list(xs))

    def derived(constants: Arrays, gs: Arrays, xs: Arrays) -> Arrays:
        def tangents(gs: Arrays, by: Args, _: Arrays, moved: Args) -> Arrays:
            constants, xs = by
            if not _moves(moved[1]):
                return [jnp.zeros_like(g) for g in gs]
            times = jaxpr_as_fun(ClosedJaxpr(hessian.jaxpr, list(constants)))
            (one,) = refused([jnp.ones((), "float32")], xs, message)
            return [one.astype(hz.dtype) * hz for hz in times(*_as_arrays(moved[1]))]

        return _keep(list(gs), (list(constants), list(xs)), tangents)  # type: ignore[no-any-return]

    return gs, hessian.consts, derived


def refused(kept: Arrays, by: Arrays, message: str) -> Arrays:
    """Returns `kept`, whose derivative with respect to the arrays `by` raises a LookupError."""

    def refuse() -> None:
        raise LookupError(message)

    return _guarded(kept, by, refuse)


def _guarded(kept: Arrays, by: Arrays, check: Callable[[], None]) -> Arrays:
    """Returns `kept`; `check` is called where a derivative with respect to `by` is taken."""

    def tangents(kept: Arrays, by: Arrays, moved: Arrays, moved_by: Arrays) -> Arrays:
        del kept, by
        if _moves(moved_by):
            check()
        return moved

    return _keep(list(kept), list(by), tangents)  # type: ignore[no-any-return]


def depends(f: Function, xs: Structure, *others: Structure) -> bool:
    """Whether `f(xs, *others)` is connected to `xs`; all may be abstract."""
    found = []

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def probe(y: Array) -> Array:
        return y

    def rule(primals: Args, tangents: Args) -> tuple[Array, Array]:
        found.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    probe.defjvp(rule, symbolic_zeros=True)

    def differentiate(xs: Structure, *others: Structure) -> None:
        jax.vjp(lambda xs: list(map(probe, f(xs, *others))), xs)

    jax.eval_shape(differentiate, list(xs), *others)
    return any(found)


def zero(x: Array) -> Array:
    """Zero with the identity as its derivative; `x - stop(x)` would be NaN at infinity."""
    return _keep(jnp.zeros_like(x), x, lambda _zero, _x, _, moved: moved)


def _keep(kept: Structure, by: Structure, rule: TangentRule) -> Structure:
    """Returns `kept`, with the tangents that a rule returns."""
    leaves, tree = jax.tree.flatten((kept, by))
    count = len(jax.tree.leaves(kept))

    def flat_rule(primals: Arrays, tangents: Arrays) -> Arrays:
        found = rule(*tree.unflatten(primals), *tree.unflatten(tangents))
        return jax.tree.leaves(found, is_leaf=_is_zero)  # type: ignore[no-any-return]

    values = _keep_p.bind(*leaves, count=count, rule=flat_rule) if count else []
    return jax.tree.structure(kept).unflatten(values)


def _moves(tangents: Structure) -> bool:
    """Whether one of these tangents may not be zero."""
    return not all(map(_is_zero, jax.tree.leaves(tangents, is_leaf=_is_zero)))


def _as_arrays(tangents: Structure) -> Structure:
    return jax.tree.map(ad.instantiate_zeros, tangents, is_leaf=_is_zero)


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, ad.Zero)


def _first(*args: Any, count: int, rule: object) -> list[Any]:
    del rule
    return list(args[:count])


def _keep_jvp(
    primals: Arrays, tangents: Arrays, *, count: int, rule: Callable[..., Arrays]
) -> tuple[Arrays, Arrays]:
    return _keep_p.bind(*primals, count=count, rule=rule), rule(primals, tangents)


def _keep_batch(
    axis: AxisData,
    args: Arrays,
    dims: Sequence[int | None],
    *,
    count: int,
    rule: Callable[..., Arrays],
) -> tuple[Arrays, list[int | None]]:
    # A rule that uses the name of the axis is mapped even where nothing else is.
    out = None if all(d is None for d in dims) else 0
    kept, by = args[:count], _at_front(args[count:], dims[count:])
    if out is not None:
        kept = _batched(kept, dims[:count], axis.size)
    axes = [out] * count + _axes(dims[count:])

    def mapped(primals: Arrays, tangents: Arrays) -> Arrays:
        def member(primals: Arrays, given: Arrays) -> Arrays:
            rest = iter(given)
            all_tangents = [
                ad.Zero(jax.typeof(p).to_tangent_aval()) if _is_zero(t) else next(rest)
                for p, t in zip(primals, tangents, strict=True)
            ]
            return list(map(ad.instantiate_zeros, rule(primals, all_tangents)))

        given = [(t, a) for t, a in zip(tangents, axes, strict=True) if not _is_zero(t)]
        in_axes = axes, [a for _, a in given]
        over = _map(axis, member, in_axes, out)
        return over(list(primals), [t for t, _ in given])  # type: ignore[no-any-return]

    return _keep_p.bind(*kept, *by, count=count, rule=mapped), [out] * count


def _map(axis: AxisData, f: Function, in_axes: Structure, out_axes: int | None) -> Function:
    """`jax.vmap` over an axis of this name."""
    options = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    return jax.vmap(f, in_axes, out_axes, **options)  # type: ignore[no-any-return]


def _at_front(args: Arrays, dims: Sequence[int | None]) -> Arrays:
    return [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]


def _axes(dims: Sequence[int | None]) -> list[int | None]:
    return [None if d is None else 0 for d in dims]


def _batched(args: Arrays, dims: Sequence[int | None], size: int) -> Arrays:
    return [batching.bdim_at_front(a, d, size) for a, d in zip(args, dims, strict=True)]


_keep_p = Primitive("sgtrick_keep")
_keep_p.multiple_results = True
_keep_p.def_impl(_first)
_keep_p.def_abstract_eval(_first)
ad.primitive_jvps[_keep_p] = _keep_jvp
batching.fancy_primitive_batchers[_keep_p] = _keep_batch
mlir.register_lowering(_keep_p, mlir.lower_fun(_first, multiple_results=True))


def _pushed(pull: Pull, residuals: Arrays, ys: Arrays, tangents: Arrays) -> Arrays:
    """Returns what the transpose of `us -> pull(residuals, us)`, if linear, makes of tangents."""
    outs = tuple(jax.typeof(y).to_tangent_aval() for y in ys)
    return _push_p.bind(*residuals, *tangents, pull=pull, count=len(residuals), outs=outs)  # type: ignore[no-any-return]


def _push(*args: Array, pull: Pull, count: int, outs: Sequence[Any]) -> Arrays:
    def of_upstream(us: Arrays) -> Arrays:
        return pull(list(args[:count]), us)

    try:
        (tangents,) = jax.linear_transpose(of_upstream, list(outs))(list(args[count:]))
        is_linear = _is_linear(of_upstream, outs)
    except Exception as error:  # JAX has another one for each operation
        raise NotImplementedError(_NOT_LINEAR) from error
    if not isinstance(is_linear, jax.core.Tracer) and not is_linear:
        raise NotImplementedError(_NOT_LINEAR)
    return [jnp.where(is_linear, t, jnp.nan) for t in tangents]


def _is_linear(f: Callable[[Arrays], Arrays], likes: Sequence[Any]) -> Array:
    """Whether a function that JAX could transpose has lost nothing: a constant, or integers."""
    zeros, probes = ([jnp.full(y.shape, c, y.dtype) for y in likes] for c in (0, 100))
    ys, slopes = jax.jvp(f, [probes], [probes])
    lost = [(g != 0) & ~jnp.isnan(g) for g in f(zeros)]
    lost += [
        abs(y - slope) > jnp.finfo(y.dtype).eps ** 0.5 * abs(y)
        for y, slope in zip(ys, slopes, strict=True)
    ]
    return ~jnp.array([jnp.any(where) for where in lost]).any()


def _push_jvp(
    primals: Arrays, tangents: Arrays, *, count: int, **params: Any
) -> tuple[Arrays, Arrays]:
    def push(*args: Array) -> Arrays:
        return _push_p.bind(*args, count=count, **params)  # type: ignore[no-any-return]

    if not _moves(tangents[:count]):
        return push(*primals), push(*primals[:count], *_as_arrays(tangents[count:]))
    moved = [i for i, t in enumerate(tangents) if not _is_zero(t)]

    def of_moved(*args: Array) -> Arrays:
        at = dict(zip(moved, args, strict=True))
        return _push(*(at.get(i, p) for i, p in enumerate(primals)), count=count, **params)

    return jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])  # type: ignore[no-any-return]


def _push_transpose(us: Arrays, *args: Any, pull: Pull, count: int, outs: Any) -> list[Any]:
    del outs
    gradients = pull(list(args[:count]), list(map(ad.instantiate_zeros, us)))
    pairs = zip(gradients, args[count:], strict=True)
    return [None] * count + [g if ad.is_undefined_primal(t) else None for g, t in pairs]


def _push_batch(
    axis: AxisData,
    args: Arrays,
    dims: Sequence[int | None],
    *,
    pull: Pull,
    count: int,
    outs: Sequence[Any],
) -> tuple[Arrays, list[int | None]]:
    out = None if all(d is None for d in dims) else 0
    tangents = args[count:]
    if out is not None:
        tangents = _batched(tangents, dims[count:], axis.size)
        outs = tuple(y.update(shape=(axis.size, *y.shape)) for y in outs)
    mapped = _push_p.bind(
        *_at_front(args[:count], dims[:count]),
        *tangents,
        pull=_map(axis, pull, (_axes(dims[:count]), out), out),
        count=count,
        outs=outs,
    )
    return mapped, [out] * len(outs)


_NOT_LINEAR = (
    "Forward mode transposes the gradient function of sgtrick.keras.custom_vjp, but JAX cannot "
    "transpose this one, or it is not linear in its upstream gradients. Use reverse mode: "
    "jax.jacrev instead of jax.jacfwd, and jax.jacrev of jax.jacrev instead of jax.hessian."
)
_push_p = Primitive("sgtrick_push")
_push_p.multiple_results = True
_push_p.def_impl(_push)
_push_p.def_abstract_eval(lambda *_, outs, **__: list(outs))
ad.primitive_jvps[_push_p] = _push_jvp
ad.primitive_transposes[_push_p] = _push_transpose
batching.fancy_primitive_batchers[_push_p] = _push_batch
mlir.register_lowering(_push_p, mlir.lower_fun(_push, multiple_results=True))


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
    terms = [] if _is_zero(dc) else [times(z, dc)]
    terms += [] if _is_zero(dz) else [times(c, dz)]
    return times(c, z), sum(terms[1:], terms[0])


def _times_transpose(u: Array | ad.Zero, c: Array, z: Any) -> tuple[None, Array | ad.Zero]:
    assert not ad.is_undefined_primal(c), "tangents are the second factor"
    return None, ad.Zero(z.aval) if _is_zero(u) else times(c, u)


def _times_batch(args: Arrays, dims: Sequence[int | None]) -> tuple[Array, int]:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return times(*_batched(args, dims, size)), 0


_times_p = Primitive("sgtrick_times")
_times_p.def_impl(jax.jit(_times))
_times_p.def_abstract_eval(lambda _, z: z)
ad.primitive_jvps[_times_p] = _times_jvp
ad.primitive_transposes[_times_p] = _times_transpose
batching.primitive_batchers[_times_p] = _times_batch
mlir.register_lowering(_times_p, mlir.lower_fun(_times, multiple_results=False))
