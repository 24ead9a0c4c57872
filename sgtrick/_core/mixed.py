"""Values at a fixed point `x`, made of other things `w` too, and how the one moves with the other.

Let `y = f(x, w)`: `x` are the arguments that a rule is for, `w` all others, variables and tensors
from outside. The rule tells the gradient with respect to the point, as a function of everything::

    G(u, x, w) = (df/dx)' u

With respect to `w` TensorFlow differentiates the values themselves. They were computed at a point
that is stopped, so that it finds `(df/dw)' u` there, and not how that moves with `x`. But second
derivatives are symmetric: for every direction `t` of `w`, with `u` held,

    d/dx <(df/dw)' u, t>  =  d/dx d/dw <f, u> [t]  =  dG/dw [t]

and the right-hand side is made of `G` alone. So to each gradient with respect to `w` a zero is
added, whose gradient with respect to `x` is `dG/dw [t]` for a cotangent `t`; and each tangent
`df/dw [t]` is given the same for a cotangent `u`. This in its turn is a gradient with respect to
the point, of values that are made of `x` and other things, now `w` and `u`, or `w` and `t`. So the
same serves again, to every order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import adjoint, loud
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.absent import Dense, present, spread
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Tangent, Tensor, Variable

# `G`: from upstream gradients, the point, and those of the others that are passed to it.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class Others(NamedTuple):
    """`w`: what values are made of besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors and then variables that the gradients find by themselves.
        covers: Whether derivatives of the values are those along tangents of these, and of nothing
            else that they are made of.
        unknown: Whether they are made of something else for certain.
    """

    passed: Sequence[Tensor]
    closed: Sequence[Tensor | Variable] = ()
    covers: Callable[[Sequence[Tensor | None], Sequence[Tangent]], Tensor | bool] | None = None
    unknown: bool = False


class ByPoint(NamedTuple):
    """The gradients of values with respect to their point.

    Attributes:
        name: What errors call the function.
        gradients: `G`.
        xs: The point.
        others: What else the values are made of.
    """

    name: str
    gradients: PointGradients
    xs: Sequence[Tensor]
    others: Others

    def along_others(
        self,
        us: Sequence[Tensor | None],
        xs: Sequence[Tensor],
        passed: Sequence[Tensor],
        tangents: Sequence[Tangent],
    ) -> list[Tensor]:
        """Returns `dG/dw [t]`: the derivative of the gradients along tangents of the others.

        Tapes differentiate backwards alone, so twice: first `v -> (dG/dw)' v`, which is linear in
        `v`, whatever that is; then this with respect to `v`, for the cotangents `t`.
        """
        vs = [adjoint.probe(x) for x in xs]
        # What a graph captured before is not recorded when it is used again, and tensors that
        # happen to be the same are to be told apart.
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
                (tf.convert_to_tensor(p), t)  # of a table that is gathered from, slices
                for p, t in zip(pulled, tangents, strict=True)
                if p is not None and t is not None
            ]
        found = outer.gradient([p for p, _ in pairs], vs, [t for _, t in pairs])
        return [
            tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
            for g, x in zip(found, xs, strict=True)
        ]

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
        """The same of derivatives of the values, which are made of what is `given` to them, too."""
        others = Others([*given, *self.others.passed], self.others.closed)
        return ByPoint(self.name, gradients, self.xs, others)


def keep_own(
    point: ByPoint, ys: Sequence[Tensor], rule: Rule | None = None, gap: "Gap | None" = None
) -> list[Tensor]:
    """Returns `ys`, with the derivatives that they have and those with respect to the point.

    Args:
        point: The latter.
        ys: The values at a fixed point.
        rule: From upstream gradients of `ys` to those with respect to the point, and from tangents
            of the point to those of `ys`: for first derivatives.
        gap: What is not known of how they move with the point.
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
        # Where this runs, the forward pass may be out of reach.
        near = _within_reach(point, us)
        live = [tf.convert_to_tensor(u) for u in present(us)]
        n = len(live)

        def gradients(
            zs: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Tensor]:
            return near.along_others(spread(passed[:n], us), xs, passed[n:], zs[n:])

        def covers(*zs: Tensor | None) -> Tensor | bool:
            assert others.covers
            return others.covers(spread(zs[:n], us), zs[n:])

        # Of (df/dw)' u what moves with x: nothing in value.
        zeros = [tf.zeros_like(_as_tensor(t)) for t in (*near.others.passed, *near.others.closed)]
        kept = keep_own(near.again(gradients, live), [*live, *zeros], gap=_gap(point, covers))
        return [*spread(kept[:n], us), *by_xs, *kept[n:]]

    def push(*tangents: Tangent) -> list[Tangent]:
        # Those of the values along the others, which TensorFlow finds at the fixed point.
        of_ys, of_xs = tangents[: len(ys)], tangents[len(ys) : len(ys) + len(xs)]
        of_others = tangents[len(ys) + len(xs) :]
        along = rule.push(*of_xs) if rule and callable(rule.push) else point.along_point(ys, of_xs)
        if gap:
            along = gap.pushed(along, of_xs)
        moved = [
            a if t is None else t if a is None else t + a for t, a in zip(of_ys, along, strict=True)
        ]
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

        kept = keep_own(near.again(gradients, live), present(moved), gap=_gap(point, covers))
        return spread(kept, moved)

    if rule:
        return keep(ys, inputs, rule._replace(pull=pull, push=push))
    return keep(ys, inputs, Rule(point.name, pull, push, lost=[False] * len(inputs)))


class Gap(NamedTuple):
    """Derivatives of values, of which not all that they are made of is known.

    Attributes:
        name: What errors call the function.
        covers: From cotangents of them, whether what is known is all that these are of.
        unknown: Whether there is something else for certain.
    """

    name: str
    covers: Callable[..., Tensor | bool]
    unknown: bool

    def pulled(
        self, by_xs: Sequence[Gradient], xs: Sequence[Tensor], us: Sequence[Tensor | None]
    ) -> list[Gradient]:
        """Gradients with respect to the point, and errors where a part is missing."""
        message, fits = _ELSEWHERE.format(self.name), self.covers(*us)
        return [
            g + loud.failure(x, message, present(us), unless=fits)
            for g, x in zip(by_xs, xs, strict=True)
        ]

    def pushed(self, along: Sequence[Tangent], tangents: Sequence[Tangent]) -> Sequence[Tangent]:
        """Tangents along those of the point, and errors where a part is missing."""
        if not self.unknown:
            return along
        zero = loud.zero_if_still(present(tangents), _ELSEWHERE.format(self.name))
        return [None if a is None else a + tf.cast(zero, a.dtype) for a in along]


def _gap(point: ByPoint, covers: Callable[..., Tensor | bool]) -> Gap | None:
    """That of derivatives of values, None where all is known that the values are made of."""
    return Gap(point.name, covers, point.others.unknown) if point.others.covers else None


_ELSEWHERE = (
    "A derivative of {0} with respect to something that it closes over was differentiated again, "
    "with respect to its arguments, and how the one moves with the other is not known. Pass what "
    "it closes over as an argument; or differentiate with respect to the arguments first."
)


def _within_reach(point: ByPoint, us: Sequence[Tensor | None]) -> ByPoint:
    """The same with gradients that can be called where the tensors that they use are out of reach.

    A gradient graph is differentiated in another one, which can take tensors of the former, and
    none of the forward graph. Then what the gradients have found by themselves is passed to them.

    Args:
        point: The gradients.
        us: What they are called on is like these: None stays None.
    """
    xs, passed, closed = point.xs, point.others.passed, point.others.closed
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or all(
        graphs.operation(x) is not None and x.graph is graph for x in xs
    ):
        return point
    like, m, n = [*us, *xs, *passed], len(us), len(us) + len(xs)
    dense = Dense(lambda *ts: point.gradients(ts[:m], ts[m:n], ts[n:]), like)
    traced = tracing.Traced(dense, tracing.specs_of(present(like)))
    captured = [here(t) for t in traced.captured]
    tensors = [c for c in closed if isinstance(c, tf.Tensor)]
    # Where the gradients take them from.
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
    others = Others(brought, variables, point.others.covers)
    return ByPoint(point.name, gradients, [here(x) for x in xs], others)


def _as_tensor(closed: Tensor | Variable) -> Tensor:
    return tf.convert_to_tensor(graphs.as_used(closed))


def _is(a: Tensor, b: Tensor) -> bool:
    return bool(graphs.identity_of(a) == graphs.identity_of(b))
