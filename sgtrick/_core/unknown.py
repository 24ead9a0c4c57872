"""Errors for unknown derivatives: raised when they are computed, not when they are traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.nones import present, spread
from sgtrick._arguments.scopes import scope
from sgtrick._tensorflow import tapes, tracing
from sgtrick._types import DType, Gradient, Tangent, Tensor

_MAY_RAISE: ContextVar[bool] = ContextVar("_MAY_RAISE", default=True)
_IS_IGNORED: ContextVar[bool] = ContextVar("_IS_IGNORED", default=False)
_NOTED: ContextVar[list[str] | None] = ContextVar("_NOTED", default=None)


def not_raising() -> contextlib.AbstractContextManager[None]:
    """A scope without errors, only NaN: for the gradient of a `tf.function` as a whole.

    There, TensorFlow computes the gradients with respect to all arguments, and then keeps those
    that were requested.
    """
    return scope(_MAY_RAISE, False)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """A scope without errors, only NaN, that yields the messages of the errors.

    Only in eager execution. There may be messages about derivatives that were not requested.
    """
    messages: list[str] = []
    with scope(_NOTED, messages), not_raising():
        yield messages


def ignored() -> contextlib.AbstractContextManager[None]:
    """A scope without guards and tests: for a trace that only shows what is connected."""
    return scope(_IS_IGNORED, True)


def is_ignored() -> bool:
    """Whether this is such a scope."""
    return _IS_IGNORED.get()


def failure(like: Tensor, message: str, zs: Sequence[Tensor], of: Sequence[Tensor] = ()) -> Tensor:
    """An unknown gradient with respect to a tensor: NaN, or where possible an error.

    It is linear in the cotangents `zs`, so it is zero where they are: around a function, TensorFlow
    differentiates all results, those that nobody asked for with zeros.

    Tapes call pullbacks, and graphs are traced, for derivatives that were never requested. So in
    graphs the error is raised when the NaN is computed, except in XLA, which cannot raise. In eager
    execution it is raised if the tape was asked for the gradient with respect to this very tensor,
    or the variable of which it is the value; and if another gradient comes out as NaN, there is a
    warning.

    The derivatives of what is unknown are unknown too, and they may be all that is computed. So the
    derivatives of the NaN, with respect to everything that it stands for, are NaN to every order.

    Args:
        like: The tensor.
        message: The message of the error.
        zs: The cotangents.
        of: The tensors that it depends on besides.

    Raises:
        LookupError: In eager execution.
    """
    still = are_zero(zs)
    if tf.executing_eagerly() and _MAY_RAISE.get() and not still:
        if tapes.asked_for(like):
            raise LookupError(message)
        tapes.warn_of_nan(message)
    if tf.executing_eagerly() and not still:
        _note(message)
    may_raise = _MAY_RAISE.get() and not tf.executing_eagerly()
    wave = _wave([like, *zs, *of])
    value = tracing.as_one(_Zero(wave.dtype, message if may_raise else None), still)
    # Where the value is an error, its derivatives are: they may be all that is computed.
    slope = tf.where(still, tf.constant(float("nan"), wave.dtype), value)
    value += tf.math.multiply_no_nan(slope, wave - tf.stop_gradient(wave))
    shape = like.shape if like.shape.is_fully_defined() else tf.shape(like)
    return tf.fill(shape, tf.cast(value, like.dtype))


def failures(
    likes: Sequence[Tensor], message: str, zs: Sequence[Tensor], of: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """`failure` for each of several tensors, None for those without derivatives."""
    return [
        failure(like, message, zs, [*likes, *of])
        if structures.is_differentiable(like.dtype)
        else None
        for like in likes
    ]


def unless_refused(
    pull: Callable[[], list[Gradient]], xs: Sequence[Tensor], zs: Sequence[Tensor], message: str
) -> list[Gradient]:
    """Gradients with respect to `xs`, unknown where TensorFlow refuses to differentiate something.

    It does so where an operation has no gradient, whether or not the derivative was requested.
    """
    try:
        return pull()
    except LookupError as error:
        if type(error) is not LookupError:  # a KeyError of the caller's code
            raise
        return list(failures(xs, f"{message} TensorFlow says: {error}", zs))


def unless_moving(
    message: str, along: Sequence[Tangent], points: Sequence[Tensor], xs: Sequence[Tensor]
) -> list[Tangent]:
    """Tangents, or an error, as in `zero_if`, if the tangents `points` are not all zero.

    Args:
        message: The message of the error.
        along: The tangents.
        points: Tangents of `xs`.
        xs: What the unknown part depends on.
    """
    zero = zero_if(are_zero(points), message, [*points, *xs])
    return [None if t is None else t + tf.cast(zero, t.dtype) for t in along]


def are_zero(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all entries of some tensors are zero."""
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.equal(t, 0)) for t in tensors]))


def known_if(
    holds: Tensor,
    message: str,
    found: Sequence[Gradient],
    likes: Sequence[Tensor],
    of: Sequence[Tensor],
) -> list[Tensor]:
    """Derivatives, None where they are zero, or an error as in `zero_if` if `holds` is false.

    Args:
        holds: Whether they are right.
        message: The message of the error.
        found: The derivatives.
        likes: Tensors of their shapes and dtypes.
        of: What they depend on.
    """
    zero = zero_if(holds, message, of)
    return [
        (tf.zeros_like(like) if g is None else tf.convert_to_tensor(g)) + tf.cast(zero, like.dtype)
        for g, like in zip(found, likes, strict=True)
    ]


def known_unless(
    holds: Tensor,
    message: str,
    found: Sequence[Gradient],
    likes: Sequence[Tensor],
    zs: Sequence[Tensor],
) -> list[Gradient]:
    """Gradients for the cotangents `zs`, None where they are zero, or as in `failure`.

    Unlike `known_if`, it raises in eager execution only for gradients that were requested.
    """
    if tf.executing_eagerly():
        return list(found if holds else failures(likes, message, zs))
    there = [like for g, like in zip(found, likes, strict=True) if g is not None]
    return spread(known_if(holds, message, present(found), there, zs), found)


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Whether all entries of some tensors are those of as many others, NaN included."""
    same = []
    for p, q in zip(some, others, strict=True):
        both_nan = tf.not_equal(p, p) & tf.not_equal(q, q)
        same.append(tf.reduce_all(tf.equal(p, q) | both_nan))
    return tf.reduce_all(tf.stack(same))


def zero_if(holds: Tensor, message: str, of: Sequence[Tensor]) -> Tensor:
    """Zero, a real number; if `holds` is false, an error with this message, or NaN in XLA.

    Then its derivatives with respect to `of` are NaN to every order: they may be all that is
    computed, and then nothing raises.

    Raises:
        LookupError: In eager execution.
    """
    may_raise = _MAY_RAISE.get()
    if is_ignored() or (tf.executing_eagerly() and may_raise and holds):
        return tf.constant(0.0)
    if tf.executing_eagerly() and may_raise:
        raise LookupError(message)
    if tf.executing_eagerly() and not holds:
        _note(message)
    wave = _wave(of)
    zero = tracing.as_one(_Zero(wave.dtype, message if may_raise else None), holds)
    # Its derivatives are NaN where it is, and else zero, even where the wave is not finite.
    return tf.math.multiply_no_nan(wave, zero)


def _wave(of: Sequence[Tensor]) -> Tensor:
    """A number that depends on all these tensors, with derivatives of every order."""
    parts = [structures.wide(tf.math.real(t)) for t in of if structures.is_differentiable(t.dtype)]
    if not parts:
        return tf.constant(1.0)
    dtype = max((t.dtype for t in parts), key=lambda dtype: dtype.size)
    return tf.cos(tf.add_n([tf.cast(tf.reduce_sum(t), dtype) for t in parts]))


@dataclasses.dataclass(frozen=True)
class _Zero:
    """Zero, or NaN if `holds` is false; with a message, an error instead, except in XLA."""

    dtype: DType
    message: str | None

    def __call__(self, holds: Tensor) -> Tensor:
        zero, nan = tf.constant(0.0, self.dtype), tf.constant(float("nan"), self.dtype)
        number = tf.where(holds, zero, nan)
        return number if self.message is None else tf.debugging.check_numerics(number, self.message)


def _note(message: str) -> None:
    messages = _NOTED.get()
    if messages is not None and message not in messages:
        messages.append(message)
