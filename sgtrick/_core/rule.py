"""The derivative of outputs with respect to inputs, as a form defines it."""

from collections.abc import Callable
from typing import NamedTuple

from sgtrick._core.types import Pullback, Pushforward, Tangent


class Rule(NamedTuple):
    """The derivative of outputs with respect to inputs.

    Attributes:
        name: The function's name in errors.
        pull: From one upstream gradient for each output, None for those without derivatives, to one
            gradient or None for each input.
        push: From one tangent for each input to one tangent for each output; or the message of the
            error in forward mode; or None to transpose `pull`, with a test.
        guard: Adds errors to tangents that were obtained by transposing, given the tangents of the
            inputs, and the inputs.
        transposes: Whether `push` transposes `pull`.
    """

    name: str
    pull: Pullback
    push: Pushforward | str | None = None
    guard: Callable[..., list[Tangent]] | None = None
    transposes: bool = False
