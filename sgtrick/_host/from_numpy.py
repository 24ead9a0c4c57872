"""Host engines: functions of NumPy arrays with their gradients, as functions of tensors."""

from concurrent.futures import Executor
from typing import Any

from sgtrick._core.types import DTypeLike, Function, Structure
from sgtrick._host.host_function import Derivatives, HostFunction, Options


def from_numpy(
    fn: Function | None = None,
    *,
    grad: Function | None = None,
    hessp: Function | None = None,
    hess: Function | None = None,
    event_ndims: int | Structure = 1,
    vectorized: bool = False,
    has_aux: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    name: str | None = None,
) -> Any:
    """Brings a function of NumPy arrays and its gradient into TensorFlow.

    For log densities, losses and simulators that live outside TensorFlow: solvers, Stan, compiled
    code. The result takes tensors and has the gradient that the engine returned, under every
    transformation in which TensorFlow can call the host at all. One call of the engine gives both.

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import sgtrick
        >>> @sgtrick.from_numpy
        ... def log_prob(x):  # an array [2] of float64
        ...     return -0.5 * np.sum(x**2), -x
        >>> chains = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(chains)
        ...     y = log_prob(chains)
        >>> y.numpy()
        array([ -2.5, -12.5, -30.5], dtype=float32)
        >>> tape.gradient(y, chains).numpy()
        array([[-1., -2.],
               [-3., -4.],
               [-5., -6.]], dtype=float32)
        >>> log_prob.calls
        3

    Args:
        fn: The engine, `fn(*arrays) -> (value, gradient)`. It gets writable copies, which it may
            change and keep. Floating arguments come as arrays of `dtype`, others in their own.
            `value` is one number; `gradient` has the shape and structure of the argument, for
            several arguments it is a tuple with one for each. Arguments that have no derivatives
            (int, bool, string) have None there. None for a floating argument means that its
            gradient is not known: NaN, for whoever asks for it. Masked entries count as NaN.
            Without `fn`, `from_numpy` returns a decorator: `@sgtrick.from_numpy(event_ndims=0)`.
            Functions in a class are methods there.
        grad: The gradient, as a function of its own with the same arguments; `fn` then returns the
            value alone. Both are called in each evaluation, whether or not the gradient is used.
        hessp: For second derivatives, `hessp(*arrays, v)`, which returns the Hessian times `v`.
            For one argument `v` and the product have its shape and structure, for several they are
            tuples, with None for those that have no derivatives. It is called only when a second
            derivative is asked for. A method, where `fn` is one; so are `grad` and `hess`.
        hess: In its place, `hess(*arrays)`, which returns the Hessian as `jax.hessian` does: for
            one array of shape `E` an array `E + E`, for structures and several arguments a
            structure of structures. None stands for a block that is not known.
        event_ndims: How many trailing dimensions of an argument belong to one call of the engine:
            an int for all, or a tuple with one for each argument, which is an int or, for an
            argument that is a structure, a structure of ints. All dimensions before are batch. The
            batch shapes of the arguments are broadcast against each other.
        vectorized: Whether the engine takes all members of a batch in one call: arguments
            `[batch..., event...]`, a value `[batch...]`, and gradients like the arguments. An
            argument that members share is a view that takes no memory and cannot be written to.
            Without, the engine is called for one member after the other.
        has_aux: Whether the engine returns `((value, aux), gradient)`, or with `grad` `(value,
            aux)`. `aux` is an array of real numbers, of the same shape for all members of a batch;
            where all of a batch failed, one NaN for each.
        dtype: The floating dtype in which the engine computes.
        executor: A `concurrent.futures.Executor` that evaluates the members of a batch at once:
            threads, processes, or `dask.distributed`'s `Client.get_executor()`. Draws do not
            depend on it. Processes and clusters need an engine that can be pickled.
        on_error: `"raise"`, or a number which is the value, with zero gradient, wherever the engine
            raises an exception. `-np.inf` makes a sampler reject. Where a vectorized engine raises,
            it is called again with batches of one, to find out for which members. Where `hessp` or
            `hess` raises, second derivatives are NaN. A reply of a wrong form, and the loss of an
            executor, always raise.
        name: Prefix of the ops, and what errors call the engine; by default its own name.

    Returns:
        A function of tensors, arrays or numbers, or structures of them, that returns the value as a
        tensor `[batch...]`, or `(value, aux)` with `aux` of `dtype`, `[batch..., ...]`. Value and
        gradients have the dtype of their arguments, the value the widest of these. Static shapes
        are those of the arguments. It counts: `calls` of the engine, `hess_calls` of `hessp` or
        `hess`, `failures`, calls that raised; `nonfinite`, points whose value or gradient was not
        finite; and `seconds`, the wall time of all.

        Without an executor, one call is made at a time, from whichever threads TensorFlow calls;
        the counters are exact. No call is made for an empty batch. What `tf.vectorized_map` maps
        over is batch, too.

    Raises:
        TypeError: An argument that cannot be converted or is complex, a `dtype` that is not
            floating, an executor that is none, an engine that cannot be sent to it, both of `hessp`
            and `hess`, or (when called) a reply without a gradient or of something other than real
            numbers.
        ValueError: Shapes that do not broadcast, wrong `event_ndims` or `on_error`, or (when
            called) a reply of a wrong shape or structure. In graphs what is raised when called
            arrives as a `tf.errors.OpError` with the same message.
        RuntimeError: The engine raised: its own message, and the arguments; or no answer came from
            the executor.
        NotImplementedError: While tracing for XLA, `jit_compile=True`, which cannot call the host.
        AssertionError: From `tf.saved_model.save`, for a function that calls the engine.
        LookupError: When a second derivative is taken without `hessp` or `hess`, of the result or
            of anything made of it, or a third one. In a `tf.function` this is a
            `tf.errors.InvalidArgumentError` when it is run; around it the derivative is NaN.
    """
    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name,
    )  # fmt: skip
    if fn is None:
        return lambda fn: HostFunction(Derivatives(fn, grad, hessp, hess), options)
    return HostFunction(Derivatives(fn, grad, hessp, hess), options)
