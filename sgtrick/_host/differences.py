"""Derivatives by finite differences: all points of all members of a batch as one batch.

The names and the steps are those of `scipy.optimize.approx_fprime` and its relatives: the step of
an entry `x` is `eps**(1/2) * max(1, |x|)` to one side for "2-point", away from zero, and
`eps**(1/3) * max(1, |x|)` to both for "3-point". Along another direction, no entry moves farther
than it does by itself.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sgtrick._host.contract import CallSpec, Parts, copy
from sgtrick._host.engine import SCHEMES, Engine
from sgtrick._host.replies import Evaluation, Product
from sgtrick._types import Array


def evaluate(engine: Engine, spec: CallSpec, *arrays: Array | bytes) -> Parts:
    """The reply of an engine with a gradient, from one with finite differences instead."""
    scheme, places = engine.schemes["grad"], spec.places
    if not places:  # nothing to take differences by
        return engine.evaluate(Evaluation(dataclasses.replace(spec, has_gradient=False)), *arrays)
    xs = [np.asarray(arrays[k], engine.dtype) for k in places]
    events = [x.shape[x.ndim - spec.event_ndims[k] :] for k, x in zip(places, xs, strict=True)]
    # One direction for each entry: the rows of an identity matrix.
    sizes = list(map(math.prod, events))
    blocks = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1], 1)
    axis = xs[0].ndim - len(events[0])  # of the points, after the batch
    vs = [
        block.reshape((*[1] * axis, sum(sizes), *event))
        for block, event in zip(blocks, events, strict=True)
    ]
    points, far = _around(engine, spec, scheme, arrays, vs, with_itself=True)

    inner = dataclasses.replace(_wide(spec), has_gradient=False, tells_failures=True)
    reply = Evaluation(inner)
    reply.counts_nonfinite = False  # of the points around it
    parts = engine.evaluate(reply, *points)
    n = len(spec.value.shapes)
    values, failed, aux = parts[:n], parts[n], parts[n + 1 :]
    gradients = []
    for value in values:
        known = np.where(_behind(failed, value), np.nan, value)
        slopes = _slopes(scheme, known, far, axis)
        # Where the value is not the engine's, it is a constant.
        slopes = np.where(_behind(failed[..., :1], slopes), 0, slopes)
        columns = np.split(np.moveaxis(slopes, axis, -1), np.cumsum(sizes)[:-1], -1)
        for column, event in zip(columns, events, strict=True):
            gradients.append(column.reshape((*column.shape[:-1], *event)))
    found = [*(np.take(value, 0, axis) for value in values), *gradients]
    engine.note_nonfinite(found, failed[..., 0])
    found += [failed[..., 0]] * spec.tells_failures
    found += [np.take(part, 0, axis) for part in aux]
    return list(map(copy, found, spec.outputs))


def hessian_times(engine: Engine, spec: CallSpec, *arrays: Array | bytes) -> Parts:
    """The Hessian of `<u, value>` times `v`, from gradients at two points of a line along `v`.

    Entries that hardly move on it move along a line of their own, by linearity.

    Args:
        engine: An engine with a gradient, and finite differences instead of a Hessian.
        spec: How the leaves form the arguments.
        arrays: The leaves of the arguments, of `u` if the value is not one number, and of `v`.
    """
    scheme, n, places = engine.schemes["hess"], len(spec.paths), spec.places
    first = len(arrays) - len(places)
    xs, us, vs = arrays[:n], arrays[n:first], [copy(v, engine.dtype) for v in arrays[first:]]
    axis = vs[0].ndim - spec.event_ndims[places[0]]  # of the points, after the batch
    speeds = [_speed(v, np.asarray(xs[k], engine.dtype)) for k, v in zip(places, vs, strict=True)]
    fastest = _largest(speeds, axis)
    with np.errstate(divide="ignore", invalid="ignore"):  # on the next line if 1000 times slower
        lines = [np.floor(np.log(_behind(fastest, s) / s) / np.log(1000)) for s in speeds]
    count = 1 + int(max(np.max(x, initial=0, where=np.isfinite(x)) for x in lines))
    along = [
        np.stack([np.where(line == i, v, 0) for i in range(count)], axis)
        for line, v in zip(lines, vs, strict=True)
    ]
    points, far = _around(engine, spec, scheme, xs, along, with_itself=scheme == "2-point")
    gradients = _gradients(engine, spec, points, [np.expand_dims(u, axis) for u in us], axis)
    products = [_slopes(scheme, g, far, axis).sum(axis) for g in gradients]
    return list(map(copy, products, spec.gradient_dtypes))


def _around(
    engine: Engine,
    spec: CallSpec,
    scheme: str,
    arrays: Sequence[Any],
    vs: Sequence[Array],
    *,
    with_itself: bool,
) -> tuple[list[Any], Array]:
    """Points in some directions from the arguments, as another batch dimension, the last one.

    Args:
        engine: The engine.
        spec: How the leaves form the arguments.
        scheme: The name of the differences.
        arrays: The leaves.
        vs: For each leaf that has derivatives, directions `[batch..., directions, event...]`.
        with_itself: Whether the point of the arguments is the first one.

    Returns:
        The leaves at these points: in each direction, and for "3-point" in each opposite one. And
        how far apart two of them are, in units of the direction, `[batch..., directions]`.
    """
    (power, signs), dtype = SCHEMES[scheme], engine.dtype
    points = [
        np.expand_dims(np.array(a, object if isinstance(a, bytes) else None), np.ndim(a) - n)
        for a, n in zip(arrays, spec.event_ndims, strict=True)
    ]
    xs = [points[k].astype(dtype) for k in spec.places]
    axis = xs[0].ndim - 1 - spec.event_ndims[spec.places[0]]
    fastest = _largest(list(map(_speed, vs, xs)), axis + 1)
    step = np.finfo(dtype).eps ** power / np.where(fastest == 0, 1, fastest)
    if len(signs) == 1:  # away from zero
        step = np.where(_inner(xs, vs, axis + 1) < 0, -step, step)
    moved = []
    for k, x, v in zip(spec.places, xs, vs, strict=True):
        sides = [(x + sign * _behind(step, v) * v).astype(dtype) for sign in signs]
        itself = np.broadcast_to(x, (*step.shape[:-1], 1, *x.shape[axis + 1 :]))
        points[k] = np.concatenate([*[itself] * with_itself, *sides], axis)
        moved.append(sides[0] - (x if len(signs) == 1 else sides[1]))
    # As far as they really are, after rounding.
    far, squares = _inner(moved, vs, axis + 1), _inner(vs, vs, axis + 1)
    return points, np.where(squares == 0, 1, far / np.where(squares == 0, 1, squares))


def _slopes(scheme: str, ys: Array, far: Array, axis: int) -> Array:
    """The slopes in all directions of what was found at the points of `_around`."""
    ys, count = np.moveaxis(ys, axis, 0), far.shape[-1]
    _, signs = SCHEMES[scheme]
    ends = ys[-count:], ys[-2 * count : -count]
    one, other = (ends[0], ys[:1]) if len(signs) == 1 else (ends[1], ends[0])
    with np.errstate(invalid="ignore"):
        slopes = np.moveaxis(one - other, 0, axis)
        return slopes / _behind(far, slopes)


def _inner(us: Sequence[Array], vs: Sequence[Array], axis: int) -> Array:
    """The inner products, over the dimensions from `axis` on."""
    products = [u * v for u, v in zip(us, vs, strict=True)]
    return functools.reduce(np.add, [p.sum(tuple(range(axis, p.ndim))) for p in products])


def _speed(v: Array, x: Array) -> Array:
    """How fast entries `x` move along `v`, relative to their size."""
    return np.abs(v) / np.maximum(1, np.abs(x))


def _largest(speeds: Sequence[Array], axis: int) -> Array:
    """The largest entry, over the dimensions from `axis` on."""
    return functools.reduce(
        np.maximum, [s.max(tuple(range(axis, s.ndim)), initial=0.0) for s in speeds]
    )


def _gradients(
    engine: Engine, spec: CallSpec, points: Sequence[Array], us: Sequence[Array], axis: int
) -> Parts:
    """The gradients of `<u, value>`, NaN where the engine failed; of the value without `us`."""
    wide = dataclasses.replace(_wide(spec), tells_failures=True)
    us = us or [np.ones([1] * (axis + 1))]
    if engine.gives("vjp"):
        product = Product(wide, "the VJP", "u")
        product.counts_nonfinite = False
        return engine.product("vjp", product, *points, *us, counter="hess_calls")
    n, m = len(spec.value.shapes), len(spec.places)
    reply = Evaluation(wide)
    reply.counts_nonfinite = False
    parts = engine.evaluate(reply, *points, counter="hess_calls")
    jacobians, failed = parts[n : n + n * m], parts[n + n * m]
    gradients = []
    for j in range(m):
        terms = [
            np.sum(_behind(u, jacobian) * jacobian, tuple(range(axis + 1, u.ndim)))
            for u, jacobian in zip(us, jacobians[j::m], strict=True)
        ]
        gradients.append(np.where(_behind(failed, terms[0]), np.nan, sum(terms)))
    return gradients


def _wide(spec: CallSpec) -> CallSpec:
    """The same, in float64: differences of rounded numbers would be noise."""
    dtypes = [dtype and np.float64 for dtype in spec.dtypes]
    return dataclasses.replace(spec, dtypes=dtypes, value_dtype=np.float64)


def _behind(a: Array, like: Array) -> Array:
    """`a` with as many dimensions as another array, those of size 1 behind."""
    return a.reshape((*a.shape, *[1] * (like.ndim - a.ndim)))
