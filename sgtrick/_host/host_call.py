"""Calls of an engine on tensors: operations without a derivative."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core._tensorflow import graphs, host_calls
from sgtrick._core.types import Array, Function, Tensor
from sgtrick._host.contract import CallSpec
from sgtrick._host.engine import Engine
from sgtrick._host.hessians import HessianTimes
from sgtrick._host.replies import ValueAndGradient


class HostCall:
    """An engine with what it is called on, whose arrays are tensors here.

    Tensors are the leaves of the arguments in their order. All have the same number of batch
    dimensions, which broadcast against each other.

    Attributes:
        spec: What the leaves are.
    """

    def __init__(self, engine: Engine, spec: CallSpec) -> None:
        self._engine, self.spec = engine, spec

    def evaluate(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The value, the gradients by the leaves that have derivatives, and perhaps aux."""
        evaluate = functools.partial(self._engine.evaluate, ValueAndGradient(self.spec))
        return self._call(evaluate, xs, self.spec.outputs)

    def hessian_times(self, xs: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Tensor]:
        """The products of the Hessian of each member of the batch with a vector.

        Args:
            xs: The leaves.
            vs: The vector: for each leaf that has derivatives a tensor of its shape, whose batch
                dimensions are those of the value.

        Returns:
            `sum_j H_ij v_j` for each leaf `i` that has derivatives, of the shape of `v_i` and of
            the dtype of the leaf.
        """
        reply = HessianTimes(self.spec, whole=self._engine.has_whole_hessian)
        product = functools.partial(self._engine.hessian_times, reply)
        outputs = self._call(product, [*xs, *vs], self.spec.gradient_dtypes)
        for output, v in zip(outputs, vs, strict=True):
            output.set_shape(v.shape)
        return outputs

    def _call(
        self, callback: Function, xs: Sequence[Tensor], dtypes: Sequence[Any]
    ) -> list[Tensor]:
        if tf.executing_eagerly():
            return [tf.convert_to_tensor(out) for out in callback(*(x.numpy() for x in xs))]
        graph = tf.compat.v1.get_default_graph()
        if graphs.in_xla(graph):
            raise NotImplementedError(
                f"{self.spec.name} calls the host, which XLA cannot compile. Leave "
                "jit_compile=True away, or put it on functions that do not call the engine; for a "
                "Keras model, compile(jit_compile=False)."
            )
        host_calls.forbid_saving(graph, _UNSAVABLE)
        # Forward accumulators cannot follow what comes, and need not.
        xs = [tf.stop_gradient(x) for x in xs]
        with tf.device("CPU:0"):
            xs = [_at_leisure(x) for x in xs]
        return host_calls.host_call(functools.partial(_tersely, callback), xs, dtypes)


def _tersely(callback: Function, *arrays: Array) -> Any:
    """Calls back, and takes our own frames off errors.

    TensorFlow makes text of them, whose last lines should be the engine's and what it says.
    """
    try:
        return callback(*arrays)
    except Exception as error:
        raise error.with_traceback(None)  # noqa: B904 - the cause stays what it was


_UNSAVABLE = (
    "A host engine (from_numpy, from_torch, from_jax) cannot be stored in a SavedModel: it is "
    "Python code of this process. Store the parameters instead."
)


def _at_leisure(x: Tensor) -> Tensor:
    """Returns `x` some ops later, when what else became ready with it has been run.

    TensorFlow runs an op that takes long where it stands if nothing else is ready. Otherwise it
    wakes another thread for it, which can take longer than the engine. Ops are run in the order in
    which they get ready, and a loop passes `x` on to its next turn in four.
    """
    for _ in range(6):
        x = tf.ensure_shape(x, x.shape)  # grappler would remove an identity
    return x
