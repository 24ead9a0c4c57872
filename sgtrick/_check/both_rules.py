"""Forward mode beside reverse mode, for functions with a rule for each."""

import numpy as np
import tensorflow as tf

from sgtrick._check.leaves import Named, OfLeaves, random_signs, wide
from sgtrick._check.recorded import Recorded
from sgtrick._check.report import Entry
from sgtrick._check.verdicts import Tolerance


def compared(function: OfLeaves, inputs: Named, seed: int, rtol: float | None) -> Entry:
    """The derivative of a random projection along a random direction, by the two rules.

    That of the VJP rule, which the other entries compare with differences, is the numerical one.
    """
    random = np.random.default_rng(seed)
    xs = [x for _, x in inputs]
    direction = random_signs(random, inputs)
    tangents = [tf.constant(v, x.dtype) for v, x in zip(direction, xs, strict=True)]
    with tf.autodiff.ForwardAccumulator(xs, tangents) as accumulator:
        ys = function(inputs)
    upstream = random_signs(random, ys)
    forward = 0.0
    for (_, y), u in zip(ys, upstream, strict=True):
        t = accumulator.jvp(y)
        forward += 0.0 if t is None else float(np.sum(u * wide(t)))
    terms, _, refusal = Recorded(function, inputs).along(direction, upstream)
    reverse, size = float(terms.sum()), float(np.abs(terms).sum())
    tolerance = Tolerance.of([*xs, *(y for _, y in ys)], rtol, atol=None)
    allowed = tolerance.rtol * max(size, abs(forward))
    off = abs(forward - reverse)
    verdict = "ok" if off <= allowed else "refused" if np.isnan(off) else "wrong"
    return Entry(
        order=1,
        name="forward mode",
        embedded=forward,
        numerical=reverse,
        uncertainty=0.0,
        allowed=allowed,
        verdict=verdict,
        remark=refusal or "the JVP rule; numerical: the VJP rule",
        steps=np.ones(1),
        differences=np.array([reverse]),
    )
