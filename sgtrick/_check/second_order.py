"""The gradient as a function, whose derivative is compared in turn."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sgtrick._check.leaves import (
    Named,
    OfLeaves,
    names_of_entries,
    recorded,
    tape_gradients,
    unit,
    unit_roundoff,
)
from sgtrick._types import Tensor


def gradient_of(
    function: OfLeaves, leaves: Sequence[str], random: np.random.Generator | None
) -> OfLeaves:
    """The gradient as a function: all rows of the Jacobian, or one row of a random projection."""
    seed = None if random is None else int(random.integers(2**32))

    def gradient(xs: Sequence[Tensor]) -> Named:
        tape, ys = recorded(function, xs)
        names = names_of_entries(ys)
        if seed is None:
            upstreams = [unit(len(names), i) for i in range(len(names))]
        else:
            upstreams = [np.random.default_rng(seed).choice([-1.0, 1.0], len(names))]
        found = []
        for name, upstream in zip(names, upstreams, strict=False):
            prefix = f"{name} by " if len(names) > 1 else ""
            gradients = tape_gradients(tape, ys, xs, upstream)
            for leaf, x, g in zip(leaves, xs, gradients, strict=True):
                g = tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
                # No more accurate than the value: the function may compute in its dtype.
                dtype = max([g, *(y for _, y in ys)], key=unit_roundoff).dtype
                found.append((prefix + leaf, tf.cast(g, dtype)))
        return found

    return gradient
