"""Derivatives that a function refuses to give, and its messages about them.

Refusals are exceptions, or NaN where nothing can raise: around a `tf.function`, and in XLA.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from sgtrick._core import unknown
from sgtrick._tensorflow import tapes
from sgtrick._types import Gradient, Tensor

Pull = Callable[[], list[Gradient]]


def gradients_unless_refused(
    pull: Pull, again: Pull, xs: Sequence[Tensor]
) -> tuple[list[Gradient], str]:
    """The gradients with respect to `xs`, NaN where they are refused, and why.

    Args:
        pull: Computes the gradients.
        again: Does so with a new forward pass, which can run eagerly.
        xs: Tensors with the shapes and dtypes of the gradients.
    """
    found, why = _asked(pull)
    if found is not None and all(_is_finite(g) for g in found if g is not None):
        return found, ""
    with _eagerly(), unknown.noted() as messages:
        try:
            told, native = _asked(again)
        except RuntimeError:  # some functions run only in a graph
            told, native = None, ""
    if messages and told is not None:
        return told, " ".join(messages)
    if found is not None:  # not finite, but not refused
        return found, ""
    nans = [tf.fill(tf.shape(x), tf.constant(float("nan"), x.dtype)) for x in xs]
    return nans, " ".join(messages) or native or why


def _asked(pull: Pull) -> tuple[list[Gradient] | None, str]:
    """The gradients, or None and the message of the refusal."""
    try:
        with warnings.catch_warnings():  # the report says why
            warnings.filterwarnings("ignore", tapes.NAN_WARNING, RuntimeWarning)
            return pull(), ""
    except NotImplementedError as error:
        return None, str(error)
    except LookupError as error:
        if type(error) is not LookupError:  # a KeyError or IndexError of the user's code
            raise
        return None, str(error)
    except tf.errors.InvalidArgumentError as error:
        return None, _without_nodes(error.message)


def _without_nodes(message: str) -> str:
    """The message of an operation, without the node names that TensorFlow adds."""
    message = re.sub(r"\{\{(function_)?node .*?\}\}", "", message)
    return re.split(r" : Tensor had|\n\t ?\[\[", message)[0].rpartition("\n\n")[2].strip()


def _is_finite(gradient: Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(gradient))))


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """A scope in which every `tf.function` runs eagerly, so that it can raise."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
