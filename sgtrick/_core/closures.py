"""What a function depends on besides its arguments: variables, and tensors that it closes over."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._core import adjoint, ancestry, structures
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core.mixed import Others
from sgtrick._core.types import Structure, Tangent, Tape, Tensor


class Closure:
    """A call of a function, recorded to find out what the result depends on."""

    def __init__(self, f: Callable[[], Structure], passed: Sequence[Tensor]) -> None:
        """Calls `f`, which uses the tensors `passed` as arguments.

        Attributes:
            result: The value that it returned.
            before: The version of the graph before the call.
        """
        self._f, self._passed, self.before = f, list(passed), graphs.version()
        self._tape: Tape | None = None
        if tf.executing_eagerly() and not tapes.somebody_records():
            self.result = f()
            return
        self._tape = tf.GradientTape(persistent=True)
        with self._tape:
            self._tape.watch(self._passed)
            self.result = f()

    def others(self, ys: Sequence[Tensor], point: Sequence[Tensor]) -> Others | None:
        """What the values `ys` of the result depend on besides the point, None if nothing."""
        if self._tape is None:
            return None
        variables = [
            v for v in self._tape.watched_variables() if structures.is_differentiable(v.dtype)
        ]
        ys = [y for y in ys if structures.is_differentiable(y.dtype)]
        if tf.executing_eagerly():
            if not (self._passed or variables or tapes.is_recorded(ys)):
                return None
            sources = [*self._passed, *variables]
            return Others(
                self._passed,
                variables,
                lambda us, ts: self._covers(ys, sources, point, us, ts),
                unknown=not sources,
            )
        tensors, handles = ancestry.begins(ys, point, self.before)
        if not tensors and not handles and not self._passed:
            return None
        known = {graphs.identity_of(graphs.as_used(v.handle)): v for v in variables}
        # Gradients of variables that are gathered from are IndexedSlices; zeros would be dense.
        read = [v for key, v in known.items() if handles.get(key) == "read"]
        if len(read) == len(handles):
            return Others(self._passed, [*tensors, *read])
        return Others(self._passed, [*tensors, *read], _is_zero, unknown=True)

    def _covers(
        self,
        ys: Sequence[Tensor],
        sources: Sequence[Tensor],
        point: Sequence[Tensor],
        us: Sequence[Tensor | None],
        ts: Sequence[Tangent],
    ) -> Tensor | bool:
        """The dot-product test of the values' own derivatives.

        In higher derivatives it can fail for no reason. Then the answer is whether the function
        closes over any tensors.
        """
        assert self._tape is not None
        us = [u for u in us if u is not None]
        with tf.init_scope(), tapes.not_recording():
            probes = [adjoint.probe(y) for y in ys]
            found = self._tape.gradient(list(ys), list(sources), probes)
            found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        if not tf.executing_eagerly():
            # Forward mode over a function fails if new tensors are captured.
            probes = [tf.constant(p.numpy()) for p in probes]
            found = [None if g is None else tf.constant(g.numpy()) for g in found]
        with tapes.not_recording():
            fits = adjoint.holds(probes, us, found, ts)
        # Zeros say nothing about their own derivatives.
        if not tf.executing_eagerly() or (fits and not (us and _is_zero(us, ts))):
            return fits
        return not self._closes_over_tensors(point)

    def _closes_over_tensors(self, point: Sequence[Tensor]) -> bool:
        """Whether the call uses tensors other than its arguments; true if it cannot be traced."""
        try:
            captured = tracing.trace(lambda: [self._f(), None][1], []).graph.captures
        except Exception:  # code that only runs eagerly
            return True
        known = set(map(graphs.identity_of, [*self._passed, *point]))
        return any(
            structures.is_differentiable(t.dtype) and graphs.identity_of(t) not in known
            for t, _ in captured
        )


def _is_zero(us: Sequence[Tensor | None], _: Sequence[Tensor]) -> Tensor:
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.equal(u, 0)) for u in us if u is not None]))
