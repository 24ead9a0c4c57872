"""The guard: the one place where errors are added for derivatives that TensorFlow would lose.

A rule returns gradients, and TensorFlow differentiates them like all other tensors. So derivatives
of every order are those of the rule, and nothing is done for them here. But in two cases TensorFlow
finds no derivative, and says None or zero without a word:

* the gradient is connected to nothing with respect to which it could be differentiated: it is a
  constant, came from NumPy, or is stopped;
* a host call computes it.

So each gradient passes through an operation that passes derivatives on, and that also has the
inputs of the rule as its inputs. Only when this operation is differentiated, the rule is traced in
a graph that never runs. TensorFlow is asked there what the gradient is connected to.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import loud, structures
from sgtrick._core._tensorflow import connections, graphs, tapes, tracing, uses
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core._tensorflow.uses import Uses
from sgtrick._core.absent import Dense, present
from sgtrick._core.override import pass_on
from sgtrick._core.rule import Rule
from sgtrick._core.running import is_running, running
from sgtrick._core.transposition import transposed, values_of, with_values
from sgtrick._core.types import Gradient, Pullback, Pushforward, Tangent, Tensor

# From upstream gradients and inputs to gradients, one or None for each of the first inputs.
ExplicitRule = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Gradient]]


class Lost(NamedTuple):
    """Why TensorFlow would lose derivatives of a gradient: messages, None where it would not."""

    by_inputs: str | None = None
    by_upstream: str | None = None


class Check:
    """Finds out what TensorFlow would lose of the gradients that a rule returns, when asked."""

    def __init__(self, name: str, rule: ExplicitRule, inputs: Sequence[Tensor]) -> None:
        """The rule is a function of all that it depends on, such as tensors like `inputs`."""
        self._name, self._rule = name, rule
        self._specs = tracing.specs_of(inputs)
        self._found: dict[tuple[bool, ...], list[Lost] | str] = {}

    def lost(self, us: Sequence[Tensor | None], closed: Sequence[Tensor], i: int) -> Lost:
        """What is lost of gradient `i`.

        Args:
            us: The upstream gradients, None where there are none.
            closed: Tensors that the rule closes over and that are differentiated.
            i: The number of the gradient.
        """
        found = self._of(us, closed)
        return Lost(found, found) if isinstance(found, str) else found[i]

    def lost_of_tangents(self, us: Sequence[Tensor | None]) -> Lost:
        """What is lost of tangents, which depend on the point as all the gradients do."""
        found = self._of(us, ())
        if isinstance(found, str):
            return Lost(found, found)
        return next((Lost(one.by_inputs) for one in found if one.by_inputs), Lost())

    def cut(self, tangents: Sequence[Tangent]) -> str | None:
        """Why derivatives by tangents of the first inputs would be lost of one of the results."""
        # Those of a batch are stacked, and the rule is that of a member.
        likes = [
            None if t is None else spec for t, spec in zip(tangents, self._specs, strict=False)
        ]
        found = self._of(likes, ())
        if isinstance(found, str):
            return found
        return next((one.by_upstream for one in found if one.by_upstream), None)

    def _of(self, us: Sequence[Tensor | None], closed: Sequence[Tensor]) -> list[Lost] | str:
        key = tuple(u is None for u in us)
        if key not in self._found:
            self._found[key] = self._traced(us, closed)
        return self._found[key]

    def _traced(self, us: Sequence[Tensor | None], closed: Sequence[Tensor]) -> list[Lost] | str:
        n, count = len(present(us)), len(us)
        dense = Dense(lambda *ts: self._values(ts[:count], ts[count:]), [*us, *self._specs])

        def trace() -> tracing.Traced:
            with running("tapes"), loud.off():
                return tracing.Traced(dense, [*tracing.specs_of(present(us)), *self._specs])

        try:
            traced = tapes.apart(trace) if tapes.tapes_are_silenced() else trace()
        except Exception as error:
            if not tf.executing_eagerly():
                raise
            # What runs eagerly may do what no graph can, such as branching on values.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return _UNTRACEABLE.format(self._name, reason[-1].strip())
        inputs = [*traced.inputs[n:], *connections.varying(traced.captured, traced.inner, closed)]
        found = [self._lost_of(y, traced.inputs[:n], inputs) for y in traced.outputs]
        return [one or Lost() for one in dense.restored(found)]

    def _values(self, us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        gradients = self._rule(us, inputs)
        return [None if g is None else values_of(g) for g in gradients]

    def _lost_of(self, y: Tensor, us: Sequence[Tensor], inputs: Sequence[Tensor]) -> Lost:
        name, by_us = self._name, connections.are_connected(y, us)
        computed = connections.Subgraph(y)
        # What is made of upstream gradients alone does not depend on anything else.
        is_known = not computed.host_calls and (
            connections.are_connected(y, inputs) or (by_us and computed.is_made_of(us))
        )
        is_cut = not by_us or computed.host_sees(us)
        return Lost(None if is_known else message(name), cut_message(name) if is_cut else None)


def guarded(
    rule: Rule,
    check: Check,
    ys: Sequence[Tensor],
    inputs: Sequence[Tensor],
    of_tangents: Check | None = None,
) -> Rule:
    """The same rule, with errors for the derivatives that TensorFlow would lose.

    Args:
        rule: Its first gradients are those that `check` knows.
        check: Finds out what is lost.
        ys: The outputs.
        inputs: What the rule depends on.
        of_tangents: The same for a JVP rule, which gets tangents in the place of upstream
            gradients, and may pass them to the host.
    """

    def pull(*upstream: Tensor | None) -> Sequence[Gradient]:
        if loud.is_off() or (tf.executing_eagerly() and not tapes.somebody_records()):
            return rule.pull(*upstream)
        us = [None if u is None else tf.identity(u) for u in upstream]
        near = list(map(here, inputs))
        gradients, used = uses.call(lambda: rule.pull(*us), [*present(us), *near])
        near += [*used.tensors, *map(structures.as_tensor, used.variables)]
        at = [] if callable(rule.push) else present(us)
        lost = functools.partial(check.lost, us, used.tensors)
        return [
            None if g is None else _guard(g, functools.partial(lost, i), at, near)
            for i, g in enumerate(gradients)
        ]

    def guard(
        moved: Sequence[Tangent], tangents: Sequence[Tangent], xs: Sequence[Tensor]
    ) -> list[Tangent]:
        near, ts = list(map(here, xs)), present(tangents)

        def lost() -> Lost:
            cut = of_tangents.cut(tangents) if of_tangents else None
            return check.lost_of_tangents(likes)._replace(by_upstream=cut)

        return [None if t is None else _guard(t, lost, ts, near) for t in moved]

    def push(*tangents: Tangent) -> Sequence[Tangent]:
        moved = rule.push(*tangents) if callable(rule.push) else transposed(rule, ys, tangents)
        return moved if loud.is_off() else guard(moved, tangents, inputs)

    likes = [y if structures.is_differentiable(y.dtype) else None for y in ys]
    is_known = rule.push is not None
    push_ = rule.push if isinstance(rule.push, str) else push
    return Rule(rule.name, pull, push_, guard, transposes=not is_known)


def _guard(
    gradient: Gradient,
    lost: Callable[[], Lost],
    us: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    is_value: bool = False,
) -> Gradient:
    """A gradient or tangent as the output of an operation that adds errors.

    Args:
        gradient: What a rule has returned.
        lost: Finds out what is lost of it.
        us: The upstream gradients or tangents that the rule was called with.
        inputs: All else that it depends on.
        is_value: Whether it is a value instead, whose own derivatives come from a rule, and lack
            nothing.
    """
    n = len(us)

    def derivatives(part: Tensor, xs: Sequence[Tensor]) -> tuple[Pullback, Pushforward]:
        def pull(z: Tensor) -> list[Gradient]:
            found = lost()
            by_us = _failures(xs[:n], found.by_upstream, z, xs)
            by_inputs = _failures(xs[n:], found.by_inputs, z, xs)
            if found.by_inputs and not is_value:  # nor are those of what z is pulled back to known
                z = _guard(z, lost, [], xs[n:])
            return [z, *by_us, *by_inputs]

        def push(along: Tangent, *tangents: Tangent) -> list[Tangent]:
            found = tapes.apart(lost)
            along = _unless_moving(found.by_upstream, part, along, tangents[:n], xs)
            along = _unless_moving(found.by_inputs, part, along, tangents[n:], xs)
            if along is None or is_value:
                return [along]
            # The tangent lacks the same derivatives as the gradient.
            return [_guard(along, lost, [], xs[n:])]

        return pull, push

    part = values_of(gradient)
    return with_values(gradient, pass_on(part, [*us, *inputs], derivatives))


def _failures(
    likes: Sequence[Tensor], why: str | None, z: Tensor, xs: Sequence[Tensor]
) -> list[Tensor | None]:
    return loud.failures(likes, why, [z], xs) if why else [None] * len(likes)


def _unless_moving(
    why: str | None,
    part: Tensor,
    along: Tangent,
    tangents: Sequence[Tangent],
    xs: Sequence[Tensor],
) -> Tangent:
    moving = present(tangents)
    if not (why and moving):
        return along
    along = tf.zeros_like(part) if along is None else along
    return loud.unless_moving(why, [along], moving, xs)[0]


def unknown_by(y: Tensor, xs: Sequence[Tensor], message: str) -> Tensor:
    """The same tensor, with an error with this message for its derivatives with respect to `xs`.

    Its other derivatives are passed on, with derivatives of their own.
    """
    known = Lost(by_inputs=message)
    return _guard(y, lambda: known, [], xs, is_value=True) if xs else y


def unknown_by_closure(
    name: str, rule: str, ys: Sequence[Tensor], used: Uses, passed: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs of a function whose rule gives all derivatives, with errors for other ones.

    Those are derivatives with respect to tensors that it closes over, unless these were computed
    from its arguments: the rule accounts for that.

    Args:
        name: The name of the function.
        rule: What its rule is called in errors.
        ys: The outputs.
        used: What it closes over.
        passed: Its arguments.

    Raises:
        ValueError: It closes over a list of tensors, of which nothing tells how it was made.
    """
    if is_running():  # what a rule has computed is a constant for the functions that it calls
        return list(ys)
    if used.has_lists:
        raise ValueError(LIST.format(name))
    arguments = list(map(graphs.outside, passed))
    closed = [t for t in used.tensors if not connections.depends(graphs.outside(t), arguments)]
    if not closed:
        return list(ys)
    known = [*passed, *used.variables]
    lost = Lost(by_inputs=_CLOSES_OVER.format(name, rule))

    def unless_accounted_for() -> Lost:
        # Nothing tells how an eager tensor was made. But who asks for arguments alone does not ask
        # for what else it was made of.
        is_known = tf.executing_eagerly() and tapes.asked_only_for(known)
        return Lost() if is_known else lost

    return [_guard(y, unless_accounted_for, [], closed, is_value=True) for y in ys]


LIST = (
    "{0} closes over a tf.TensorArray, and nothing tells what that was made of. Read the array "
    "before, and pass what was read to {0} as an argument."
)

_CLOSES_OVER = (
    "{0} was differentiated with respect to a tensor that it closes over, or with respect to what "
    "this was computed from, but its {1} only gives the gradients of arguments and variables. Pass "
    "the tensor to {0} as an argument. If its derivative is meant to be zero, use tf.stop_gradient "
    "of it in {0}."
)


def message(name: str) -> str:
    """The error for a gradient that cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, but TensorFlow sees no connection from "
        "the gradient to the point, or to whatever else it was differentiated with respect to: it "
        "was computed by a host call or by NumPy; or it was stopped, or does not depend on the "
        "point. If it really is a constant, add 0 * x to it. Otherwise compute it from TensorFlow "
        "ops, or give the host call its own gradient with one of sgtrick's functions."
    )


def cut_message(name: str) -> str:
    """The error for a gradient that cannot be differentiated by the upstream gradients."""
    return (
        f"The gradient of {name} was differentiated again, with respect to the upstream gradient "
        "(that of whatever was computed from the result), but TensorFlow does not see how the one "
        "depends on the other: the gradient function passes it to a host call or to NumPy, or "
        "stops it. Compute with it in TensorFlow ops, or give the host call its own gradient with "
        "one of sgtrick's functions."
    )


_UNTRACEABLE = (
    "The gradient of {0} was differentiated again, but tf.function cannot trace the gradient "
    "function ({1}). Only a trace tells whether TensorFlow can differentiate it. Write it so that "
    "tf.function can trace it."
)
