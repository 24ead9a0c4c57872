"""The derivative of outputs with respect to inputs, as a form defines it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgtrick._types import Gradient, Pullback, Pushforward, Tangent, Tensor


class Rule(NamedTuple):
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: The function's name in errors.
        pull: From one upstream gradient for each output, None for those without derivatives, to one
            gradient or None for each input.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error in forward mode; or None to transpose `pull`, with a test.
        transposes: Whether `push` transposes `pull`.
        batched: Under `tf.vectorized_map`, from the inputs for all members, and whether each has a
            batch dimension, to the outputs with their derivatives; None to map `pull`.
        is_guarded: Whether `pull` comes with errors for derivatives that TensorFlow would lose.
        is_local: Whether `pull` uses only tensors of the graph of the call. Then it can be called
            wherever that graph is differentiated. Else a graph that will be closed carries it.
    """

    name: str
    pull: Pullback
    push: Pushforward | str | None = None
    transposes: bool = False
    batched: Callable[[Sequence[tuple[Tensor, bool]]], Sequence[Tensor]] | None = None
    is_guarded: bool = False
    is_local: bool = False


def in_addition(rule: Rule, count: int = 1) -> Rule:
    """The rule of `count` values that keep their own derivatives in addition to those of `rule`."""

    def pull(*upstream: Tensor) -> list[Gradient]:
        return [*upstream, *rule.pull(*upstream)]

    def push(*tangents: Tangent) -> list[Tangent]:
        assert callable(rule.push)
        return plus(tangents[:count], rule.push(*tangents[count:]))

    return rule._replace(pull=pull, push=push)


def plus(a: Sequence[Tangent], b: Sequence[Tangent]) -> list[Tangent]:
    """Sums of tangents, where None is zero."""
    return [q if p is None else p if q is None else p + q for p, q in zip(a, b, strict=True)]
