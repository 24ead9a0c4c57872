"""R functions, as reticulate passes them to Python."""

import threading
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._core.types import Function


class WrongThreadError(RuntimeError):
    """R would have been called on a thread other than its own."""


def check_python(fn: object) -> None:
    """Raises if a function that is to run on a worker thread is an R function."""
    if is_r_function(fn):
        raise TypeError(
            "fn is an R function, and run calls fn on a worker thread, where R cannot run. "
            "Pass a Python function and its arguments: executor$run(f, x) instead of "
            "executor$run(function() f(x))."
        )


def is_r_function(fn: object) -> bool:
    """Whether `fn` is an R function, which reticulate wraps in a function of one of its modules."""
    # Look at the globals, because decorators copy __module__ from the function that they wrap.
    return getattr(fn, "__globals__", {}).get("__name__") == "rpytools.call"


def is_missing(name: str, error: RuntimeError) -> bool:
    """Whether an R function failed because it was not given the argument `name`.

    R's message is `argument "name" is missing, with no default`, in the language of the user.
    """
    return name in str(error)


def as_engine(fn: Function) -> Function:
    """Returns `fn`, or for an R function one that takes arrays and passes them on as lists.

    Lists become vectors in R. A reticulate that is older than NumPy passes arrays as opaque
    objects, which have no arithmetic.
    """
    if not is_r_function(fn):
        return fn

    def engine(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise WrongThreadError(
                "An R function can only be called on R's own thread, and TensorFlow called this "
                "one from another. Pass executor=executor to from_numpy, with executor <- "
                "sgtrick$MainThreadExecutor(), and call the sampler through executor$run(f, ...)."
            )
        try:
            return fn(*tf.nest.map_structure(np.ndarray.tolist, args))
        except RuntimeError as error:
            if str(error) != "(Unknown exception occurred)":
                raise
            # reticulate 1.28 reports Ctrl-C like this, which on_error must not treat as a failure.
            raise KeyboardInterrupt from error

    return engine
