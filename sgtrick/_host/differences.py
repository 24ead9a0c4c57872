"""Derivatives by finite differences: all points of all members of a batch as one batch.

The names and the steps are those of `scipy.optimize.approx_fprime` and its relatives: the step of
an entry `x` is `eps**(1/2) * max(1, |x|)` to one side for "2-point", with the sign of `x`, and
`eps**(1/3) * max(1, |x|)` to both for "3-point".
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
    """The reply of an engine with a gradient, from one with finite differences instead.

    Each member's point and those around it are another batch dimension, the last one.
    """
    (power, signs), dtype = SCHEMES[engine.schemes["grad"]], engine.dtype
    sizes = {
        k: math.prod(np.shape(arrays[k])[np.ndim(arrays[k]) - spec.event_ndims[k] :])
        for k in spec.places
    }
    count = 1 + len(signs) * sum(sizes.values())
    steps: list[tuple[slice, Array]] = []  # where the points of a leaf are, and how far
    points: list[Any] = []
    first = 1
    for k, a in enumerate(arrays):
        front = np.ndim(a) - spec.event_ndims[k]
        if k not in sizes:
            points.append(_expanded(a, front))
            continue
        x = copy(np.asarray(a), dtype)
        flat = x.reshape((*x.shape[:front], sizes[k]))
        step = np.finfo(dtype).eps ** power * np.maximum(1, np.abs(flat))
        if len(signs) == 1:
            step = np.where(flat >= 0, step, -step)
        around = np.repeat(flat[..., None, :], count, axis=front)
        for sign in signs:
            own = slice(first, first + sizes[k])
            entries = np.arange(sizes[k])
            around[..., first + entries, entries] += sign * step
            # As far as they really are, after rounding.
            steps.append((own, around[..., first + entries, entries] - flat))
            first += sizes[k]
        points.append(around.reshape((*x.shape[:front], count, *x.shape[front:])))

    inner = dataclasses.replace(_wide(spec), has_gradient=False, tells_failures=True)
    reply = Evaluation(inner)
    reply.counts_nonfinite = False  # of the points around it
    parts = engine.evaluate(reply, *points)
    n = len(spec.value.shapes)
    values, failed, aux = parts[:n], parts[n], parts[n + 1 :]
    axis = failed.ndim - 1  # of the points
    gradients = []
    for value in values:
        known = np.where(_behind(failed, value), np.nan, value)
        known = np.moveaxis(known, axis, -1)  # [batch..., value..., points]
        ahead = iter(steps)
        for k in spec.places:
            sides = [next(ahead) for _ in signs]
            ends = [known[..., own] for own, _ in sides]
            far = [_between(by, ends[0]) for _, by in sides]
            if len(sides) == 1:
                ends, far = [*ends, known[..., :1]], [*far, np.zeros_like(far[0])]
            with np.errstate(invalid="ignore"):
                flat = (ends[0] - ends[1]) / (far[0] - far[1])
            # Where the value is not the engine's, it is a constant.
            flat = np.where(_between(failed[..., :1], flat), 0, flat)
            event = points[k].shape[points[k].ndim - spec.event_ndims[k] :]
            gradients.append(flat.reshape((*flat.shape[:-1], *event)))
    found = [*(np.take(value, 0, axis) for value in values), *gradients]
    engine.note_nonfinite(found, failed[..., 0])
    found += [failed[..., 0]] * spec.tells_failures
    found += [np.take(part, 0, axis) for part in aux]
    return list(map(copy, found, spec.outputs))


def hessian_times(engine: Engine, spec: CallSpec, *arrays: Array | bytes) -> Parts:
    """The Hessian of `<u, value>` times `v`, from gradients at two points of a line along `v`.

    No entry moves farther than it does for a derivative by it alone, relative to its size. If `v`
    then hardly moves others, they move along a line of their own, by linearity.

    Args:
        engine: An engine with a gradient, and finite differences instead of a Hessian.
        spec: How the leaves form the arguments.
        arrays: The leaves of the arguments, of `u` if the value is not one number, and of `v`.
    """
    (power, signs), dtype = SCHEMES[engine.schemes["hess"]], engine.dtype
    n, places = len(spec.paths), spec.places
    xs, us = arrays[:n], arrays[n : len(arrays) - len(places)]
    vs = [copy(np.asarray(v), dtype) for v in arrays[len(arrays) - len(places) :]]
    axis = vs[0].ndim - spec.event_ndims[places[0]]  # of the points, after the batch
    speeds = [
        np.abs(v) / np.maximum(1, np.abs(np.asarray(xs[k], dtype)))
        for k, v in zip(places, vs, strict=True)
    ]
    fastest = _largest(speeds, axis)
    lines = [_line(speed, _behind(fastest, speed)) for speed in speeds]
    # Of the points. Of two, one is the point itself.
    steps = [[np.zeros_like(v) for v in vs]] if len(signs) == 1 else []
    moved = []  # how far along which lines
    for i in range(1 + max(int(line.max(initial=0)) for line in lines)):
        along = [np.where(line == i, v, 0) for line, v in zip(lines, vs, strict=True)]
        on_it = [np.where(line == i, s, 0) for line, s in zip(lines, speeds, strict=True)]
        largest = _largest(on_it, axis)
        far = np.finfo(dtype).eps ** power / np.where(largest == 0, np.inf, largest)
        steps += [[sign * _behind(far, v) * v for v in along] for sign in signs]
        moved.append(far)

    points = [_expanded(a, np.ndim(a) - m) for a, m in zip(xs, spec.event_ndims, strict=True)]
    for j, k in enumerate(places):
        points[k] = points[k].astype(dtype) + np.stack([step[j] for step in steps], axis)
    gradients = _gradients(engine, spec, points, [np.expand_dims(u, axis) for u in us], axis)
    found = []
    for k, gradient in zip(places, gradients, strict=True):
        at = [np.take(gradient, i, axis) for i in range(len(steps))]
        product = np.zeros_like(at[0])
        for i, far in enumerate(moved):
            one, other = (at[1 + i], at[0]) if len(signs) == 1 else at[2 * i : 2 * i + 2]
            far = _behind(len(signs) * far, one)
            with np.errstate(all="ignore"):
                product = product + np.where(far == 0, 0, (one - other) / far)
        found.append(copy(product, spec.dtypes[k]))
    return found


def _largest(speeds: Sequence[Array], axis: int) -> Array:
    """The largest entry of each batch member."""
    return functools.reduce(
        np.maximum, [s.max(tuple(range(axis, s.ndim)), initial=0.0) for s in speeds]
    )


def _line(speed: Array, fastest: Array) -> Array:
    """On which line an entry moves: on the next one if it is a thousand times slower."""
    with np.errstate(divide="ignore", invalid="ignore"):
        line = np.floor(np.log(fastest / speed) / np.log(1000))
    return np.where(np.isfinite(line), line, -1)  # -1: it does not move


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


def _expanded(a: Array | bytes, axis: int) -> Array:
    """An array of numbers or strings, with another dimension of size 1."""
    return np.expand_dims(np.array(a, object if isinstance(a, bytes) else None), axis)


def _behind(a: Array, like: Array) -> Array:
    """`a` with as many dimensions as another array, those of size 1 behind."""
    return a.reshape((*a.shape, *[1] * (like.ndim - a.ndim)))


def _between(a: Array, like: Array) -> Array:
    """The same, with those of size 1 before the last one."""
    return a.reshape((*a.shape[:-1], *[1] * (like.ndim - a.ndim), a.shape[-1]))
