"""Host engines: functions of NumPy arrays with their gradients, as functions of tensors."""

from __future__ import annotations  # signatures that show the names of types

from concurrent.futures import Executor

from sgtrick._host.engine import Functions, Options
from sgtrick._host.host_function import HostFunction
from sgtrick._types import Decorated, DTypeLike, Function, Structure


def from_numpy(
    fn: Function | None = None,
    *,
    grad: Function | str | bool | None = None,
    vjp: Function | None = None,
    jvp: Function | None = None,
    hessp: Function | None = None,
    hess: Function | str | None = None,
    value_shape: Structure = (),
    event_ndims: int | Structure = 1,
    vectorized: bool = False,
    has_aux: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    name: str | None = None,
) -> Decorated:
    """Turns a function of NumPy arrays and its gradient into a TensorFlow function.

    For log densities, losses and forward models that live outside TensorFlow: solvers, simulators,
    Stan, compiled code. The result takes tensors and has the derivatives that the engine gives,
    under every transformation in which TensorFlow can call the host. One call of the engine gives
    both value and gradient.

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
            modify and keep, and may return the same arrays each time. Floating arguments are arrays
            of `dtype`; others keep their own dtype. `value` is one number, perhaps as `[value]`, or
            as `value_shape` says. `gradient` has the shape and structure of the argument; for
            several arguments it is a tuple with one gradient for each. For a value that is an array
            it is the Jacobian, with the shape of the value in front, and for a structure a
            structure of Jacobians, as `jax.jacobian` returns them. It is None for arguments that
            have no derivatives (int, bool, string). None for a floating argument means that its
            gradient is unknown, and it becomes NaN if it is requested. Masked entries count as NaN.
            Without `fn`, `from_numpy` returns a decorator: `@sgtrick.from_numpy(event_ndims=0)`.
            Functions in a class become methods.
        grad: The gradient or Jacobian, as a separate function of the same arguments; `fn` then
            returns only the value. Both are called in each evaluation, whether or not the gradient
            is used. Or finite differences by their names in SciPy, with its relative steps:
            `"2-point"`, which takes as many more evaluations as there are entries, or `"3-point"`,
            which takes twice as many and has about two thirds of the digits instead of a half. They
            are part of the batch: one call if vectorized, else spread over the executor. Or False:
            `fn` returns only the value, and there is no gradient; requesting one is an error.
        vjp: Instead of a Jacobian, `vjp(*arrays, u)`, which for `u` like the value returns the
            gradients of the sum of `u * value`, in the form of gradients. `fn` then returns only
            the value. It is called only when a gradient is requested.
        jvp: For forward mode, `jvp(*arrays, t)`, which returns the tangent of the value along `t`.
            `t` is like `v` of `hessp`. `fn` then returns only the value. It is called only in
            forward mode, and for second derivatives. With a gradient or Jacobian it is not needed.
        hessp: For second derivatives, `hessp(*arrays, v)`, which returns the Hessian times `v`; for
            a value that is not one number, `hessp(*arrays, u, v)` with the Hessian of the sum of
            `u * value`. For one argument, `v` and the product have its shape and structure; for
            several, they are tuples, with None for arguments that have no derivatives. It is called
            only when a second derivative is requested. If `fn` is a method, so are all of these.
        hess: Instead of `hessp`, `hess(*arrays)`, which returns the Hessian of a value that is one
            number, as `jax.hessian` does: for one array of shape `E` an array of shape `E + E`, for
            structures and several arguments a structure of structures. None stands for an unknown
            block. It must be symmetric up to rounding, and its symmetric part is used. Or
            `"2-point"` or `"3-point"`: finite differences of the gradient, or of `vjp`, along `v`.
            Each product takes two or three evaluations, more if entries of `v` differ by orders of
            magnitude relative to those of the point.
        value_shape: The shape of the value of one batch member, such as `(3,)` for a vector, with
            None for dimensions that are only known when run; or, if the value is a structure, a
            dict, list or tuple of shapes.
        event_ndims: The number of trailing dimensions of an argument that form one point: an int
            for all arguments, or a tuple with one entry for each, which is an int or, for an
            argument that is a structure, a structure of ints. A list, dict or named tuple is the
            structure of the only argument. All leading dimensions are batch. The batch shapes of
            the arguments are broadcast against each other.
        vectorized: Whether the engine takes all members of a batch in one call: arguments
            `[batch..., event...]`, a value `[batch..., value...]`, and gradients like the arguments
            or Jacobians `[batch..., value..., event...]`. An argument that all members share is a
            read-only view that takes no memory. If False, the engine is called once for each
            member.
        has_aux: Whether the engine returns `((value, aux), gradient)`, or `(value, aux)` where the
            gradient does not come with the value. `aux` is an array of real numbers of the same
            shape for all members of a batch. If all members failed, it is one NaN for each. Each
            derivative of it is an error or NaN: if it counts as a constant, use `tf.stop_gradient`
            of it.
        dtype: The floating dtype in which the engine computes.
        executor: A `concurrent.futures.Executor` that evaluates the members of a batch in parallel:
            threads, processes, or `dask.distributed`'s `Client.get_executor()`. Draws do not
            depend on it. Processes and clusters need an engine that can be pickled.
        on_error: `"raise"`, or a number that becomes the value, with zero gradient, wherever the
            engine raises an exception. `-np.inf` makes a sampler reject the point. If a vectorized
            engine raises, it is called again with batches of one, to find the members for which it
            raises. Where it raised, or `hessp` or `hess` raises, second derivatives are NaN; where
            `vjp` or `jvp` alone raises, first derivatives are. The first failure is reported as a
            `RuntimeWarning`. Mistakes in the code always raise (`NameError`, `AttributeError`,
            `ImportError`, `SyntaxError`, a function that cannot be called with these arguments),
            and so do a result of the wrong form and the loss of an executor.
        name: The name of the engine in op names and error messages; by default the function's name.

    Returns:
        A function of tensors, arrays or numbers, or structures of them, that returns the value as
        tensors `[batch..., value...]`, or `(value, aux)` with `aux` of `dtype`, `[batch..., ...]`.
        Each gradient has the dtype of its argument, the value the widest of these dtypes. Static
        shapes are inferred from the arguments and `value_shape`. The function counts: `calls` of
        the engine, `vjp_calls`, `jvp_calls`, `hess_calls` of `hessp` or `hess`, `failures` (calls
        that raised), `nonfinite` (points whose value or gradient was not finite) and `seconds`
        (total wall time); `progress(total, desc)` is a scope that shows its calls as a bar.

        Without an executor, one call is made at a time, whatever thread TensorFlow calls from; the
        counters are exact. No call is made for an empty batch. What `tf.vectorized_map` maps over
        is a batch too.

    Raises:
        TypeError: An argument cannot be converted or is complex, `dtype` is not a floating dtype,
            `value_shape` is neither a shape nor a structure of shapes, `executor` is not an
            executor or the engine cannot be sent to it, functions are given that exclude each
            other, a function cannot be called, or (when called) the engine returned no gradient or
            something other than real numbers.
        ValueError: Shapes do not broadcast, `event_ndims` or `on_error` is invalid, `on_error`
            would have to fill a value of unknown shape, or (when called) the engine returned the
            wrong shape or structure, or a Hessian that is not symmetric. In graphs, errors of the
            call arrive as a `tf.errors.OpError` with the same message.
        RuntimeError: The engine raised, in which case the message contains its own message and the
            arguments; or the executor did not answer.
        NotImplementedError: Tracing for XLA, `jit_compile=True`, which cannot call the host; or
            forward mode of an engine with `vjp` or `grad=False` that has no `jvp`.
        AssertionError: From `tf.saved_model.save`, for a function that calls the engine.
        LookupError: A gradient of an engine with `grad=False`, or with `jvp` that has no `vjp`; a
            second derivative, of the result or anything computed from it, without `hessp` or
            `hess`, or by forward mode over forward mode if there is a `vjp` or the value is not one
            number; a third derivative; or a derivative of `aux`. Inside a `tf.function`, this is a
            `tf.errors.InvalidArgumentError` at run time; around it, the derivative is NaN.
    """
    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name, value_shape=value_shape,
    )  # fmt: skip
    if fn is None:
        return lambda fn: HostFunction(Functions(fn, grad, vjp, jvp, hessp, hess), options)
    return HostFunction(Functions(fn, grad, vjp, jvp, hessp, hess), options)
