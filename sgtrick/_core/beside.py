"""The rule of what it covers, beside TensorFlow's own derivatives with respect to all else.

Let `y = f(x, w)`: a rule covers `x`; `w` are other arguments, variables and tensors that `f` closes
over. The value is computed at a stopped point, and TensorFlow differentiates it with respect to `w`
as ever. The rule gives the gradient with respect to the point, as a function of everything::

    G(u, x, w) = (df/dx)' u

So the outputs are the values at the stopped point, which keep their own derivatives beside those of
the rule. What TensorFlow computes at the stopped point does not depend on the point. So to each
first derivative by `w` a zero is added, whose derivative by `x` is an error.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._core.rule import Changed, Rule, plus
from sgtrick._core.unknown import refuse, unless_moving
from sgtrick._tensorflow import connections, tapes
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import Gradient, Tangent, Tensor


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


class BesideAutodiff(Changed):
    """A rule with respect to a point, beside autodiff with respect to all else.

    Its inputs are the outputs, whose own derivatives they keep, the point, and all else.
    """

    def __init__(
        self, rule: Rule, ys: Sequence[Tensor], xs: Sequence[Tensor], others: Others
    ) -> None:
        """A rule of outputs `ys` with respect to the point `xs`, beside `others`."""
        super().__init__(rule)
        self._ys, self._xs, self._others = ys, xs, others
        self._lost = [connections.lost_in_calls(y, others.sources) for y in ys]

    def pull(self, *upstream: Tensor | None) -> list[Gradient]:
        """The upstream gradients, those of the rule, and zeros, refused by the point."""
        by_xs, others = self._rule.pull(*upstream), self._others.tensors
        if tf.executing_eagerly() and not tapes.somebody_records():
            return [*upstream, *by_xs, *[None] * len(others)]
        live = self._known_part(present(upstream))
        # A tape takes gradients by all that it watches, variables that `f` reads included.
        zeros = [
            self._zero(t, live, is_used=not tf.executing_eagerly() or tapes.asked_for(t))
            for t in others
        ]
        return [*spread(live, upstream), *by_xs, *zeros]

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """The sums of tangents along all else, which come in, and along the point, by the rule.

        What TensorFlow loses of the first is an error.
        """
        others, xs = self._others, self._xs
        n, m = len(self._ys), len(self._ys) + len(xs)
        # of_ys are tangents along the others, which TensorFlow computed at the stopped point.
        of_ys, of_xs, of_others = tangents[:n], tangents[n:m], present(tangents[m:])
        assert callable(self._rule.push)
        moved = plus(of_ys, self._rule.push(*of_xs))
        if not of_others:
            return moved
        by_closed = tangents[m + len(others.passed) :]
        for i, of_y in enumerate(self._lost):
            along = present([by_closed[k] for k in of_y])
            if along:
                t = tf.zeros_like(self._ys[i]) if moved[i] is None else moved[i]
                why, of = _LOST.format(self.name), [*xs, *others.tensors]
                (moved[i],) = unless_moving(why, [t], along, of)
        live = self._known_part(present(moved))
        return spread([t + self._zero(t, of_others) for t in live], moved)

    def _zero(self, like: Tensor, along: Sequence[Tensor], *, is_used: bool = True) -> Tensor:
        """A zero to add to a derivative by the others, which is linear in some tensors.

        Its derivatives by the point are errors.
        """
        known = [*self._others.tensors, *along]
        why = [*[_MIXED.format(self.name)] * len(self._xs), *[None] * len(known)]
        zero = tf.zeros_like(like)
        return refuse(zero, [*self._xs, *known], lambda: why, len(along), is_used=is_used)

    def _known_part(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Upstream gradients or tangents; an error if what is unknown of them is asked for."""
        if not self._others.has_lists:
            return list(tensors)
        # There is no zero like a list of tensors.
        return [refuse(t, self._xs, _MIXED.format(self.name)) for t in tensors]


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
