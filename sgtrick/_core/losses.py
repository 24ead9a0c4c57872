"""With respect to what TensorFlow loses the derivatives of the gradients that a rule returns."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._core import ancestry, lost, loud, structures
from sgtrick._core._tensorflow import graphs
from sgtrick._core.absent import present
from sgtrick._core.rule import Rule
from sgtrick._core.types import Gradient, Tape, Tensor


class Pulled(NamedTuple):
    """The result of a pullback, and what it may depend on.

    Attributes:
        gradients: The result.
        us: The upstream gradients that the pullback was called with.
        tape: A persistent tape that recorded the pullback, in eager execution.
    """

    gradients: list[Gradient]
    us: list[Tensor | None]
    tape: Tape | None

    @property
    def at(self) -> list[Tensor]:
        """The upstream gradients that are not None."""
        return present(self.us)

    @property
    def parts(self) -> list[Tensor]:
        """The numbers of those gradients that are not None."""
        return [lost.values_of(g) for g in self.gradients if g is not None]


def recorded(rule: Rule, upstream: Sequence[Tensor | None]) -> Pulled:
    """Calls the pullback, and records what the gradients depend on."""
    us = [None if u is None else tf.identity(u) for u in upstream]
    if not tf.executing_eagerly():
        return Pulled(list(rule.pull(*us)), us, None)
    tape = rule.tape or tf.GradientTape(persistent=True, watch_accessed_variables=False)
    with tape:
        tape.watch(rule.sources)
        tape.watch(present(us))
        return Pulled(list(rule.pull(*us)), us, tape)


class Lost(NamedTuple):
    """With respect to what TensorFlow loses the derivative of a gradient.

    Attributes:
        points: Whether it does, for each of the inputs.
        upstream: Whether it does with respect to the upstream gradients.
    """

    points: Sequence[bool]
    upstream: bool


def of(rule: Rule, pulled: Pulled, xs: Sequence[Tensor]) -> Callable[[], Lost]:
    """Returns what TensorFlow loses.

    In a graph, the operations show it. In eager execution it takes a backward pass, so it is only
    found out when it matters.
    """
    if rule.lost is not None:
        known = Lost([rule.lost] * len(xs), rule.cut)
        return lambda: known
    at, parts = pulled.at, pulled.parts
    is_linear = callable(rule.push)  # its transpose
    if pulled.tape is None:
        known = Lost(
            by_inputs(xs, rule, by_sources(rule, pulled.gradients, at)),
            not is_linear and any(lost.is_cut(part, at) for part in parts),
        )
        return lambda: known
    tape, n = pulled.tape, len(rule.sources)

    @functools.cache
    def ask() -> Lost:
        of_sources, of_upstream = [False] * n, False
        traced = lost.traced_rule(rule, pulled.us)
        us, again = traced or ([], [])
        if len(again) != len(parts):
            again = [None] * len(parts)
        with loud.not_raising():  # the caller has not requested these gradients
            for part, gradient in zip(parts, again, strict=True):
                if any(part is u for u in at):
                    continue
                found = tape.gradient(part, [*rule.sources, *at])
                missing = [d is None for d in found]
                are_lost = lost.are_lost_eagerly(gradient, rule.sources, us, missing[:n])
                of_sources = list(map(operator.or_, of_sources, are_lost))
                if not is_linear:
                    cut = all(missing[n:]) if gradient is None else lost.is_cut(gradient, us)
                    of_upstream = of_upstream or cut
        return Lost(by_inputs(xs, rule, of_sources), of_upstream)

    return ask


def by_sources(
    rule: Rule, gradients: Sequence[Gradient], at: Sequence[Tensor | None]
) -> list[bool]:
    """With respect to which sources the derivatives of gradients in a graph are lost.

    Args:
        rule: The rule.
        gradients: What it computed.
        at: The upstream gradients, or the tangents, that it computed this from.
    """
    others = [*present(at), *rule.others]
    found = [False] * len(rule.sources)
    for gradient in present(gradients):
        part = lost.values_of(gradient)
        are_lost = lost.are_lost(part, rule.sources, others, rule.tape)
        found = list(map(operator.or_, found, are_lost))
    return found


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


def before(rule: Rule, ys: Sequence[Tensor]) -> list[bool]:
    """With respect to which sources derivatives are lost in what a rule has computed eagerly."""
    us = [y if structures.is_differentiable(y.dtype) else None for y in ys]
    _, gradients = lost.traced_rule(rule, us) or ([], [])
    return [any(lost.is_cut(g, [source]) for g in gradients) for source in rule.sources]
