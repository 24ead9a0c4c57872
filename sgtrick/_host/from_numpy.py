"""Host engines: functions of NumPy arrays with their gradients, as functions of tensors."""

from concurrent.futures import Executor

from sgtrick._core.types import Decorated, DTypeLike, Function, Structure
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
) -> Decorated:
    """Turns a function of NumPy arrays and its gradient into a TensorFlow function.

    For log densities, losses and simulators that live outside TensorFlow: solvers, Stan, compiled
    code. The result takes tensors and has the gradient that the engine returned, under every
    transformation in which TensorFlow can call the host. One call of the engine gives both value
    and gradient.

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
            modify and keep. Floating arguments are arrays of `dtype`; others keep their own dtype.
            `value` is one number. `gradient` has the shape and structure of the argument; for
            several arguments it is a tuple with one gradient for each. It is None for arguments
            that have no derivatives (int, bool, string). None for a floating argument means that
            its gradient is unknown, and it becomes NaN if it is requested. Masked entries count as
            NaN. Without `fn`, `from_numpy` returns a decorator:
            `@sgtrick.from_numpy(event_ndims=0)`. Functions in a class become methods.
        grad: The gradient, as a separate function of the same arguments; `fn` then returns only the
            value. Both are called in each evaluation, whether or not the gradient is used.
        hessp: For second derivatives, `hessp(*arrays, v)`, which returns the Hessian times `v`.
            For one argument, `v` and the product have its shape and structure; for several, they
            are tuples, with None for arguments that have no derivatives. It is called only when a
            second derivative is requested. If `fn` is a method, so are `hessp`, `hess` and `grad`.
        hess: Instead of `hessp`, `hess(*arrays)`, which returns the Hessian as `jax.hessian` does:
            for one array of shape `E` an array of shape `E + E`, for structures and several
            arguments a structure of structures. None stands for an unknown block. It must be
            symmetric up to rounding, and its symmetric part is used.
        event_ndims: The number of trailing dimensions of an argument that form one point: an int
            for all arguments, or a tuple with one entry for each, which is an int or, for an
            argument that is a structure, a structure of ints. All leading dimensions are batch. The
            batch shapes of the arguments are broadcast against each other.
        vectorized: Whether the engine takes all members of a batch in one call: arguments
            `[batch..., event...]`, a value `[batch...]`, and gradients like the arguments. An
            argument that all members share is a read-only view that takes no memory. If False, the
            engine is called once for each member.
        has_aux: Whether the engine returns `((value, aux), gradient)`, or with `grad` `(value,
            aux)`. `aux` is an array of real numbers of the same shape for all members of a batch.
            If all members failed, it is one NaN for each. Each derivative of it is an error or NaN:
            if it counts as a constant, use `tf.stop_gradient` of it.
        dtype: The floating dtype in which the engine computes.
        executor: A `concurrent.futures.Executor` that evaluates the members of a batch in parallel:
            threads, processes, or `dask.distributed`'s `Client.get_executor()`. Draws do not
            depend on it. Processes and clusters need an engine that can be pickled.
        on_error: `"raise"`, or a number that becomes the value, with zero gradient, wherever the
            engine raises an exception. `-np.inf` makes a sampler reject the point. If a vectorized
            engine raises, it is called again with batches of one, to find the members for which it
            raises. Where it raised, or `hessp` or `hess` raises, second derivatives are NaN. A
            result of the wrong form and the loss of an executor always raise.
        name: The name of the engine in op names and error messages; by default the function's name.

    Returns:
        A function of tensors, arrays or numbers, or structures of them, that returns the value as a
        tensor `[batch...]`, or `(value, aux)` with `aux` of `dtype`, `[batch..., ...]`. Each
        gradient has the dtype of its argument, the value the widest of these dtypes. Static shapes
        are inferred from the arguments. The function counts: `calls` of the engine, `hess_calls` of
        `hessp` or `hess`, `failures` (calls that raised), `nonfinite` (points whose value or
        gradient was not finite) and `seconds` (total wall time).

        Without an executor, one call is made at a time, whatever thread TensorFlow calls from; the
        counters are exact. No call is made for an empty batch. What `tf.vectorized_map` maps over
        is a batch too.

    Raises:
        TypeError: An argument cannot be converted or is complex, `dtype` is not a floating dtype,
            `executor` is not an executor or the engine cannot be sent to it, both `hessp` and
            `hess` are given, or (when called) the engine returned no gradient or something other
            than real numbers.
        ValueError: Shapes do not broadcast, `event_ndims` or `on_error` is invalid, or (when
            called) the engine returned the wrong shape or structure, or a Hessian that is not
            symmetric. In graphs, errors of the call arrive as a `tf.errors.OpError` with the same
            message.
        RuntimeError: The engine raised, in which case the message contains its own message and the
            arguments; or the executor did not answer.
        NotImplementedError: Tracing for XLA, `jit_compile=True`, which cannot call the host.
        AssertionError: From `tf.saved_model.save`, for a function that calls the engine.
        LookupError: A second derivative, of the result or anything computed from it, without
            `hessp` or `hess`; a third derivative; or a derivative of `aux`. Inside a `tf.function`,
            this is a `tf.errors.InvalidArgumentError` at run time; around it, the derivative is
            NaN.
    """
    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name,
    )  # fmt: skip
    if fn is None:
        return lambda fn: HostFunction(Derivatives(fn, grad, hessp, hess), options)
    return HostFunction(Derivatives(fn, grad, hessp, hess), options)
