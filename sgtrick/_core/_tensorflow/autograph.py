"""AutoGraph, kept out of this package and let into what callers pass."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from sgtrick._core.types import Function

F = TypeVar("F", bound=Callable[..., Any])


def unconverted(f: F) -> F:
    """Keeps AutoGraph out of a function; the same for type checkers."""
    return tf.autograph.experimental.do_not_convert(f)  # type: ignore[no-any-return]


def form(call: Function) -> Function:
    """A plain function of `*args, **kwargs` that returns `call(converted, args, kwargs)`.

    AutoGraph takes a second to rewrite what has nothing for it, so that it is kept out of `call`.
    `converted` makes of a caller's function one that AutoGraph converts, where it converts callers.
    """
    call = unconverted(call)

    def form(*args: Any, **kwargs: Any) -> Any:
        status = tf.__internal__.autograph.control_status_ctx()
        return call(functools.partial(_converted, status), args, kwargs)

    return form


def _converted(status: Any, f: Function) -> Function:
    if tf.executing_eagerly():
        return f
    return tf.__internal__.autograph.tf_convert(  # type: ignore[no-any-return]
        f, status, convert_by_default=False
    )
