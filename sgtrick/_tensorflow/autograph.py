"""AutoGraph: kept out of this package, but applied to the functions that callers pass."""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from sgtrick._types import Function

F = TypeVar("F", bound=Callable[..., Any])

# Applies AutoGraph to a caller's function, if it is applied to the caller.
Converted: TypeAlias = Callable[[Function], Function]


def unconverted(f: F) -> F:
    """Keeps AutoGraph out of a function, and its inner frames out of errors in eager execution.

    Errors then show what the caller wrote, as TensorFlow's do. Type checkers still see its type.
    """

    @functools.wraps(f)
    def shortened(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except Exception as error:
            if not (tf.executing_eagerly() and tf.debugging.is_traceback_filtering_enabled()):
                raise
            shorter = _without_inner(error.__traceback__)
            raise error.with_traceback(shorter)  # noqa: B904 - keep the original cause

    return tf.autograph.experimental.do_not_convert(shortened)  # type: ignore[no-any-return]


def form(call: Function) -> Function:
    """A plain function of `*args, **kwargs` that returns `call(converted, args, kwargs)`.

    AutoGraph would take a second to rewrite `call`, which has nothing to convert, so it is kept
    out. `converted` is a `Converted`, for the functions of the caller.
    """
    call = unconverted(call)

    def form(*args: Any, **kwargs: Any) -> Any:
        status = tf.__internal__.autograph.control_status_ctx()
        return call(functools.partial(_converted, status), args, kwargs)

    return form


def _without_inner(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of TensorFlow and this package, except the last frame."""
    if traceback is None or traceback.tb_next is None:
        return traceback
    rest = _without_inner(traceback.tb_next)
    if traceback.tb_frame.f_globals.get("__name__", "").startswith(("sgtrick.", "tensorflow.")):
        return rest
    return types.TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def as_caller(f: Function) -> Function:
    """`f`, converted by AutoGraph if that is applied to the function that calls this one."""
    return _converted(tf.__internal__.autograph.control_status_ctx(), f)


def _converted(status: Any, f: Function) -> Function:
    if tf.executing_eagerly():
        return f
    return tf.__internal__.autograph.tf_convert(  # type: ignore[no-any-return]
        f, status, convert_by_default=False
    )
