"""What a function depends on besides its arguments: variables, and tensors that it closes over."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import adjoint, ancestry, lost, loud, structures
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core.absent import present
from sgtrick._core.calls import Selection
from sgtrick._core.mixed import Others
from sgtrick._core.override import unknown_by
from sgtrick._core.types import Structure, Tangent, Tape, Tensor, Variable


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

    def others(self, ys: Sequence[Tensor], selected: Selection) -> Others | None:
        """What the values `ys` of the result depend on besides `selected`, None if nothing."""
        point = selected.stopped_xs
        if self._tape is None:
            return None
        variables = [
            v for v in self._tape.watched_variables() if structures.is_differentiable(v.dtype)
        ]
        ys = [y for y in ys if structures.is_differentiable(y.dtype)]
        if tf.executing_eagerly():
            is_recorded = tapes.is_recorded(ys)
            if not (self._passed or variables or is_recorded):
                return None
            sources = [*self._passed, *variables]
            # In forward mode nothing would tell that something unknown was differentiated.
            if is_recorded and tapes.is_pushed([*selected.xs, *ys]):
                closed_over = self._closed_over(point)
                if closed_over is not None:
                    return self._known(closed_over, variables)
            return Others(
                self._passed,
                variables,
                lambda us, ts: self._covers(ys, sources, point, us, ts),
                lambda recording: self._is_complete(variables, point, recording),
            )
        tensors, handles, lists = ancestry.begins(ys, point, self.before)
        if not tensors and not handles and not lists and not self._passed:
            return None
        known = {graphs.identity_of(graphs.as_used(v.handle)): v for v in variables}
        # Gradients of variables that are gathered from are IndexedSlices; zeros would be dense.
        read = [v for key, v in known.items() if handles.get(key) == "read"]
        if len(read) == len(handles) and not lists:
            return Others(self._passed, [*tensors, *read])
        return Others(self._passed, [*tensors, *read], _is_zero, _never)

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
        if tf.executing_eagerly() and fits:
            return fits
        return self._is_complete((), point, recording=None) or fits

    def _is_complete(
        self, variables: Sequence[Variable], point: Sequence[Tensor], recording: Any | None
    ) -> bool:
        """Whether a tape knows nothing that the call closes over but these variables."""
        with tf.init_scope():
            closed_over = self._closed_over(point)
        return closed_over is not None and not any(
            structures.has_derivatives(t)
            and (recording is None or tapes.has_recorded(recording, t))
            for t in _besides(variables, closed_over)
        )

    def _closed_over(self, point: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors and handles that the call uses besides its arguments, found by tracing it.

        None for code that only runs eagerly.
        """
        try:
            captured = tracing.trace(lambda: [self._f(), None][1], []).graph.captures
        except Exception:
            return None
        known = set(map(graphs.identity_of, [*self._passed, *point]))
        return [t for t, _ in captured if graphs.identity_of(t) not in known]

    def _known(self, closed_over: Sequence[Tensor], variables: Sequence[Variable]) -> Others:
        """All that is differentiated, of a call that closes over these and nothing else."""
        recorded = [t for t in _besides(variables, closed_over) if tapes.is_recorded([t])]
        tensors = [t for t in recorded if structures.has_derivatives(t)]
        if len(tensors) == len(recorded):
            return Others(self._passed, [*tensors, *variables])
        # A watched variable that is not trainable.
        return Others(self._passed, [*tensors, *variables], _is_zero, _never)


class Rest:
    """What a function closes over besides variables, where a rule gives all of its derivatives."""

    def __init__(self, name: str, rule: str, passed: Sequence[Tensor]) -> None:
        """The function, called in the scope `noted`, uses the tensors `passed` as arguments."""
        self._name, self._message = name, _CLOSES_OVER.format(name, rule)
        self._passed, self._before = list(map(graphs.as_used, passed)), graphs.version()
        self._made_by: Mapping[Hashable, tapes.Operation] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        if tf.executing_eagerly() and tapes.somebody_records():
            with tapes.noting() as self._made_by:
                yield
        else:
            yield

    def unknown(self, y: Tensor, kept: Tensor) -> Tensor:
        """`kept`, with errors for the derivatives with respect to what `y` closes over."""
        return unknown_by(kept, self._of(y), self._message)

    def _of(self, y: Tensor) -> list[Tensor]:
        if tf.executing_eagerly():
            return ancestry.begins_eagerly(y, self._passed, self._before, self._made_by)
        tensors, _, lists = ancestry.begins([y], self._passed, self._before)
        for listed, computed in lists:
            tensors += self._listed(listed, computed)
        return list({graphs.identity_of(t): t for t in tensors}.values())

    def _listed(self, listed: Tensor, computed: Tensor) -> list[Tensor]:
        """What stands for a list of tensors from which a tensor was computed."""
        elements, are_all = ancestry.elements(listed)
        if are_all:
            passed = set(map(graphs.identity_of, self._passed))
            return [t for t in elements if graphs.identity_of(t) not in passed]
        if ancestry.is_read(computed):
            return [computed]
        raise LookupError(lost.unknown_list(self._name))


_CLOSES_OVER = (
    "{0} was differentiated with respect to a tensor that it closes over, or with respect to what "
    "this was computed from, but its {1} only gives the gradients of arguments and variables. Pass "
    "the tensor to {0} as an argument. If its derivative is meant to be zero, use tf.stop_gradient "
    "of it in {0}."
)


def _besides(variables: Sequence[Variable], closed_over: Sequence[Tensor]) -> list[Tensor]:
    """Those that are not handles of the variables."""
    handles = {graphs.identity_of(graphs.as_used(v.handle)) for v in variables}
    return [t for t in closed_over if graphs.identity_of(t) not in handles]


def _is_zero(us: Sequence[Tensor | None], _: Sequence[Tensor]) -> Tensor:
    return loud.are_zero(present(us))


def _never(_: Any | None) -> bool:
    return False
