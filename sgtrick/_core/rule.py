"""The derivative of outputs with respect to inputs, as a form defines it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgtrick._core.types import Pullback, Pushforward, Tangent, Tape, Tensor


class Rule(NamedTuple):
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: The function's name in errors.
        pull: From one upstream gradient for each output, None for those without derivatives, to one
            gradient or None for each input.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error in forward mode; or None to transpose `pull`, with a test.
        finish: Adds to the result of `push`, given its arguments, derivatives that the rule does
            not cover. None if there are none.
        sources: The tensors that the gradients may depend on. Only used if `lost` is not known.
        others: Tensors with derivatives of their own that the gradients may depend on. That they in
            turn depend on the sources is no derivative of the gradients.
        tape: A persistent tape that recorded the parts of the forward pass that `pull` uses, in
            eager execution.
        again: `pull`, with those parts computed again. None if it uses none.
        lost: Whether TensorFlow cannot differentiate the gradients with respect to the sources; or
            for each of the gradients, and for each output, whether it cannot for the term with the
            output's upstream gradient. None if this is not known beforehand.
        cut: For each output, whether TensorFlow cannot differentiate some gradient with respect to
            its upstream gradient; empty if it can for all. Only used if `lost` is known.
    """

    name: str
    pull: Pullback
    push: Pushforward | str | None = None
    finish: Callable[[Sequence[Tangent], Sequence[Tangent]], Sequence[Tangent]] | None = None
    sources: Sequence[Tensor] = ()
    others: Sequence[Tensor] = ()
    tape: Tape | None = None
    again: Pullback | None = None
    lost: bool | Sequence[Sequence[bool]] | None = None
    cut: Sequence[bool] = ()
