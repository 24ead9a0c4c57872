"""The derivative of outputs with respect to inputs, as a form defines it."""

from collections.abc import Callable, Sequence
from typing import Any

from sgtrick._types import Gradient, Pullback, Pushforward, Tangent, Tensor


class Rule:
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: The function's name in errors.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error in forward mode; or None to transpose `pull`, with a test.
        transposes: Whether `push` transposes `pull`.
        batched: Under `tf.vectorized_map`, from the inputs for all members, and whether each has a
            batch dimension, to the outputs with their derivatives; None to map `pull`.
        is_guarded: Whether `pull` comes with errors for derivatives that TensorFlow would lose.
        is_of_caller: Whether `pull` calls a function of the caller's that is no rule, and may close
            over anything, also over what no operation of the forward pass has used.
        is_reachable: Whether all that `pull` closes over is in the graph of the call.
    """

    name: str
    push: Pushforward | str | None = None
    transposes: bool = False
    batched: Callable[[Sequence[tuple[Tensor, bool]]], Sequence[Tensor]] | None = None
    is_guarded: bool = False
    is_of_caller: bool = False
    is_reachable: bool = False

    def pull(self, *upstream: Any) -> Sequence[Gradient]:
        """Returns one gradient or None for each input.

        Args:
            *upstream: One upstream gradient for each output, None for those without derivatives.
        """
        raise NotImplementedError


class Stated(Rule):
    """A rule given by functions."""

    def __init__(
        self,
        name: str,
        pull: Pullback,
        push: Pushforward | str | None = None,
        *,
        is_of_caller: bool = False,
    ) -> None:
        """See `Rule`."""
        self.name, self.pull, self.push = name, pull, push  # type: ignore[method-assign]
        self.is_of_caller = is_of_caller


class Changed(Rule):
    """A rule to which something is done.

    If it raises in forward mode, it still does. Else a subclass says what `push` is.
    """

    def __init__(self, rule: Rule) -> None:
        """The rule as it was."""
        self._rule = rule
        self.name, self.transposes = rule.name, rule.transposes
        self.is_guarded, self.is_of_caller = rule.is_guarded, rule.is_of_caller
        if isinstance(rule.push, str):
            self.push = rule.push


class InAddition(Changed):
    """The rule of values that keep their own derivatives in addition to those of another rule.

    The values are the first inputs.
    """

    def __init__(self, rule: Rule, count: int = 1) -> None:
        """The rule of `count` values."""
        super().__init__(rule)
        self._count = count

    def pull(self, *upstream: Tensor | None) -> list[Gradient]:
        """The upstream gradients, and those of the rule."""
        return [*upstream, *self._rule.pull(*upstream)]

    def push(self, *tangents: Tangent) -> list[Tangent]:
        """The sums of the values' own tangents and those of the rule."""
        assert callable(self._rule.push)
        return plus(tangents[: self._count], self._rule.push(*tangents[self._count :]))


def plus(a: Sequence[Tangent], b: Sequence[Tangent]) -> list[Tangent]:
    """Sums of tangents, where None is zero."""
    return [q if p is None else p if q is None else p + q for p, q in zip(a, b, strict=True)]
