"""The derivative of outputs with respect to inputs, as a form states it."""

from collections.abc import Sequence
from typing import NamedTuple

from sgtrick._core.types import Pullback, Pushforward, Tape, Tensor


class Rule(NamedTuple):
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: What errors call the function.
        pull: From one upstream gradient for each output, None for those without derivatives, to one
            gradient or None for each input.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error for forward mode; or None, where forward mode transposes `pull`, with a test.
        sources: What the gradients may depend on: the inputs, unless stated otherwise.
        tape: A persistent tape that has recorded what `pull` uses of the forward pass, in eager.
        lost: Says for each gradient whether TensorFlow cannot differentiate it with respect to the
            sources, where that is known beforehand.
    """

    name: str
    pull: Pullback
    push: Pushforward | str | None = None
    sources: Sequence[Tensor] | None = None
    tape: Tape | None = None
    lost: Sequence[bool] | None = None
