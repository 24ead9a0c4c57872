"""The point of a call, by which a rule gives the derivatives of values; and all else.

Let `y = f(x, w)`: a rule covers `x`; `w` are other arguments, variables and tensors that `f` closes
over. The value is computed at a stopped point, and TensorFlow differentiates it with respect to `w`
as ever. The rule gives the gradient with respect to the point, as a function of everything::

    G(u, x, w) = (df/dx)' u

So the outputs are the values at the stopped point, whose own derivatives are passed on, overridden
with the rule. What TensorFlow computes at the stopped point does not depend on the point. So to
each first derivative by `w` a zero is added, whose derivative by `x` is an error.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from sgtrick._arguments import calls, shapes, structures
from sgtrick._arguments.calls import Call
from sgtrick._arguments.structures import (
    Leaf,
    handle_of,
    numbers_of,
    present,
    spread,
    with_numbers,
)
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import embedding
from sgtrick._core.guard import Check, ExplicitRule, guarded
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule, in_addition, plus
from sgtrick._core.unknown import refuse, unless_moving
from sgtrick._tensorflow import connections, tapes, uses
from sgtrick._tensorflow.graphs import here
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import (
    Argnums,
    Args,
    Function,
    Gradient,
    Kwargs,
    Pushforward,
    Structure,
    Tangent,
    Tensor,
)

T = TypeVar("T")


class Selection:
    """The arguments of a call that a rule covers; all others keep their autodiff gradient.

    Attributes:
        call: The call.
        xs: The leaves of these arguments that have derivatives, as tensors.
    """

    def __init__(
        self,
        call: Call,
        positions: Sequence[int],
        names: Sequence[str],
        differentiated: Callable[[object], bool] = structures.has_derivatives,
    ) -> None:
        """The arguments at some positions, in this order; `names` are those of all arguments."""
        self.call, self._positions, self._names = call, positions, names
        self._places = list[tuple[int, int]]()  # the number of the argument, and that of the leaf
        self.xs = list[Tensor]()
        self._structures = dict[int, Structure]()  # as they were; None cannot be built again
        leaves = call.leaves
        for k in positions:
            for i, (place, leaf) in enumerate(call.flat[k]):
                if differentiated(leaf):
                    self._places.append((k, i))
                    name = names[k] + place
                    x = structures.to_tensor(numbers_of(leaf), name, beside=leaves)
                    self.xs.append(tapes.own_copy(x))
                else:
                    structures.check_supported(leaf, names[k] + place)
            if not call.is_leaf(k):
                self._structures[k] = structures.copied(call.values[k])
                if self._structures[k] is None and any(k == j for j, _ in self._places):
                    raise structures.no_structure(call.values[k], names[k])

    @functools.cached_property
    def stopped_xs(self) -> list[Tensor]:
        """`xs`, stopped."""
        return list(map(tapes.unrecorded, self.xs))

    @property
    def stopped(self) -> Call:
        """The call with the stopped leaves."""
        return self.at(self.stopped_xs)

    def others(self) -> "Selection":
        """The other arguments of the stopped call whose gradient may be requested.

        Tensors in an object that cannot be built of others stay there, as if it were closed over.
        """
        call = self.stopped
        rest = [
            k
            for k in range(len(call.values))
            if k not in self._positions
            and (call.is_leaf(k) or structures.copied(call.values[k]) is not None)
        ]
        return Selection(call, rest, self._names, structures.may_be_recorded)

    def at(self, xs: Sequence[Tensor], call: Call | None = None) -> Call:
        """This call, or another one, with other leaves instead of its own `xs`."""
        call = call or self.call
        replaced = dict[int, list[Any]]()
        for (k, i), x in zip(self._places, xs, strict=True):
            leaf = self.call.flat[k][i][1]
            x = with_numbers(leaf, x)
            if x is not call.flat[k][i][1]:
                replaced.setdefault(k, [leaf for _, leaf in call.flat[k]])[i] = x
        return call.with_arguments({k: self._packed(k, new) for k, new in replaced.items()})

    def _packed(self, k: int, leaves: Sequence[Any]) -> Structure:
        """An argument with other leaves."""
        if k not in self._structures:
            return leaves[0]
        like = self._structures[k]
        return None if like is None else tf.nest.pack_sequence_as(like, leaves)

    @property
    def with_copies(self) -> Call:
        """The call with its own copies of tensors: the function may close over the same ones."""
        given = [self.call.flat[k][i][1] for k, i in self._places]
        copies = zip(self.xs, given, strict=True)
        # What is a variable for the caller is one for the function, which may assign it. But in
        # functions, accumulators lose variables that branches and loops read.
        return self.at(
            [x if isinstance(t, tf.Tensor) or tapes.is_pushed([x]) else t for x, t in copies]
        )

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors and handles of variables among the arguments, and the copies of them."""
        leaves = list(map(numbers_of, self._selected()))
        given = [*leaves, *map(handle_of, leaves)]
        return [*(t for t in given if isinstance(t, tf.Tensor)), *self.xs]

    def read(self) -> Call:
        """The call with the current values of variables, which may be assigned later."""
        own, replaced = set(self._places), dict[int, Structure]()
        for k, (value, argument) in enumerate(zip(self.call.values, self.call.flat, strict=True)):
            leaves = [leaf for _, leaf in argument]
            read = [
                here(structures.as_tensor(t)) if (k, i) not in own and structures.is_dense(t) else t
                for i, t in enumerate(leaves)
            ]
            if all(t is leaf for t, leaf in zip(read, leaves, strict=True)):
                continue
            if self.call.is_leaf(k):
                replaced[k] = read[0]
            elif (like := structures.copied(value)) is not None:
                replaced[k] = tf.nest.pack_sequence_as(like, read)
        return self.at(self.xs, self.call.with_arguments(replaced))

    def primals(self, call: Call) -> Args:
        """These arguments, of a call that `at` returned."""
        return tuple(call.values[k] for k in self._positions)

    def by_leaf(self, ts: Sequence[T]) -> list[list[T | None]]:
        """What belongs to `xs`, for each leaf of each argument; None for all other leaves."""
        found = dict(zip(self._places, ts, strict=True))
        flat = self.call.flat
        return [[found.get((k, i)) for i in range(len(flat[k]))] for k in self._positions]

    def tangents(self, ts: Sequence[Tensor]) -> Args:
        """Tangents in the structure of the arguments, with None where there is no derivative.

        What nobody can differentiate by, numbers and arrays, has zeros.
        """
        found = []
        for k, of_argument in zip(self._positions, self.by_leaf(ts), strict=True):
            leaves = [leaf for _, leaf in self.call.flat[k]]
            moving = [self._tangent(*pair) for pair in zip(leaves, of_argument, strict=True)]
            found.append(self._packed(k, moving))
        return tuple(found)

    def _tangent(self, leaf: Any, t: Tensor | None) -> Structure:
        if t is not None:
            return with_numbers(leaf, t)
        if structures.holds_tensors(leaf) or not structures.has_derivatives(leaf):
            return None
        return tf.zeros_like(structures.to_tensor(leaf, "a tangent", beside=self.call.leaves))

    def check_numbers(self, name: str) -> None:
        """Checks that the arguments, unless they are empty, hold something numeric."""
        leaves = self._selected()
        if leaves and not any(map(structures.is_number, leaves)):
            raise TypeError(
                f"There is no derivative of {name} with respect to "
                f"{', '.join(self._names[k] for k in self._positions)}: "
                f"{', '.join(type(t).__name__ for t in leaves)}. Pass tensors, or structures of "
                "them that tf.nest knows, or select other arguments."
            )

    def _selected(self) -> list[Any]:
        return [leaf for k in self._positions for _, leaf in self.call.flat[k]]

    def jacobians(
        self, gradients: Sequence[Structure], y: Tensor, batch_ndims: int | None
    ) -> list[Leaf | None]:
        """Returns for each of `xs` a checked `Leaf`, or None where it has no gradient."""
        found = []
        xs = iter(self.xs)
        for k, gradient in zip(self._positions, gradients, strict=True):
            name, by = self._names[k], f"the gradient with respect to {self._names[k]}"
            argument = self._structures.get(k, self.call.values[k])
            for path, x, gx in structures.pair(argument, gradient, name, by):
                names = shapes.Names("the value", f"{by}{path}", f"{name}{path}")
                if structures.has_derivatives(x):
                    x = next(xs)
                    leaf = gx is not None and TENSORFLOW.leaf(path, x, gx, y, batch_ndims, names)
                    found.append(leaf or None)
                elif gx is not None:
                    raise TypeError(
                        f"{names.x} has no derivatives, but {names.gx} is not None. Return None "
                        f"there, or pass {names.x} as a tensor of a floating dtype."
                    )
        return found


# `G`: from upstream gradients, the point, and the other tensors that are passed explicitly.
PointGradients = Callable[
    [Sequence[Tensor | None], Sequence[Tensor], Sequence[Tensor]], Sequence[Gradient]
]


class Others(NamedTuple):
    """`w`: what values depend on besides the point.

    Attributes:
        passed: Tensors that are passed to the gradients.
        closed: Tensors that the values depend on besides, and the values of variables.
        has_lists: Whether they depend on a list of tensors, too.
        of_host: Tensors that only calls of the host got. The values have no derivatives by them.
        sources: For each of `closed`, itself, or the handle of the variable whose value it is.
    """

    passed: Sequence[Tensor]
    closed: Sequence[Tensor] = ()
    has_lists: bool = False
    of_host: Sequence[Tensor] = ()
    sources: Sequence[Tensor] = ()

    @classmethod
    def of(cls, passed: Sequence[Tensor], used: Uses) -> "Others":
        """What was passed to a function, and what else it used."""
        # Of a table that is gathered from, the rows: its gradient is sparse, and a zero like the
        # table would be dense.
        tables = set(map(id, used.tables))
        dense = [v for v in used.variables if id(v) not in tables]
        fixed = list(map(tapes.value_of, used.fixed))
        closed = [*used.tensors, *map(structures.as_tensor, dense), *fixed, *used.rows]
        sources = [*used.tensors, *(v.handle for v in dense), *used.fixed, *used.rows]
        return cls(passed, closed, used.has_lists, used.of_host, sources)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.passed or self.closed or self.has_lists)

    @property
    def tensors(self) -> list[Tensor]:
        """All that are known."""
        return [*self.passed, *self.closed]


class ValueAtPoint(NamedTuple):
    """A call whose value was computed at a stopped point.

    Attributes:
        name: The function's name in errors.
        point: The arguments that the gradients are with respect to.
        passed: The other arguments.
        result: What the function returned.
        used: What else this depends on.
        others: All that it depends on besides the point.
    """

    name: str
    point: Selection
    passed: Selection
    result: Structure
    used: Uses
    others: Others

    @classmethod
    def of(cls, name: str, point: Selection, f: Function) -> "ValueAtPoint":
        """Calls a function."""
        passed = point.others()

        def read(leaf: object) -> object:
            """A variable that is returned counts as used."""
            is_variable = structures.is_dense(leaf) and not isinstance(leaf, tf.Tensor)
            return structures.as_tensor(leaf) if is_variable else leaf

        result, used = uses.call(
            lambda: structures.map_leaves(read, passed.with_copies(f)),
            [*passed.xs, *point.stopped_xs],
        )
        return cls(name, point, passed, result, used, Others.of(passed.xs, used))

    def at(self, call: calls.Call, xs: Sequence[Tensor], passed: Sequence[Tensor]) -> calls.Call:
        """A call at another point and with other tensors as the other arguments."""
        return self.passed.at(passed, self.point.at(xs, call))

    def embed(
        self,
        ys: Sequence[Tensor],
        gradients: PointGradients,
        known: Callable[..., Sequence[Gradient]] | None = None,
        push: Pushforward | None = None,
        tangents: ExplicitRule | None = None,
    ) -> list[Tensor]:
        """Returns `ys`, with their own derivatives and those with respect to a point.

        Args:
            ys: Values at the stopped point.
            gradients: `G`, for any arguments.
            known: The same for the arguments of this call, from upstream gradients alone.
            push: From tangents of the point to tangents of `ys`; None to transpose the gradients.
            tangents: `push` for any arguments, if the gradients are its transpose.
        """
        name, xs, others = self.name, self.point.xs, self.others

        def explicit(us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Gradient]:
            return gradients(us, inputs[: len(xs)], inputs[len(xs) :])

        def pull_to_point(*us: Tensor | None) -> Sequence[Gradient]:
            return known(*us) if known else gradients(us, xs, others.passed)

        is_jvp = tangents is not None
        check = Check(
            name, tangents or explicit, xs if is_jvp else ys, [*xs, *others.passed], is_jvp=is_jvp
        )
        covered_and_not = [*xs, *others.tensors]
        rule = guarded(
            Rule(name, pull_to_point, push), check, ys, [*covered_and_not, *others.of_host]
        )
        if not others:
            # Something may be recorded all the same, or a check may ask what the host got.
            if tf.executing_eagerly() or others.of_host:
                return keep(ys, [*ys, *xs], in_addition(rule, len(ys)))
            return keep(ys, xs, rule)
        message, lost = (
            _MIXED.format(name),
            [connections.lost_in_calls(y, others.sources) for y in ys],
        )

        def pull(*us: Tensor | None) -> list[Gradient]:
            by_xs = rule.pull(*us)
            if tf.executing_eagerly() and not tapes.somebody_records():
                return [*us, *by_xs, *[None] * len(others.tensors)]
            live = known_part(present(us))
            # A tape takes gradients by all that it watches, variables that `f` reads included.
            zeros = [
                refused_zero(t, live, is_used=not tf.executing_eagerly() or tapes.asked_for(t))
                for t in others.tensors
            ]
            return [*spread(live, us), *by_xs, *zeros]

        def pushed(*tangents: Tangent) -> list[Tangent]:
            n, m = len(ys), len(ys) + len(xs)
            # of_ys are tangents along the others, which TensorFlow computed at the stopped point.
            of_ys, of_xs, of_others = tangents[:n], tangents[n:m], present(tangents[m:])
            assert callable(rule.push)
            moved = plus(of_ys, rule.push(*of_xs))
            if not of_others:
                return moved
            by_closed = tangents[m + len(others.passed) :]
            for i, of_y in enumerate(lost):
                along = present([by_closed[k] for k in of_y])
                if along:
                    t = tf.zeros_like(ys[i]) if moved[i] is None else moved[i]
                    why, of = _LOST.format(name), [*xs, *others.tensors]
                    (moved[i],) = unless_moving(why, [t], along, of)
            live = known_part(present(moved))
            return spread([t + refused_zero(t, of_others) for t in live], moved)

        def refused_zero(like: Tensor, along: Sequence[Tensor], *, is_used: bool = True) -> Tensor:
            """A zero to add to a derivative by the others, which is linear in some tensors."""
            known = [*others.tensors, *along]
            why, zero = [*[message] * len(xs), *[None] * len(known)], tf.zeros_like(like)
            return refuse(zero, [*xs, *known], lambda: why, len(along), is_used=is_used)

        def known_part(tensors: Sequence[Tensor]) -> list[Tensor]:
            """Upstream gradients or tangents; an error if what is unknown of them is asked for."""
            # There is no zero like a list of tensors.
            return [refuse(t, xs, message) if others.has_lists else t for t in tensors]

        rule_of_all = rule._replace(pull=pull, push=pushed)
        return keep(ys, [*ys, *covered_and_not], rule_of_all)

    def embed_leaves(
        self,
        y: Tensor,
        at: calls.Call,
        evaluated: Callable[[calls.Call], list[Leaf | None]],
        known: Callable[[], list[Leaf | None]] | None = None,
    ) -> Tensor:
        """The value with its gradients; everything else that it depends on keeps autodiff.

        Args:
            y: The value.
            at: The call, with the values that variables had when it was made.
            evaluated: Returns the Jacobians of any call.
            known: Returns those that this call computed with the value, if it did.
        """
        if not self.point.xs:
            return y
        rule = embedding.of_jacobians(self.name, y, known or (lambda: evaluated(at)))
        assert callable(rule.push)

        def gradients(
            us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            leaves = evaluated(self.at(at, xs, passed))
            return [leaf and TENSORFLOW.transpose(leaf, us[0]) for leaf in leaves]

        (kept,) = self.embed([y], gradients, known=rule.pull, push=rule.push)
        return kept


_MIXED = (
    "A mixed derivative of {0} is unknown: its derivative with respect to something that its rule "
    "does not cover (another argument, or what it closes over) was differentiated with respect to "
    "the arguments that the rule covers. Let the rule cover both: pass the former as an argument "
    "that is among argnums. Or differentiate with respect to the covered arguments first."
)

_LOST = (
    "{0} reads a variable in a tf.function that it calls, and TensorFlow's forward mode loses the "
    "tangent of the variable there. Pass the value of the variable to that function as an argument "
    "(w.read_value()), or take the derivative around the outer tf.function or in reverse mode."
)


def select(f: calls.Callee, argnums: Argnums, args: Args, kwargs: Kwargs) -> Selection:
    """The arguments that `argnums` selects, checked to be numeric."""
    call = f.bind(args, kwargs)
    point = Selection(call, f.positions(argnums, call), f.names(call))
    if not point.xs:
        point.check_numbers(f.name)
    return point
