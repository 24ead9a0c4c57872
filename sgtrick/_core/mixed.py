"""Values that were computed at a fixed point, and how they move with it.

With respect to what else they are made of (arguments that no rule is for, variables, tensors from
outside) TensorFlow differentiates the values themselves, at that fixed point. Nothing says how such
a derivative moves with the point. It moves as the gradient with respect to the point does with the
others, for second derivatives are symmetric: so all that is missing is known, to every order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick._core import adjoint, loud
from sgtrick._core._tensorflow import graphs, tapes, tracing
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule

# From upstream gradients, points and what is passed to the gradients with respect to the points.
Gradients = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


class Others(NamedTuple):
    """What values are made of besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors and then variables that the gradients find by themselves.
        covers: Whether derivatives of the values are those along tangents of these, and of nothing
            else that they are made of.
        unknown: Whether they are made of something else for certain.
    """

    passed: Sequence[Any]
    closed: Sequence[Any] = ()
    covers: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
    unknown: bool = False


class Moving(NamedTuple):
    """How values move with the point.

    Attributes:
        name: What errors call the function.
        gradients: The gradients with respect to the point.
        xs: The point.
        others: What else they are made of.
    """

    name: str
    gradients: Gradients
    xs: Sequence[Any]
    others: Others

    def along(
        self, us: Sequence[Any], xs: Sequence[Any], passed: Sequence[Any], tangents: Sequence[Any]
    ) -> list[Any]:
        """The derivative of the gradients along tangents of the others."""
        weights = [adjoint.probe(x) for x in xs]
        # What a graph captured before is not recorded when it is used again, and tensors that
        # happen to be the same are to be told apart.
        xs, passed = [tf.identity(x) for x in xs], [tf.identity(t) for t in passed]
        closed = [graphs.as_used(c) for c in self.others.closed]
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch(weights)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([*passed, *closed])
                pairs = [
                    (tf.convert_to_tensor(g), w)
                    for g, w in zip(self.gradients(us, xs, passed), weights, strict=True)
                    if g is not None
                ]
            gs, ws = [g for g, _ in pairs], [tf.cast(w, g.dtype) for g, w in pairs]
            moved = tape.gradient(gs, [*passed, *closed], output_gradients=ws)
            pairs = [
                (tf.convert_to_tensor(m), t)  # of a table that is gathered from, slices
                for m, t in zip(moved, tangents, strict=True)
                if m is not None and t is not None
            ]
        found = outer.gradient(
            [m for m, _ in pairs], weights, output_gradients=[t for _, t in pairs]
        )
        return [
            tf.zeros_like(x) if g is None else tf.convert_to_tensor(g)
            for g, x in zip(found, xs, strict=True)
        ]


def beside(
    moving: Moving, ys: Sequence[Any], rule: Rule | None = None, misses: "Misses | None" = None
) -> list[Any]:
    """Returns `ys`, with the derivatives that they have and those with respect to the point.

    Args:
        moving: How they move.
        ys: The values at a fixed point; None in the place of one has none.
        rule: From upstream gradients of `ys` to those with respect to the point, and from tangents
            of the point to those of `ys`: for first derivatives.
        misses: What is not known of how they move.
    """
    moving = _carried(moving, ys)
    name, xs, others = moving.name, list(moving.xs), moving.others
    count = len(ys)
    inputs = [*ys, *xs, *others.passed, *(_value(c) for c in others.closed)]

    def pull(*us: Any) -> list[Any]:
        by_xs = rule.pull(*us) if rule else moving.gradients(us, xs, others.passed)
        if misses:
            by_xs = misses.pulled(by_xs, xs, us)
        if tf.executing_eagerly() and not tapes.somebody_records():
            return [*us, *by_xs, *[None] * (len(inputs) - count - len(xs))]
        places = [i for i, u in enumerate(us) if u is not None]
        live = [tf.convert_to_tensor(us[i]) for i in places]
        carried = _carried(moving, us)
        rest = [*carried.others.passed, *carried.others.closed]

        def gradients(z: Sequence[Any], xs: Sequence[Any], passed: Sequence[Any]) -> list[Any]:
            at: list[Any] = [None] * count
            for i, u in zip(places, passed[: len(live)], strict=True):
                at[i] = u
            return carried.along(at, xs, passed[len(live) :], z[len(live) :])

        def covers(*z: Any) -> Any:
            assert others.covers
            of_ys: list[Any] = [None] * count
            for i, z_i in zip(places, z[: len(live)], strict=True):
                of_ys[i] = z_i
            return others.covers(of_ys, z[len(live) :])

        again = Others([*live, *carried.others.passed], carried.others.closed)
        zeros = [tf.zeros_like(_value(t)) for t in rest]
        further = Misses(name, covers, others.unknown) if others.covers else None
        moved = beside(Moving(name, gradients, carried.xs, again), [*live, *zeros], misses=further)
        own: list[Any] = [None] * count
        for i, u in zip(places, moved[: len(live)], strict=True):
            own[i] = u
        return [*own, *by_xs, *moved[len(live) :]]

    def push(*tangents: Any) -> list[Any]:
        of_ys, of_xs = tangents[:count], tangents[count : count + len(xs)]
        of_others = list(tangents[count + len(xs) :])
        known = [i for i, t in enumerate(of_others) if t is not None]
        along = rule.push(*of_xs) if rule and callable(rule.push) else _push(moving, ys, of_xs)
        if misses:
            along = misses.pushed(along, of_xs)
        moved = [
            a if t is None else t if a is None else t + a for t, a in zip(of_ys, along, strict=True)
        ]
        places = [i for i, t in enumerate(moved) if t is not None]
        carried = _carried(
            moving, [None if t is None else y for t, y in zip(moved, ys, strict=True)]
        )

        def gradients(us: Sequence[Any], xs: Sequence[Any], passed: Sequence[Any]) -> list[Any]:
            at: list[Any] = [None] * count
            for i, u in zip(places, us, strict=True):
                at[i] = u
            ts: list[Any] = [None] * len(of_others)
            for i, t in zip(known, passed[: len(known)], strict=True):
                ts[i] = t
            return carried.along(at, xs, passed[len(known) :], ts)

        def covers(*_: Any) -> Any:
            assert others.covers
            return others.covers(of_ys, of_others)

        again = Others(
            [*(of_others[i] for i in known), *carried.others.passed], carried.others.closed
        )
        further = Misses(name, covers, others.unknown) if others.covers else None
        next_ = Moving(name, gradients, carried.xs, again)
        kept = beside(next_, [moved[i] for i in places], misses=further)
        for i, t in zip(places, kept, strict=True):
            moved[i] = t
        return moved

    if rule:
        return keep(ys, inputs, rule._replace(pull=pull, push=push))
    return keep(ys, inputs, Rule(name, pull, push, lost=[False] * len(inputs)))


def _push(moving: Moving, ys: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The tangents of values along those of the point: the gradients, transposed."""
    us = [adjoint.probe(y) for y in ys]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(us)
        pairs = [
            (tf.convert_to_tensor(g), t)
            for g, t in zip(
                moving.gradients(us, moving.xs, moving.others.passed), tangents, strict=True
            )
            if g is not None and t is not None
        ]
    found = tape.gradient([g for g, _ in pairs], us, output_gradients=[t for _, t in pairs])
    return [tf.zeros_like(y) if g is None else g for g, y in zip(found, ys, strict=True)]


_ELSEWHERE = (
    "A derivative of {0} with respect to something that it closes over was differentiated again, "
    "with respect to its arguments, and how the one moves with the other is not known. Pass what "
    "it closes over as an argument; or differentiate with respect to the arguments first."
)


class Misses(NamedTuple):
    """Derivatives of values, of which not all that they are made of is known.

    Attributes:
        name: What errors call the function.
        covers: From cotangents of them, whether what is known is all that these are of.
        unknown: Whether there is something else for certain.
    """

    name: str
    covers: Callable[..., Any]
    unknown: bool

    def pulled(self, by_xs: Sequence[Any], xs: Sequence[Any], us: Sequence[Any]) -> list[Any]:
        """Gradients with respect to the point, and errors where a part is missing."""
        message, fits = _ELSEWHERE.format(self.name), self.covers(*us)
        return [
            g + loud.failure(x, message, [u for u in us if u is not None], unless=fits)
            for g, x in zip(by_xs, xs, strict=True)
        ]

    def pushed(self, along: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Tangents along those of the point, and errors where a part is missing."""
        if not self.unknown:
            return list(along)
        zero = loud.insist_on_zeros(_there(tangents), _ELSEWHERE.format(self.name))
        return [a + tf.cast(zero, a.dtype) for a in along]


def _carried(moving: Moving, us: Sequence[Any]) -> Moving:
    """The same with gradients that can be called where the tensors that they use are out of reach.

    A gradient graph is differentiated in another one, which can take tensors of the former, and
    none of the forward graph. Then what the gradients have found by themselves is passed to them.
    """
    xs, passed, closed = moving.xs, moving.others.passed, moving.others.closed
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or all(
        graphs.operation(x) is not None and x.graph is graph for x in xs
    ):
        return moving
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in (*_there(us), *xs, *passed)]
    is_there, places = [u is not None for u in us], list[int]()

    def flat(*tensors: Any) -> list[Any]:
        given = iter(tensors)
        of_ys = [next(given) if there else None for there in is_there]
        of_xs = [next(given) for _ in xs]
        gradients = moving.gradients(of_ys, of_xs, list(given))
        places[:] = [i for i, g in enumerate(gradients) if g is not None]
        return [tf.convert_to_tensor(gradients[i]) for i in places]

    traced = tracing.Traced(flat, specs)
    captured = list(map(here, traced.captured))
    tensors = [c for c in closed if isinstance(c, tf.Tensor)]
    numbers = [next((i for i, t in enumerate(traced.captured) if _is(t, c)), None) for c in tensors]
    count = len(passed)

    def gradients(us: Sequence[Any], xs: Sequence[Any], passed: Sequence[Any]) -> list[Any]:
        outside = list(captured)
        for number, t in zip(numbers, passed[count:], strict=True):
            if number is not None:
                outside[number] = t
        found: list[Any] = [None] * len(xs)
        results = traced([*_there(us), *xs, *passed[:count]], outside)
        for i, g in zip(places, results, strict=True):
            found[i] = g
        return found

    brought = [here(t) for t in (*passed, *map(_value, tensors))]
    variables = [c for c in closed if not isinstance(c, tf.Tensor)]
    others = Others(brought, variables, moving.others.covers)
    return Moving(moving.name, gradients, [here(x) for x in xs], others)


def _value(closed: Any) -> Any:
    return tf.convert_to_tensor(graphs.as_used(closed))


def _is(a: Any, b: Any) -> bool:
    return bool(graphs.identity_of(a) == graphs.identity_of(b))


def _there(tensors: Sequence[Any]) -> list[Any]:
    return [t for t in tensors if t is not None]
