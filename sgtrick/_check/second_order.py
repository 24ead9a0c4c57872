"""The gradient as a function, whose derivative is compared in turn, and symmetry of Hessians."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check.leaves import (
    Named,
    OfLeaves,
    random_signs,
    tape_gradients,
    unit_roundoff,
    unit_upstreams,
)
from sgtrick._check.point import Point
from sgtrick._check.report import Entry
from sgtrick._check.verdicts import ROUNDINGS_OF_A_VALUE, Tolerance
from sgtrick._types import Array


def gradient_of(function: OfLeaves, random: np.random.Generator | None) -> OfLeaves:
    """The gradient as a function: all rows of the Jacobian, or one row of a random projection."""
    seed = None if random is None else int(random.integers(2**32))

    def gradient(inputs: Named) -> Named:
        xs = [x for _, x in inputs]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(xs)
            ys = function(inputs)
        if seed is None:
            upstreams = list(unit_upstreams(ys))
        else:
            upstreams = [("projection", random_signs(np.random.default_rng(seed), ys))]
        scalar = seed is None and len(upstreams) == 1
        found = []
        for label, upstream in upstreams:
            gradients = tape_gradients(tape, ys, xs, upstream)
            used = [y for (_, y), u in zip(ys, upstream, strict=True) if u is not None]
            for (name, x), g in zip(inputs, gradients, strict=True):
                g = tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                # No more accurate than the value: the function may compute in its dtype.
                g = tf.cast(g, max([*used, g], key=unit_roundoff).dtype)
                found.append((name if scalar else f"{label} by {name}", g))
        return found

    return gradient


def magnitude_of_gradient(point: Point, is_projected: bool) -> Array:
    """The size of what the entries of the gradient, as a function, are rounded with."""
    rows = [point.magnitude.sum()] if is_projected else point.magnitude
    sizes = [np.full(x.size, size) for x, size in zip(point.x, point.sizes, strict=True)]
    return np.ravel(ROUNDINGS_OF_A_VALUE * np.divide.outer(rows, np.concatenate(sizes)))


def asymmetry(entries: Sequence[Entry], columns: int, tolerance: Tolerance) -> list[str]:
    """A note about the pair of mixed derivatives that should be equal but differ the most.

    Args:
        entries: The derivatives of gradients, column after column.
        columns: The number of entries of `x`.
        tolerance: By how much they may differ.
    """
    shape = columns, -1, columns  # the column, the entry of the value, the row of its Hessian
    embedded = np.reshape([entry.embedded for entry in entries], shape)
    mirrored = np.swapaxes(embedded, 0, 2)
    size = np.fmax(np.abs(embedded), np.abs(mirrored))
    excess = np.abs(embedded - mirrored) - tolerance.allowed(size, size.max(initial=0.0))
    if not np.any(excess > 0):  # NaN has a verdict of its own
        return []
    column, value, row = np.unravel_index(np.nanargmax(excess), excess.shape)
    names = np.reshape([entry.name for entry in entries], shape)
    first, second = (
        f"{names[place]} is {embedded[place]:.8g}"
        for place in ((column, value, row), (row, value, column))
    )
    return [f"The embedded Hessian is not symmetric: {first}, {second}."]
