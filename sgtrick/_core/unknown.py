"""Errors for unknown derivatives: raised when they are computed, not when they are traced.

What is not known at all is refused by `refuse`: derivatives of a tensor by others are errors. What
is tested at run time is an error if the test fails, by `known_if`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._tensorflow import ongoing, operation, pfor, tapes, tracing
from sgtrick._tensorflow.graphs import here
from sgtrick._types import DType, Gradient, Tangent, Tensor

# One for all, or what returns one for each, None where the derivative is known.
Messages = str | Callable[[], Sequence[str | None]]


def refuse(
    t: Tensor, by: Sequence[Tensor], message: Messages, linear: int = 0, *, is_used: bool = True
) -> Tensor:
    """Returns `t`, whose derivatives by other tensors are errors.

    Tensors by which the derivative is known keep it, and it is refused by the others again: a zero
    is added to it. The cotangent of that zero is the one that the derivative itself gets, so the
    error is there even where the derivative happens to be zero.

    Args:
        t: The tensor.
        by: The others.
        message: That of the error; or a function that returns one for each of `by`, None for those
            by which it is known, and is called when a derivative is taken.
        linear: In how many of these, the last ones, `t` is linear: its derivatives are zero where
            these are.
        is_used: Whether `t` was asked for. Forward mode computes tangents of all results, so the
            error for one that may not be used is NaN there.
    """
    if not by or (tf.executing_eagerly() and not tapes.somebody_records()):
        return t

    def messages() -> Sequence[str | None]:
        return [message] * len(by) if isinstance(message, str) else message()

    if operation.is_storing():
        refused = [x for x, why in zip(by, messages(), strict=True) if why]
        if len(refused) < len(by):
            return _known_in_part(t, refused)
    t, by = here(t), list(map(here, by))
    return _Refused(t, by, messages, linear, is_used=is_used).output()


class _Refused:
    """A tensor whose derivatives by `inputs` are errors, as TensorFlow calls them.

    They are functions of the tensor and the inputs. So for a batch they are computed anew, and not
    by mapping a trace.
    """

    def __init__(
        self,
        part: Tensor,
        inputs: Sequence[Tensor],
        messages: Callable[[], Sequence[str | None]],
        linear: int,
        *,
        is_used: bool,
    ) -> None:
        self._part, self._inputs, self._messages = part, inputs, messages
        self._linear, self._is_used = linear, is_used
        n = len(inputs) - linear
        # What is unknown may depend on all of it.
        self._of, self._linear_in = [*inputs[:n], part], inputs[n:]

    def output(self) -> Tensor:
        """The tensor with these derivatives."""
        derivatives = operation.Derivatives(
            self.pull, self.push, self.pull_of_graph, self.vectorize, passes_on=True
        )
        part = self._part
        return operation.identity_with([part], [part, *self._inputs], derivatives, [part])[0]

    def pull(self, z: Tensor) -> list[Gradient]:
        """The cotangent itself, and for each input None, an error, or a zero that is refused."""
        why = self._messages()
        if not any(why):
            return [z, *[None] * len(self._inputs)]

        def by_one(x: Tensor, why: str | None) -> Gradient:
            if not structures.is_differentiable(x.dtype):
                return None
            if why:
                return gradient(x, why, [z], self._of, self._linear_in)
            return self._again(tf.zeros_like(x), [z])

        return [z, *map(by_one, self._inputs, why)]

    def pull_of_graph(self, z: Tensor) -> list[Gradient]:
        """What `pull` returns; NaN in a function, of whose gradient nobody may want all."""
        is_of_function = self._part.graph is not tf.compat.v1.get_default_graph()
        with ongoing.not_raising() if is_of_function else contextlib.nullcontext():
            return self.pull(z)

    def push(self, along: Tangent, *tangents: Tangent) -> list[Tangent]:
        """The tangent of the tensor, or an error if a tangent by which it is refused moves."""
        whys = tapes.in_thread(self._messages)
        for why in filter(None, dict.fromkeys(whys)):
            moving = present([t for t, w in zip(tangents, whys, strict=True) if w == why])
            if moving:
                if self._linear:
                    zero = are_zero(self._linear_in)
                    moving = [tf.where(zero, tf.zeros_like(t), t) for t in moving]
                along = tf.zeros_like(self._part) if along is None else along
                with contextlib.nullcontext() if self._is_used else ongoing.not_raising():
                    (along,) = unless_moving(why, [along], moving, [*self._of, *self._linear_in])
        if along is None or all(whys) or not any(whys):
            return [along]
        return [self._again(along, present(tangents))]

    def vectorize(self, batch: pfor.Vectorized) -> list[Tensor]:
        """The tensors of all members, refused again."""
        (part, is_stacked), *others = batch.inputs[1:]
        part = part if is_stacked else batch.stack(part)
        inputs = [here(x) for x, _ in others]
        of_batch = _Refused(here(part), inputs, self._messages, self._linear, is_used=self._is_used)
        return [of_batch.output()]

    def _again(self, known: Tensor, along: Sequence[Tensor]) -> Tensor:
        """A derivative that is known, refused by the same inputs."""
        more = [None] * len(along)
        by = [*self._inputs, *along]
        return refuse(known, by, lambda: [*self._messages(), *more], len(along))


def _known_in_part(t: Tensor, refused: Sequence[Tensor]) -> Tensor:
    """Returns `t`, whose derivatives by some tensors are NaN, by operations of TensorFlow."""
    if not refused:
        return t
    wave = depending_on(list(map(_finite, refused)))
    nan = tf.constant(float("nan"), wave.dtype)
    return t + tf.cast(tf.math.multiply_no_nan(nan, wave - tf.stop_gradient(wave)), t.dtype)


def gradient(
    like: Tensor,
    message: str,
    zs: Sequence[Tensor],
    of: Sequence[Tensor] = (),
    along: Sequence[Tensor] = (),
) -> Tensor:
    """An unknown gradient with respect to a tensor: NaN, or where possible an error.

    It is linear in the cotangents `zs`, and in `along`, so it is zero where all of either are:
    around a function, TensorFlow differentiates all results, those that nobody asked for with
    zeros.

    Tapes call pullbacks, and graphs are traced, for derivatives that were never requested. So in
    graphs the error is raised when the NaN is computed, except in XLA, which cannot raise. In eager
    execution it is raised if the tape was asked for the gradient with respect to this very tensor,
    or the variable of which it is the value; and if another gradient comes out as NaN, there is a
    warning.

    The derivatives of what is unknown are unknown too, and they may be all that is computed. So the
    derivatives of the NaN, with respect to everything that it stands for, are NaN to every order.
    Those of the zero are zero, except with respect to what is zero, in which it is linear.

    Args:
        like: The tensor.
        message: The message of the error.
        zs: The cotangents.
        of: The tensors that it depends on besides.
        along: Other tensors in which it is linear.

    Raises:
        LookupError: In eager execution.
    """
    factors = [(tensors, are_zero(tensors)) for tensors in (zs, along) if tensors]
    still = tf.reduce_any(tf.stack([is_zero for _, is_zero in factors]))
    if tf.executing_eagerly() and ongoing.may_raise() and not still:
        if tapes.asked_for(like):
            raise LookupError(message)
        tapes.warn_of_nan(message)
    if tf.executing_eagerly() and not still:
        ongoing.collect(message)
    may_raise = ongoing.may_raise() and not tf.executing_eagerly()
    wave = depending_on(list(map(_finite, [like, *of])))
    value = tracing.as_one(_Zero(wave.dtype, message if may_raise else None), still)

    def differentiable(wave: Tensor, slope: Tensor) -> Tensor:
        wave = tf.cast(wave, value.dtype)
        return tf.math.multiply_no_nan(slope, wave - tf.stop_gradient(wave))

    # Where the value is an error, its derivatives are: they may be all that is computed.
    terms = [value, differentiable(wave, value)]
    for tensors, is_zero in factors:
        slope = tf.where(is_zero, tf.constant(float("nan"), value.dtype), value)
        terms.append(differentiable(depending_on(list(map(_finite, tensors))), slope))
    shape = like.shape if like.shape.is_fully_defined() else tf.shape(like)
    return tf.fill(shape, tf.cast(tf.add_n(terms), like.dtype))


def gradients(
    likes: Sequence[Tensor], message: str, zs: Sequence[Tensor], of: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """The unknown gradients with respect to several tensors, None for those without derivatives."""
    return [
        gradient(like, message, zs, [*likes, *of])
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
        return list(gradients(xs, f"{message} TensorFlow says: {error}", zs))


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
    return [None if t is None else plus(t, zero) for t in along]


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
    pairs = zip(found, likes, strict=True)
    dense = [tf.zeros_like(like) if g is None else tf.convert_to_tensor(g) for g, like in pairs]
    if tf.executing_eagerly() and ongoing.may_raise():  # it did not
        return dense
    return [plus(g, zero) for g in dense]


def known_unless(
    holds: Tensor,
    message: str,
    found: Sequence[Gradient],
    likes: Sequence[Tensor],
    zs: Sequence[Tensor],
) -> list[Gradient]:
    """Gradients for the cotangents `zs`, None where they are zero, or as in `gradient`.

    Unlike `known_if`, it raises in eager execution only for gradients that were requested.
    """
    if tf.executing_eagerly():
        return list(found if holds else gradients(likes, message, zs))
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
    may_raise = ongoing.may_raise()
    if ongoing.is_probe() or (tf.executing_eagerly() and may_raise and holds):
        return tf.constant(0.0)
    if tf.executing_eagerly() and may_raise:
        raise LookupError(message)
    if tf.executing_eagerly() and not holds:
        ongoing.collect(message)
    wave = depending_on(of)
    zero = tracing.as_one(_Zero(wave.dtype, message if may_raise else None), holds)
    # Its derivatives are NaN where it is, and else zero, even where the wave is not finite.
    return tf.math.multiply_no_nan(wave, zero)


def plus(t: Tensor, zero: Tensor) -> Tensor:
    """A tensor plus what `zero_if` returned."""
    return t + tf.cast(zero, t.dtype)


def depending_on(of: Sequence[Tensor]) -> Tensor:
    """A number that depends on all these tensors, with derivatives of every order."""
    parts = [
        structures.for_sums(tf.math.real(t)) for t in of if structures.is_differentiable(t.dtype)
    ]
    if not parts:
        return tf.constant(1.0)
    dtype = max((t.dtype for t in parts), key=lambda dtype: dtype.size)
    # Not at 0, where each other derivative of a cosine is zero.
    return tf.cos(1 + tf.add_n([tf.cast(tf.reduce_sum(t), dtype) for t in parts]))


def _finite(t: Tensor) -> Tensor:
    """Numbers that depend on `t` where `t` is finite, and have a finite sum.

    What is not finite may be a mask, and must not spoil a zero.
    """
    if not structures.is_differentiable(t.dtype):
        return t
    t = structures.for_sums(tf.math.real(t))
    t = tf.where(tf.math.is_finite(tf.stop_gradient(t)), t, tf.zeros_like(t))
    # Whose sum is finite, and whose derivatives of every order are neither lost nor too small.
    return tf.sin(t)


@dataclasses.dataclass(frozen=True)
class _Zero:
    """Zero, or NaN if `holds` is false; with a message, an error instead, except in XLA."""

    dtype: DType
    message: str | None

    def __call__(self, holds: Tensor) -> Tensor:
        zero, nan = tf.constant(0.0, self.dtype), tf.constant(float("nan"), self.dtype)
        number = tf.where(holds, zero, nan)
        return number if self.message is None else tf.debugging.check_numerics(number, self.message)
