"""With respect to what TensorFlow loses the derivatives of the gradients that a rule returns."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from sgtrick._core import ancestry, lost, loud, structures
from sgtrick._core._tensorflow import graphs, tapes
from sgtrick._core.absent import present
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Graph, Tape, Tensor


class Pulled(NamedTuple):
    """The result of a pullback, and what it may depend on.

    Attributes:
        gradients: The result.
        us: The upstream gradients that the pullback was called with.
        moving: Which of those are not zero.
        tape: A persistent tape that recorded the pullback, in eager execution.
        traced: Traces the pullback, to see what the tape does not.
    """

    gradients: list[Gradient]
    us: list[Tensor | None]
    moving: list[bool]
    tape: Tape | None
    traced: Callable[[], tuple[Sequence[Tensor], list[Tensor | None]]]

    @property
    def at(self) -> list[Tensor]:
        """The upstream gradients that are not None."""
        return present(self.us)

    def again(self, i: int) -> tuple[Sequence[Tensor], Tensor | None]:
        """The upstream gradients and gradient `i` in a graph of their own, if it can be traced."""
        us, gradients = self.traced()
        return us, gradients[i] if gradients else None


def recorded(rule: Rule, upstream: Sequence[Tensor | None]) -> Pulled:
    """Calls the pullback, and records what the gradients depend on."""
    us = [None if u is None else tf.identity(u) for u in upstream]
    moving = are_moving(upstream)
    traced = functools.cache(lambda: lost.traced_rule(rule, us))
    if not tf.executing_eagerly():
        return Pulled(list(rule.pull(*us)), us, moving, None, traced)
    tape = rule.tape or tf.GradientTape(persistent=True, watch_accessed_variables=False)
    with tape:
        tape.watch(rule.sources)
        tape.watch(present(us))
        return Pulled(list(rule.pull(*us)), us, moving, tape, traced)


class Lost(NamedTuple):
    """With respect to what TensorFlow loses the derivative of a gradient.

    Attributes:
        points: Whether it does, for each of the inputs.
        upstream: Whether it does, for each of the upstream gradients. Empty for a rule with a JVP,
            of which the pullback is the transpose.
        elsewhere: Other eager tensors with respect to which it does.
    """

    points: Sequence[bool]
    upstream: Sequence[bool]
    elsewhere: Sequence[Tensor] = ()


def of(rule: Rule, pulled: Pulled, i: int, xs: Sequence[Tensor]) -> Callable[[], Lost]:
    """Returns what TensorFlow loses of gradient `i`.

    In a graph, the operations show it. In eager execution it takes a backward pass, so it is only
    found out when it matters.
    """
    is_linear = callable(rule.push)  # its transpose
    if rule.lost is not None:
        by_outputs = zip(rule.cut or [False] * len(pulled.us), pulled.us, strict=True)
        known = Lost(
            [any(is_lost(rule, i, k) for k, m in enumerate(pulled.moving) if m)] * len(xs),
            [] if is_linear else [is_cut for is_cut, u in by_outputs if u is not None],
        )
    elif pulled.tape is None:
        gradient = pulled.gradients[i]
        known = Lost(
            by_inputs(xs, rule, in_some(by_terms(rule, gradient, pulled.us), pulled.moving)),
            [] if is_linear else lost.are_cut([lost.values_of(gradient)], pulled.at),
        )
    else:
        return functools.cache(lambda: _eagerly(rule, pulled, i, xs))
    return lambda: known


def is_lost(rule: Rule, i: int, k: int) -> bool:
    """Whether the term of output `k` in gradient `i` is lost, as far as it is known beforehand."""
    return rule.lost if isinstance(rule.lost, bool) else rule.lost is not None and rule.lost[i][k]


def _eagerly(rule: Rule, pulled: Pulled, i: int, xs: Sequence[Tensor]) -> Lost:
    part, n = lost.values_of(pulled.gradients[i]), len(rule.sources)
    at = [] if callable(rule.push) else pulled.at
    if any(part is u for u in pulled.at):
        return Lost([False] * len(xs), [False] * len(at))
    us, gradient = pulled.again(i)
    with loud.not_raising():  # the caller has not requested these gradients
        assert pulled.tape is not None
        found = pulled.tape.gradient(part, [*rule.sources, *pulled.at])
    missing = [d is None for d in found]
    if gradient is None:
        of_sources, cut = missing[:n], [all(missing[n:])] * len(at)
    else:
        of_terms = lost.are_lost_eagerly(gradient, rule.sources, us, missing[:n])
        moving = [m for m, u in zip(pulled.moving, pulled.us, strict=True) if u is not None]
        of_sources = in_some(of_terms, moving)
        cut = lost.are_cut([gradient], us) if at else []
    elsewhere = by_host(rule, pulled, i)
    ids = set(map(graphs.identity_of, elsewhere))
    inputs = list(map(ancestry.names_of, xs))
    points = [
        is_lost or bool(names & ids)
        for is_lost, names in zip(by_inputs(xs, rule, of_sources), inputs, strict=True)
    ]
    known = set().union(*inputs)
    return Lost(
        points,
        cut,
        [t for t in elsewhere if graphs.identity_of(t) not in known],
    )


def by_host(rule: Rule, pulled: Pulled, i: int) -> list[Tensor]:
    """The eager tensors, other than those of the rule, that gradient `i` gets from the host."""
    us, gradient = pulled.again(i)
    return [] if gradient is None else lost.through_host(gradient, [*rule.sources, *us])


def by_terms(rule: Rule, gradient: Gradient, at: Sequence[Tensor | None]) -> list[Sequence[bool]]:
    """With respect to which sources the derivatives of the terms of a gradient are lost.

    Args:
        rule: The rule.
        gradient: What it computed, in a graph.
        at: The upstream gradients, or the tangents, that it computed this from: in one term each.
    """
    part, us = lost.values_of(gradient), present(at)
    found = iter(lost.are_lost(part, rule.sources, us, rule.others, rule.tape))
    return [[False] * len(rule.sources) if u is None else next(found) for u in at]


def in_some(terms: Sequence[Sequence[bool]], which: Sequence[bool]) -> list[bool]:
    """Whether something holds in one of the terms that are chosen, for each of the sources."""
    chosen = list(itertools.compress(terms, which))
    return [any(term[i] for term in chosen) for i in range(len(terms[0]))]


def are_moving(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Which of several upstream gradients or tangents are not zero, other than by their values.

    For an output that nobody uses, and for an input that does not move, TensorFlow makes zeros.
    """
    is_alone = len(present(tensors)) < 2
    return [
        t is not None and (is_alone or not _is_zero(t) or tapes.is_recorded([t])) for t in tensors
    ]


def _is_zero(t: Tensor) -> bool:
    value = tf.get_static_value(t)
    return value is not None and not np.any(value)


def by_inputs(xs: Sequence[Tensor], rule: Rule, by_sources: Sequence[bool]) -> list[bool]:
    """With respect to which inputs derivatives are lost, given with respect to which sources."""
    if all(by_sources):
        return [True] * len(xs)
    sources = zip(rule.sources, by_sources, strict=True)
    lost_ones = {graphs.identity_of(s) for s, is_lost in sources if is_lost}
    inputs = list(map(ancestry.names_of, xs))
    if lost_ones <= set().union(*inputs):
        return [bool(names & lost_ones) for names in inputs]
    return [True] * len(xs)  # as for a variable


def through_host(
    rule: Rule, gradient: Gradient, at: Sequence[Tensor | None], graph: Graph | None
) -> list[Tensor]:
    """The tensors, other than those of `rule`, that a gradient gets from the host."""
    return lost.through_host(lost.values_of(gradient), [*rule.sources, *present(at)], graph)


def before(rule: Rule, ys: Sequence[Tensor]) -> tuple[list[bool], list[Tensor]]:
    """With respect to which sources derivatives are lost in what a rule has computed eagerly.

    And the other tensors that it gets from the host.
    """
    us = [y if structures.is_differentiable(y.dtype) else None for y in ys]
    at, gradients = lost.traced_rule(rule, us)
    gradients = present(gradients)
    through = [t for g in gradients for t in lost.through_host(g, [*rule.sources, *at])]
    return lost.are_cut(gradients, rule.sources), through
