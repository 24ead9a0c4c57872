"""Questions to an engine as operations of TensorFlow, without a derivative."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._host import differences, members
from sgtrick._host.engine import QUESTIONS, Engine
from sgtrick._host.layout import Layout, Parts, with_ones_behind
from sgtrick._tensorflow import graphs, numpy_function
from sgtrick._types import Array, DTypeLike, Tensor


class ValueExtras(NamedTuple):
    """What comes with the values of an engine, tensors with their batch dimensions.

    Attributes:
        jacobians: The Jacobian of each value by each point, if they come with the values.
        unknown: Which of them are not known, if some may be.
        failed: Where a number has replaced the value, if one is stated.
        in_float64: The values in float64, if differences are taken of them.
        precision: In which precision the engine gave these.
    """

    jacobians: list[Tensor]
    unknown: list[Tensor]
    failed: list[Tensor]
    in_float64: list[Tensor]
    precision: list[Tensor]


class HostCall:
    """An engine with the layout of a call.

    The tensors are the leaves of the arguments in order. All have the same number of batch
    dimensions, which are broadcast against each other.

    Attributes:
        engine: The engine.
        layout: The layout.
    """

    def __init__(self, engine: Engine, layout: Layout) -> None:
        self.engine, self.layout = engine, layout
        # Differences are taken of values in float64.
        self._of_values = layout.with_float64_value() if engine.scheme else layout
        self._asked: dict[str, members.Asking] = {}

    def asking(self, key: str, step: str = "") -> members.Asking:
        """A question, which is made once; `step` is for points beside the one that was passed."""
        if key + step not in self._asked:
            layout = self._of_values if QUESTIONS[key].is_first else self.layout
            self._asked[key + step] = members.Asking(self.engine, layout, key, step)
        return self._asked[key + step]

    def value(self, xs: Sequence[Tensor]) -> tuple[list[Tensor], ValueExtras]:
        """The values, and what comes with them."""
        engine, layout = self.engine, self.layout
        is_apart = bool(engine.scheme)
        asked = self.asking(engine.first(layout.value.is_number))
        n, m = len(layout.value.shapes), len(asked.numbers)
        k = m + asked.may_be_unknown
        end = k + asked.tells_failures
        outputs = self._call(asked, xs, asked.dtypes)
        # Second derivatives come with a value, and forward mode over forward mode traces them where
        # TensorFlow allows no new captures.
        if not tf.executing_eagerly():
            numpy_function.forbid_saving(tf.compat.v1.get_default_graph(), _UNSAVABLE)
            # Whatever these are inputs of does not call the host with what has derivatives.
            outputs = list(map(tf.stop_gradient, outputs))
        values = outputs[:n]
        in_float64 = values if is_apart else []
        extras = ValueExtras(outputs[n:m], outputs[m:k], outputs[k:end], in_float64, outputs[end:])
        return [tf.cast(y, layout.value_dtype) for y in values] if is_apart else values, extras

    def differences(self, sent: Sequence[Tensor], extras: ValueExtras) -> list[Tensor]:
        """The Jacobians by finite differences, zero where the engine failed."""
        layout = self.layout
        step = f"\nThis is a step of grad={self.engine.scheme!r}, not a point that was passed."
        ask = functools.partial(differences.ask, self.asking("value", step))
        dtypes = [layout.leaves[k].dtype for k in layout.places] * len(layout.value.shapes)
        arrays = [*sent, *extras.in_float64, *extras.precision, *extras.failed]
        return self._call(ask, arrays, dtypes)

    def product(
        self,
        key: str,
        sent: Sequence[Tensor],
        extras: ValueExtras,
        ws: Sequence[Tensor],
        likes: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """A product with a derivative, tensors like others, and which of them are not known.

        Where the engine failed, the value is a constant: first derivatives are zero. The second
        ones, which would be those of the engine, are NaN.

        Args:
            key: The question.
            sent: The leaves.
            extras: What came with the values.
            ws: The leaves of the vectors.
            likes: Tensors of the shapes and dtypes of the product.
        """
        asked = self.asking(key)
        dtypes = [like.dtype for like in likes] + [tf.bool] * asked.may_be_unknown
        outputs = self._call(asked, [*sent, *ws], dtypes)
        outputs, unknown = outputs[: len(likes)], outputs[len(likes) :]
        number = float("nan") if key.startswith("hessp") else 0
        ndims = self.layout.event_ndims(key)
        for failed in extras.failed:
            outputs = [
                tf.where(with_ones_behind(failed, n), tf.constant(number, y.dtype), y)
                for y, n in zip(outputs, ndims, strict=True)
            ]
        for output, like in zip(outputs, likes, strict=True):
            output.set_shape(like.shape)
        return outputs, unknown

    def _call(
        self, callback: Callable[..., Parts], xs: Sequence[Tensor], dtypes: Sequence[DTypeLike]
    ) -> list[Tensor]:
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(out) for out in callback(*(x.numpy() for x in xs))]
        if graphs.in_xla(tf.compat.v1.get_default_graph()):
            raise NotImplementedError(
                f"{self.layout.name} calls the host, which XLA cannot compile. Remove "
                "jit_compile=True, or use it only on functions that do not call the engine; for a "
                "Keras model, compile(jit_compile=False). A JAX function can be part of the graph: "
                "from_jax(native=True)."
            )
        # Forward accumulators cannot trace the host call, and need not: it has no derivative.
        xs = [tf.stop_gradient(x) for x in xs]
        with tf.device("CPU:0"):
            xs = [_at_leisure(x) for x in xs]
            tersely = functools.partial(_tersely, callback)
            first, *others = numpy_function.host_call(tersely, xs, dtypes)
            # The value passes through a few ops, and they would be ready beside the first
            # expensive op that uses a gradient.
            return [first, *map(_at_leisure, others)]


def _tersely(callback: Callable[..., Parts], *arrays: Array) -> Parts:
    """Calls the engine, and gives an error the traceback of its cause, without our own frames.

    TensorFlow turns an error into text, which it prints three times: a message and the frames of
    the engine's own code, as one error instead of two.
    """
    try:
        return callback(*arrays)
    except Exception as error:
        if (cause := error.__cause__) is None:
            raise error.with_traceback(None) from None
        frames = cause.__traceback__ and cause.__traceback__.tb_next  # first: where we call it
        raise error.with_traceback(frames) from cause.__cause__


_UNSAVABLE = (
    "A host engine (from_numpy, from_torch, from_jax) cannot be stored in a SavedModel: it is "
    "Python code of this process. Store the parameters, and create it again where they are loaded."
)


def _at_leisure(x: Tensor) -> Tensor:
    """Returns `x` a few ops later, after the other ops that became ready with it have run.

    TensorFlow runs an expensive op on the current thread if no other op is ready. Otherwise it
    hands the op to another thread, and waking that can take longer than the engine does. Ops run in
    the order in which they become ready, and a loop takes four ops to pass `x` to its next
    iteration.
    """
    if x.shape.rank is None:  # inlined where it is known, an op that states no rank would fail
        return x
    for _ in range(6):
        x = tf.ensure_shape(x, x.shape)  # grappler would remove an identity
    return x
