"""R functions, as reticulate passes them to Python."""

import threading
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._core.types import Function


class WrongThreadError(RuntimeError):
    """R was to be called on a thread that is not its own."""


def check_python(fn: Any) -> None:
    """Insists that what is to run on a worker thread is no R function."""
    if _is_r_function(fn):
        raise TypeError(
            "fn is an R function, and run calls fn on a worker thread, where R cannot run. "
            "Pass a Python function and its arguments: executor$run(f, x) in the place of "
            "executor$run(function() f(x))."
        )


def _is_r_function(fn: Any) -> bool:
    """Whether `fn` is an R function: reticulate wraps each in a Python function of that module."""
    # Its globals, for whoever imitates a function also takes over its __module__.
    return getattr(fn, "__globals__", {}).get("__name__") == "rpytools.call"


def as_engine(fn: Function) -> Function:
    """`fn`, and for an R function one that takes arrays.

    It gets lists, which are vectors in R: reticulate passes arrays on as objects without arithmetic
    where it is older than NumPy.
    """
    if not _is_r_function(fn):
        return fn

    def engine(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise WrongThreadError(
                "An R function can only be called on R's own thread, and TensorFlow called this "
                "one from another. Pass executor=executor to from_numpy, with executor <- "
                "sgtrick$MainThreadExecutor(), and run what computes by executor$run(f, ...)."
            )
        try:
            return fn(*tf.nest.map_structure(np.ndarray.tolist, args))
        except RuntimeError as error:
            if str(error) != "(Unknown exception occurred)":
                raise
            # So reticulate 1.28 says Ctrl-C, which on_error must not take for a failure.
            raise KeyboardInterrupt from error

    return engine
