"""Mixed derivatives of values that depend on a fixed point `x` and on other tensors `w`.

Let `y = f(x, w)`: `x` are the arguments that a rule covers, `w` all other arguments, variables and
tensors that `f` closes over. The rule gives the gradient with respect to the point, as a function
of everything::

    G(u, x, w) = (df/dx)' u

With respect to `w`, TensorFlow differentiates the values themselves. They were computed at a
stopped point, so it finds `(df/dw)' u` there, but not the derivative of that with respect to `x`.
But second derivatives are symmetric: for every direction `t` of `w`, with `u` fixed,

    d/dx <(df/dw)' u, t>  =  d/dx d/dw <f, u> [t]  =  dG/dw [t]

and the right-hand side only involves `G`. So to each gradient with respect to `w` a zero is added,
whose gradient with respect to `x` is `dG/dw [t]` for a cotangent `t`; and each tangent `df/dw [t]`
gets the same for a cotangent `u`. This in turn is a gradient with respect to the point, of values
that depend on `x` and on other tensors, now `w` and `u`, or `w` and `t`. So the construction
repeats, to every order.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick._core import adjoint, lost, loud, structures
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.absent import Dense, present, spread
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Tangent, Tensor, Variable

# `G`: from upstream gradients, the point, and the other tensors that are passed explicitly.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class Others(NamedTuple):
    """`w`: what values depend on besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors, followed by variables, that the gradients close over.
        covers: Whether these account for all derivatives of the values along given tangents.
        complete: Whether they do along any, of those that a tape knows, given what it has recorded.
    """

    passed: Sequence[Tensor]
    closed: Sequence[Tensor | Variable] = ()
    covers: Callable[[Sequence[Tensor | None], Sequence[Tangent]], Tensor | bool] | None = None
    complete: Callable[[Any | None], bool] | None = None


class ByPoint(NamedTuple):
    """The gradients of values with respect to their point.

    Attributes:
        name: The function's name in errors.
        gradients: `G`.
        xs: The point.
        others: What else the values depend on.
    """

    name: str
    gradients: PointGradients
    xs: Sequence[Tensor]
    others: Others

    def dense(
        self, us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
    ) -> Dense:
        """`G` as a function of the tensors among such arguments, to be traced."""
        m, n = len(us), len(us) + len(xs)
        like = [*us, *xs, *passed]
        return Dense(lambda *ts: self.gradients(ts[:m], ts[m:n], ts[n:]), like)

    def along_others(
        self,
        us: Sequence[Tensor | None],
        xs: Sequence[Tensor],
        passed: Sequence[Tensor],
        tangents: Sequence[Tangent],
    ) -> list[Tensor]:
        """Returns `dG/dw [t]`: the derivative of the gradients along tangents of the others.

        Tapes only differentiate backwards, so this takes two: first `v -> (dG/dw)' v`, which is
        linear in `v`, so any `v` will do; then this with respect to `v`, for the cotangents `t`.
        """
        vs, points = [adjoint.probe(x) for x in xs], xs
        # A tensor that a graph has captured before is not recorded when it is used again, and equal
        # tensors have to be told apart.
        xs, passed = [tf.identity(x) for x in xs], [tf.identity(t) for t in passed]
        ws = [*passed, *(graphs.as_used(c) for c in self.others.closed)]
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch(vs)
            with tf.GradientTape(watch_accessed_variables=False) as inner:
                inner.watch(ws)
                pairs = [
                    (tf.convert_to_tensor(g), v)
                    for g, v in zip(self.gradients(us, xs, passed), vs, strict=True)
                    if g is not None
                ]
            gs = [g for g, _ in pairs]
            pulled = inner.gradient(gs, ws, [tf.cast(v, g.dtype) for g, v in pairs])
            pairs = [
                (tf.convert_to_tensor(p), t)  # IndexedSlices, for a table that is gathered from
                for p, t in zip(pulled, tangents, strict=True)
                if p is not None and t is not None
            ]
        found = outer.gradient([p for p, _ in pairs], vs, [t for _, t in pairs])
        along = [
            tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
            for g, x in zip(found, xs, strict=True)
        ]
        on_host = self._on_host(gs, us, xs, passed)
        missed = present(list(itertools.compress(tangents, on_host)))
        if not missed:
            return along
        still = loud.are_zero(missed)
        message, of = lost.message(self.name), [*present(us), *present(tangents)]
        return [
            g + loud.failure(x, message, of, unless=still)
            for g, x in zip(along, points, strict=True)
        ]

    def _on_host(
        self,
        gs: Sequence[Tensor],
        us: Sequence[Tensor | None],
        xs: Sequence[Tensor],
        passed: Sequence[Tensor],
    ) -> list[bool]:
        """By which of the others the host computes gradients `gs` at `us`, `xs` and `passed`."""
        point: Sequence[Tensor] = [*present(us), *xs]
        if tf.executing_eagerly():
            traced = lost.traced(self.dense(us, xs, passed), [*point, *passed])
            if traced is None:
                return [False] * (len(passed) + len(self.others.closed))
            inputs, gs = traced
            point, passed = inputs[: len(point)], inputs[len(point) :]
        return lost.on_host(gs, [*passed, *map(graphs.as_used, self.others.closed)], point)

    def along_point(self, ys: Sequence[Tensor], tangents: Sequence[Tangent]) -> list[Tensor]:
        """Returns `df/dx [t]`: `G` transposed, from tangents of the point to those of values."""
        us = [adjoint.probe(y) for y in ys]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(us)
            pairs = [
                (tf.convert_to_tensor(g), t)
                for g, t in zip(
                    self.gradients(us, self.xs, self.others.passed), tangents, strict=True
                )
                if g is not None and t is not None
            ]
        found = tape.gradient([g for g, _ in pairs], us, [t for _, t in pairs])
        return [tf.zeros_like(y) if g is None else g for g, y in zip(found, ys, strict=True)]

    def again(self, gradients: PointGradients, given: Sequence[Tensor]) -> "ByPoint":
        """The same for derivatives of the values, which also depend on what is `given` to them."""
        others = Others([*given, *self.others.passed], self.others.closed)
        return ByPoint(self.name, gradients, self.xs, others)


def keep_own(
    point: ByPoint, ys: Sequence[Tensor], rule: Rule | None = None, gap: "_Gap | None" = None
) -> list[Tensor]:
    """Returns `ys`, with their own derivatives and those with respect to the point.

    Args:
        point: The gradients with respect to the point.
        ys: The values at a fixed point.
        rule: For first derivatives: from upstream gradients of `ys` to gradients with respect to
            the point, and from tangents of the point to tangents of `ys`.
        gap: The part of their derivative with respect to the point that is unknown.
    """
    point = _within_reach(point, ys)
    xs, others = list(point.xs), point.others
    inputs = [*ys, *xs, *others.passed, *(_as_tensor(c) for c in others.closed)]

    def pull(*us: Tensor | None) -> list[Gradient]:
        by_xs = rule.pull(*us) if rule else point.gradients(us, xs, others.passed)
        if gap:
            by_xs = gap.pulled(by_xs, xs, us)
        if tf.executing_eagerly() and not tapes.somebody_records():
            return [*us, *by_xs, *[None] * (len(inputs) - len(ys) - len(xs))]
        # The tensors of the forward pass may be out of reach here.
        near = _within_reach(point, us)
        live = [tf.convert_to_tensor(u) for u in present(us)]
        n, recording = len(live), tapes.asked()

        def gradients(
            zs: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Tensor]:
            return near.along_others(spread(passed[:n], us), xs, passed[n:], zs[n:])

        def covers(*zs: Tensor | None) -> Tensor | bool:
            assert others.covers
            return others.covers(spread(zs[:n], us), zs[n:])

        def complete() -> bool:
            assert others.complete
            return others.complete(recording)

        # The part of (df/dw)' u that varies with x. Its value is zero.
        zeros = [tf.zeros_like(_as_tensor(t)) for t in (*near.others.passed, *near.others.closed)]
        missing = gap.beyond(us) if gap else _gap(point, covers, complete)
        kept = keep_own(near.again(gradients, live), [*live, *zeros], gap=missing)
        return [*spread(kept[:n], us), *by_xs, *kept[n:]]

    def push(*tangents: Tangent) -> list[Tangent]:
        # of_ys are the tangents along the others, which TensorFlow computed at the fixed point.
        of_ys, of_xs = tangents[: len(ys)], tangents[len(ys) : len(ys) + len(xs)]
        along = rule.push(*of_xs) if rule and callable(rule.push) else point.along_point(ys, of_xs)
        if gap:
            along = gap.pushed(along, of_xs, xs)
        return [
            a if t is None else t if a is None else t + a for t, a in zip(of_ys, along, strict=True)
        ]

    def complete_tangents(moved: Sequence[Tangent], tangents: Sequence[Tangent]) -> list[Tangent]:
        of_ys, of_others = tangents[: len(ys)], tangents[len(ys) + len(xs) :]
        like_moved = [None if t is None else y for t, y in zip(moved, ys, strict=True)]
        near = _within_reach(point, like_moved)
        live = present(of_others)
        n = len(live)

        def gradients(
            us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Tensor]:
            ts = spread(passed[:n], of_others)
            return near.along_others(spread(us, moved), xs, passed[n:], ts)

        def covers(*_: Tensor | None) -> Tensor | bool:
            assert others.covers
            return others.covers(of_ys, of_others)

        def complete() -> bool:
            assert others.complete
            return others.complete(None)

        missing = gap.along(moved) if gap else _gap(point, covers, complete)
        kept = keep_own(near.again(gradients, live), present(moved), gap=missing)
        return spread(kept, moved)

    if rule:
        by_point = rule.again

        def again(*us: Tensor | None) -> list[Gradient]:
            assert by_point
            return [*us, *by_point(*us), *[None] * (len(inputs) - len(ys) - len(xs))]

        known = [*others.passed, *(c for c in others.closed if isinstance(c, tf.Tensor))]
        kept = rule._replace(pull=pull, push=push, again=by_point and again, others=known)
    else:
        kept = Rule(point.name, pull, push, lost=False)
    return keep(ys, inputs, kept._replace(finish=complete_tangents))


class _Gap(NamedTuple):
    """Derivatives of values that may depend on unknown tensors.

    Attributes:
        name: The function's name in errors.
        covers: Whether the known tensors account for the derivatives, given their cotangents.
        complete: Whether they do so for any cotangents.
    """

    name: str
    covers: Callable[..., Tensor | bool]
    complete: Callable[[], bool]

    def pulled(
        self, by_xs: Sequence[Gradient], xs: Sequence[Tensor], us: Sequence[Tensor | None]
    ) -> list[Gradient]:
        """Gradients with respect to the point, or errors if a part is missing."""
        message, through, fits = _ELSEWHERE.format(self.name), present(us), self.covers(*us)
        gradients = [
            g + loud.failure(x, message, through, unless=fits)
            for g, x in zip(by_xs, xs, strict=True)
        ]
        n = len(gradients)

        # That no part is missing here, as where `us` are zero, does not mean that none is nearby.
        def pull(*z: Tensor) -> list[Gradient]:
            by_us = [None] * len(through) if self.complete() else loud.failures(through, message, z)
            return [*z, *by_us]

        def push(*tangents: Tangent) -> Sequence[Tangent]:
            along = tangents[:n]
            return along if self.complete() else self.pushed(along, tangents[n:], through)

        inputs = [*gradients, *through]
        return keep(gradients, inputs, Rule(self.name, pull, push, lost=False))

    def beyond(self, us: Sequence[Tensor | None]) -> "_Gap":
        """The gap of what is computed from `us`: theirs, since they were computed at the point."""
        return self._replace(covers=lambda *_: self.covers(*us))

    def along(self, tangents: Sequence[Tangent]) -> "_Gap":
        """The gap of such tangents: theirs depend on the point as what they are tangents of."""
        return self._replace(covers=lambda *us: self.covers(*spread(us, tangents)))

    def pushed(
        self, along: Sequence[Tangent], tangents: Sequence[Tangent], xs: Sequence[Tensor]
    ) -> Sequence[Tangent]:
        """Tangents along those of the point, or errors if a part is missing."""
        return loud.unless_moving(_ELSEWHERE.format(self.name), along, present(tangents), xs)


def _gap(
    point: ByPoint, covers: Callable[..., Tensor | bool], complete: Callable[[], bool]
) -> _Gap | None:
    """The gap of derivatives of values, None if everything that the values depend on is known."""
    others = point.others
    return _Gap(point.name, covers, complete) if others.covers else None


_ELSEWHERE = (
    "A mixed derivative of {0} is unknown: its derivative with respect to something that it closes "
    "over was differentiated with respect to its arguments. Pass what it closes over as an "
    "argument; or differentiate with respect to the arguments first; or, in forward mode, write it "
    "so that tf.function can trace it."
)


def _within_reach(point: ByPoint, us: Sequence[Tensor | None]) -> ByPoint:
    """The same gradients, callable where the tensors that they close over are out of reach.

    A gradient graph is differentiated in another graph, which can use tensors of the gradient
    graph, but not of the forward graph. So tensors that the gradients close over are passed to
    them.

    Args:
        point: The gradients.
        us: The upstream gradients in calls have None at the same positions as these.
    """
    xs, passed, closed = point.xs, point.others.passed, point.others.closed
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or all(
        graphs.operation(x) is not None and x.graph is graph for x in xs
    ):
        return point
    dense = point.dense(us, xs, passed)
    traced = tracing.Traced(dense, tracing.specs_of([*present(us), *xs, *passed]))
    captured = [here(t) for t in traced.captured]
    tensors = [c for c in closed if isinstance(c, tf.Tensor)]
    # Their positions among the tensors that the gradients capture.
    places = [next((i for i, t in enumerate(traced.captured) if _is(t, c)), None) for c in tensors]
    count = len(passed)

    def gradients(
        us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
    ) -> list[Tensor | None]:
        outside = list(captured)
        for place, t in zip(places, passed[count:], strict=True):
            if place is not None:
                outside[place] = t
        return dense.restored(traced([*present(us), *xs, *passed[:count]], outside))

    brought = [here(t) for t in (*passed, *map(_as_tensor, tensors))]
    variables = [c for c in closed if not isinstance(c, tf.Tensor)]
    others = Others(brought, variables, point.others.covers, point.others.complete)
    return ByPoint(point.name, gradients, [here(x) for x in xs], others)


def _as_tensor(closed: Tensor | Variable) -> Tensor:
    return structures.as_tensor(graphs.as_used(closed))


def _is(a: Tensor, b: Tensor) -> bool:
    return bool(graphs.identity_of(a) == graphs.identity_of(b))
