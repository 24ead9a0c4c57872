"""Calls of an engine on tensors: operations without a derivative."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from sgtrick._host import differences
from sgtrick._host.contract import CallSpec, Parts
from sgtrick._host.engine import Engine
from sgtrick._host.replies import Evaluation, Product
from sgtrick._tensorflow import graphs, host_calls
from sgtrick._types import Array, DTypeLike, Function, Tensor


class HostCall:
    """An engine with the specification of a call, as a function of tensors.

    The tensors are the leaves of the arguments in order. All have the same number of batch
    dimensions, which are broadcast against each other.

    Attributes:
        engine: The engine.
        spec: The names, structure and dtypes of the leaves.
    """

    def __init__(self, engine: Engine, spec: CallSpec) -> None:
        self.engine, self.spec = engine, spec

    def evaluate(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The values, and what the call tells of: their gradients, failures, aux."""
        evaluate = functools.partial(self.engine.evaluate, Evaluation(self.spec))
        if "grad" in self.engine.schemes:
            evaluate = functools.partial(differences.evaluate, self.engine, self.spec)
        outputs = self._call(evaluate, xs, self.spec.outputs)
        # Second derivatives come with a value, and forward mode over forward mode traces them where
        # TensorFlow allows no new captures.
        if not tf.executing_eagerly():
            host_calls.forbid_saving(tf.compat.v1.get_default_graph(), _UNSAVABLE)
        return outputs

    def hessian_times(
        self, at: Sequence[Tensor], vs: Sequence[Tensor], us: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """The Hessian of each batch member times a vector.

        Args:
            at: The leaves, and for which batch members `evaluate` failed if it tells: there the
                value is constant, but the Hessian would be that of the engine, so it is NaN.
            vs: The vector: for each leaf that has derivatives, a tensor of its event shape with the
                batch dimensions of the value.
            us: Tensors like the values, unless the value is one number: the Hessian is that of the
                sum of `u * value`.

        Returns:
            `sum_j H_ij v_j` for each leaf `i` that has derivatives, with the shape of `v_i` and the
            dtype of the leaf.
        """
        engine, spec = self.engine, self.spec
        argument = "hess" if engine.gives("hess") else "hessp"
        vectors, whole = "uv" if us else "v", argument == "hess"
        reply = Product(spec, "the Hessian times v", vectors, whole=whole)
        callback = functools.partial(engine.product, argument, reply)
        if "hess" in engine.schemes:
            callback = functools.partial(differences.hessian_times, engine, spec)
        return self._product(callback, at, [*us, *vs], vs, np.nan)

    def vjp(
        self, at: Sequence[Tensor], us: Sequence[Tensor], likes: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradients of the sum of `u * value` by the leaves with derivatives, like these.

        They are zero where `evaluate` failed; so are tangents.
        """
        reply = Product(self.spec, "the VJP", "u")
        callback = functools.partial(self.engine.product, "vjp", reply)
        return self._product(callback, at, us, likes, 0)

    def jvp(
        self, at: Sequence[Tensor], ts: Sequence[Tensor], likes: Sequence[Tensor]
    ) -> list[Tensor]:
        """The tangents of the values along tangents of these leaves, tensors like the values."""
        reply = Product(self.spec, "the JVP", "t", to_value=True)
        callback = functools.partial(self.engine.product, "jvp", reply)
        return self._product(callback, at, ts, likes, 0)

    def _product(
        self,
        callback: Function,
        at: Sequence[Tensor],
        ws: Sequence[Tensor],
        likes: Sequence[Tensor],
        where_failed: float,
    ) -> list[Tensor]:
        """Tensors like `likes`, with a number where the value is not the engine's."""
        n = len(self.spec.paths)
        xs, failures = at[:n], at[n:]
        outputs = self._call(callback, [*xs, *ws], [like.dtype for like in likes])
        for failed in failures:
            outputs = [
                tf.where(as_high(failed, y), tf.constant(where_failed, y.dtype), y) for y in outputs
            ]
        for output, like in zip(outputs, likes, strict=True):
            output.set_shape(like.shape)
        return outputs

    def _call(
        self, callback: Function, xs: Sequence[Tensor], dtypes: Sequence[DTypeLike]
    ) -> list[Tensor]:
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(out) for out in callback(*(x.numpy() for x in xs))]
        if graphs.in_xla(tf.compat.v1.get_default_graph()):
            raise NotImplementedError(
                f"{self.spec.name} calls the host, which XLA cannot compile. Remove "
                "jit_compile=True, or use it only on functions that do not call the engine; for a "
                "Keras model, compile(jit_compile=False). A JAX function can be part of the graph: "
                "from_jax(native=True)."
            )
        # Forward accumulators cannot trace the host call, and need not: it has no derivative.
        xs = [tf.stop_gradient(x) for x in xs]
        with tf.device("CPU:0"):
            xs = [_at_leisure(x) for x in xs]
            first, *others = host_calls.host_call(functools.partial(_tersely, callback), xs, dtypes)
            # The value passes through a few ops, and they would be ready beside the first
            # expensive op that uses a gradient.
            return [first, *map(_at_leisure, others)]


def _tersely(callback: Callable[..., Parts], *arrays: Array) -> Parts:
    """Calls the engine, and removes our own frames from the traceback of an error.

    TensorFlow turns errors into text, whose last lines should be the engine's frames and message.
    """
    try:
        return callback(*arrays)
    except Exception as error:
        raise error.with_traceback(None)  # noqa: B904 - keep the original cause


_UNSAVABLE = (
    "A host engine (from_numpy, from_torch, from_jax) cannot be stored in a SavedModel: it is "
    "Python code of this process. Store the parameters, and create it again where they are loaded."
)


def as_high(t: Tensor, like: Tensor) -> Tensor:
    """A tensor with dimensions of size 1 behind, as many as another one has more."""
    ones = tf.ones([tf.rank(like) - tf.rank(t)], tf.int32)
    return tf.reshape(t, tf.concat([tf.shape(t), ones], 0))


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
