"""Errors for whoever asks for a derivative that is not known: when run, not when traced."""

from typing import Any

import tensorflow as tf

from sgtrick._core import _tensorflow


def failure(like: Any, message: str) -> Any:
    """NaN like a tensor, for who differentiates with respect to it; an error where one can be sent.

    Tapes call pullbacks, and graphs are traced, for derivatives that nobody asked for. In graphs
    the error comes when the NaN is computed, except in XLA, which has no errors. In eager it comes
    where the tape was asked for the gradient of just this tensor.

    Args:
        like: The tensor.
        message: What the error says.

    Raises:
        LookupError: In eager.
    """
    if tf.executing_eagerly() and _tensorflow.asked_for(like):
        raise LookupError(message)
    return tf.fill(tf.shape(like), tf.cast(_nan(message), like.dtype))


def insist(holds: Any, message: str) -> Any:
    """Zero, a float64; an error with this message where `holds` is false, in XLA NaN.

    Raises:
        LookupError: In eager.
    """
    if tf.executing_eagerly():
        if not holds:
            raise LookupError(message)
        return tf.constant(0.0, tf.float64)
    nan = tf.where(holds, tf.constant(0.0, tf.float64), tf.constant(float("nan"), tf.float64))
    return tf.debugging.check_numerics(nan, message)


def _nan(message: str) -> Any:
    nan = tf.constant(float("nan"), tf.float64)
    return nan if tf.executing_eagerly() else tf.debugging.check_numerics(nan, message)
