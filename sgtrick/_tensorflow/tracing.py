"""Functions traced as graphs, and called from graphs other than the one they were traced for."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs, gradients_util

from sgtrick._arguments.nones import present, spread
from sgtrick._tensorflow import graphs
from sgtrick._tensorflow.graphs import is_variable
from sgtrick._tensorflow.tapes import not_recording, recording
from sgtrick._types import ConcreteFunction, Function, Gradient, Graph, Spec, Tensor, Variable


def specs_of(tensors: Sequence[Tensor]) -> list[Spec]:
    """The specs of tensors, as far as they are known while tracing."""
    return [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


def trace(f: Function, specs: Sequence[Spec]) -> ConcreteFunction:
    """`f` as a concrete function for tensors like `specs`."""
    with recording():
        return tf.function(f, autograph=False).get_concrete_function(*specs)


class Traced:
    """A function traced as part of a graph, to be called with other tensors than it captured.

    Among its arguments and results may be None, where there is no derivative.

    Attributes:
        captured: The outer tensors that it uses.
        inner: The same in its graph.
        handles: The handles of the variables among these.
        variables: The variables that it uses.
        inputs: The placeholders of its arguments.
        outputs: The results in its graph.
    """

    def __init__(
        self,
        f: Callable[..., Sequence[Gradient]],
        likes: Sequence[Tensor | Spec | None],
        graph: Graph | None = None,
    ) -> None:
        """`f` of tensors like `likes`, and None where these are None."""
        specs = specs_of(present(likes))
        there: list[bool | None] = []

        def dense(*tensors: Tensor) -> list[Tensor]:
            results = f(*spread(tensors, likes))
            there[:] = [None if r is None else True for r in results]
            return list(map(tf.convert_to_tensor, present(results)))

        with contextlib.nullcontext() if graph is None else graph.as_default():
            self._function = trace(dense, specs)
        self.captured = list(self._function.captured_inputs)
        self.inner = self._function.graph.inputs[len(specs) :]
        self.handles = list(filter(is_variable, self.captured))
        self.variables: list[Variable] = list(self._function.graph.variables)
        self.inputs = self._function.graph.inputs[: len(specs)]
        self.outputs = spread(self._function.graph.outputs, there)

    def __call__(
        self, arguments: Sequence[Tensor | None], captured: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Calls the function with `captured` instead of the tensors that it captured."""
        self._function.set_external_captures(list(captured))
        try:
            return spread(self._function(*present(arguments)), self.outputs)
        finally:
            self._function.set_external_captures(self.captured)


def is_soon_closed() -> bool:
    """Whether the graph being traced is, or is in, a branch or the body of a loop.

    Its gradient is traced when it is complete, and can capture nothing more from outside.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def carried(f: Function, likes: Sequence[Tensor | None]) -> Function:
    """`f` of tensors like these, callable where what it closes over is out of reach.

    A gradient graph is differentiated in another graph, which can use tensors of the gradient
    graph, but not of the forward graph. So what `f` closes over is brought into the graph that is
    being traced.
    """
    traced = Traced(f, likes)
    captured = list(map(graphs.as_used, traced.captured))
    return lambda *arguments: traced(arguments, captured)


def as_one(f: Function, *tensors: Tensor) -> Tensor:
    """`f(*tensors)` without derivatives, in a graph as one operation that only runs if it is used.

    In a function, stateful operations, such as those that may raise, always run. A call that is
    declared stateless is pruned with everything in it. `f` has to be hashable, and is traced once
    for each combination of shapes and dtypes.
    """
    if tf.executing_eagerly():
        return f(*tensors)
    function = _one(f, tuple(specs_of(tensors)))
    function.add_to_graph(tf.compat.v1.get_default_graph())
    (spec,) = function.outputs
    with not_recording():
        (y,) = tf.raw_ops.PartitionedCall(args=list(tensors), Tout=[spec.dtype], f=function)
        y = tf.stop_gradient(y) if spec.dtype.is_floating else y
    y.set_shape(spec.shape)
    return y


@functools.lru_cache(1024)
def _one(f: Function, specs: tuple[Spec, ...]) -> ConcreteFunction:
    with tf.init_scope():
        return trace(f, specs)


def gradients_in(
    graph: Graph, ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Sequence[Tensor]
) -> list[Gradient]:
    """`tf.gradients` of tensors of a graph that need not be the one that is being traced.

    One of `xs` may depend on another one, but counts as independent.
    """
    with recording():
        return list(
            gradients_util._GradientsHelper(
                list(ys), list(xs), grad_ys=list(grad_ys), stop_gradients=list(xs), src_graph=graph
            )
        )
