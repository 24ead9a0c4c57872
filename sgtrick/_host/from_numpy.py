"""Host engines: functions of NumPy arrays with their gradients, as functions of tensors."""

from __future__ import annotations  # signatures that show the names of types

import functools
import pickle
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Executor
from typing import Any

from sgtrick._arguments import calls
from sgtrick._host import checks, reticulate
from sgtrick._host.differences import SCHEMES
from sgtrick._host.engine import Engine, floating, number
from sgtrick._host.host_function import HostFunction
from sgtrick._host.layout import check_fills, value_space
from sgtrick._host.members import said
from sgtrick._types import Argnums, Decorated, DTypeLike, Function, Kwargs, Structure


def from_numpy(
    fn: Function | None = None,
    *,
    grad: Function | str | bool | None = None,
    vjp: Function | None = None,
    jvp: Function | None = None,
    hessp: Function | None = None,
    argnums: Argnums | None = None,
    value_shape: Structure = (),
    event_ndims: int | Structure = 1,
    vectorized: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    name: str | None = None,
    **gone: object,
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
            modify and keep, and may return the same arrays each time. Floating tensors are arrays
            of `dtype`, other tensors keep their own, and without dimensions they are numbers of
            NumPy. Numbers and text of Python arrive as they are. `value` is one number, perhaps as
            `[value]`, or as `value_shape` says. `gradient` has the shape and structure of the
            argument; for several arguments it is a tuple with one gradient for each. For a value
            that is an array it is the Jacobian, with the shape of the value in front; for a
            structure it is a structure of Jacobians, as `jax.jacobian` returns them. It is None for
            arguments that have no derivatives (int, bool, string). None for a floating argument
            means that its gradient is unknown, and it is an error if it is requested. Masked
            entries count as NaN. Without `fn`, `from_numpy` returns a decorator:
            `@sgtrick.from_numpy(event_ndims=0)`. An engine cannot be a method: create it in
            `__init__`.
        grad: The gradient or Jacobian, as a separate function of the same arguments; `fn` then
            returns only the value. Both are called in each evaluation, whether or not the gradient
            is used. Or finite differences by their names in SciPy, with its relative steps:
            `"2-point"`, which takes as many more evaluations as there are entries, or `"3-point"`,
            which takes twice as many and has about two thirds of the digits instead of a half. They
            are taken when a gradient is requested, as a batch: one call if vectorized, else spread
            over the executor. The step is that of the narrowest dtype in play, which may be that
            of the value that `fn` returns. Or False: `fn` returns only the value, and there is no
            gradient; requesting one is an error.
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
            only when a second derivative is requested. For a Hessian as a matrix, pass
            `hessp=lambda x, v: hessian(x) @ v`.
        argnums: The arguments that have gradients, as positions or names, one or several; by
            default all. Gradients and vectors are like these, one or a tuple in this order. All
            other arguments are data: a derivative with respect to them is an error.
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
        dtype: The floating dtype in which the engine computes.
        executor: A `concurrent.futures.Executor` that evaluates the members of a batch in parallel:
            threads, processes, or `dask.distributed`'s `Client.get_executor()`. Draws do not
            depend on it. Processes and clusters need an engine that can be pickled.
        on_error: `"raise"`, or a number that becomes the value, with zero gradient, wherever the
            engine raises an exception. `-np.inf` makes a sampler reject the point. If a vectorized
            engine raises, it is called again with batches of one, to find the members for which it
            raises. Where it raised, or `hessp` raises, second derivatives are NaN; where `vjp` or
            `jvp` alone raises, first derivatives are. The first failure is reported as a
            `RuntimeWarning`. Mistakes in the code always raise (`NameError`, `AttributeError`,
            `ImportError`, `SyntaxError`, a function that cannot be called with these arguments),
            and so do a result of the wrong form and the loss of an executor.
        name: The name of the engine in op names and error messages; by default the function's name.
        **gone: Refused, with what to pass instead.

    Returns:
        A function of tensors, arrays or numbers, or structures of them, that returns the value as
        tensors `[batch..., value...]`. Each gradient has the dtype of its argument, the value the
        widest of these dtypes. Static shapes are inferred from the arguments and `value_shape`. The
        function counts: `calls` of the engine, `vjp_calls`, `jvp_calls`, `hess_calls` of `hessp`,
        `failures` (calls that raised), `nonfinite` (points whose value or derivative was not
        finite, of which the first is reported as a `RuntimeWarning`) and `seconds` (total wall
        time); `progress(total, desc)` is a scope that shows its calls.

        Without an executor, one call is made at a time, of all engines together, whatever thread
        TensorFlow calls from; the counters are exact. No call is made for an empty batch. What
        `tf.vectorized_map` maps over is a batch too.

    Raises:
        TypeError: An argument cannot be converted or is complex, `dtype` is not a floating dtype,
            `value_shape` is neither a shape nor a structure of shapes, `executor` is not an
            executor or the engine cannot be sent to it, functions are given that exclude each
            other, a function cannot be called, or (when called) the engine returned no gradient or
            something other than real numbers.
        ValueError: Shapes do not broadcast, a rank is unknown, `event_ndims` or `on_error` is
            invalid, `on_error` would have to fill a value of unknown shape, or (when called) the
            engine returned the wrong shape or structure. In graphs, errors of the call arrive as a
            `tf.errors.OpError` with the same message.
        RuntimeError: The engine raised, in which case the message contains its own message and the
            arguments; the executor did not answer; or an engine runs TensorFlow, which calls an
            engine that would have to wait for it.
        NotImplementedError: Tracing for XLA, `jit_compile=True`, which cannot call the host; or
            forward mode of an engine with `vjp` or `grad=False` that has no `jvp`.
        AssertionError: From `tf.saved_model.save`, for a function that calls the engine.
        LookupError: A gradient of an engine with `grad=False`, or with `jvp` that has no `vjp`,
            with respect to data, or for which the engine returned None; a second derivative, of the
            result or anything computed from it, without `hessp`, or by forward mode over forward
            mode if the value is not one number; or a third derivative. Inside a `tf.function`, this
            is a `tf.errors.InvalidArgumentError` at run time; around it, the derivative is NaN.
    """
    checks.refuse_options("from_numpy", gone)
    options: Kwargs = {
        "grad": grad, "vjp": vjp, "jvp": jvp, "hessp": hessp, "argnums": argnums,
        "value_shape": value_shape, "event_ndims": event_ndims, "vectorized": vectorized,
        "dtype": dtype, "executor": executor, "on_error": on_error, "name": name,
    }  # fmt: skip
    if fn is None:
        return functools.partial(from_numpy, **options)
    given = {"grad": grad, "vjp": vjp, "jvp": jvp, "hessp": hessp}
    _check_functions(given)
    value, instead = value_space(value_shape), number(on_error)
    if argnums is not None:
        calls.as_keys(argnums, "argnums")
    check_fills(value, instead)
    has_jacobian = callable(grad) or (grad is None and vjp is None and jvp is None)
    table: dict[str, list[Any]] = {
        "value and Jacobian" if has_jacobian else "value": [fn, *[grad] * callable(grad)],
        "vjp": [vjp],
        "jvp": [jvp],
        "hessp" if value.is_number else "hessp of a sum": [hessp],
    }
    functions = {
        key: list(map(reticulate.as_engine, fs)) for key, fs in table.items() if fs != [None]
    }
    _check_executor(executor, [f for fs in functions.values() for f in fs])

    def engine_of(name: str) -> Engine:
        return Engine(
            name, event_ndims, argnums, value, functions, floating(dtype),
            scheme=grad if isinstance(grad, str) else None,
            vectorized=vectorized, executor=executor, instead=instead,
        )  # fmt: skip

    return HostFunction(fn, from_numpy, options, engine_of)


def _check_functions(given: dict[str, Any]) -> None:
    grad = given["grad"]
    if grad is True or (isinstance(grad, str) and grad not in SCHEMES):
        raise ValueError(
            f"grad must be a function, {' or '.join(map(repr, SCHEMES))} for finite differences, "
            f"or False if there is no gradient, got {grad!r}."
        )
    for argument, f in given.items():
        is_other = argument == "grad" and (f is False or isinstance(f, str))
        if not (f is None or callable(f) or is_other):
            raise TypeError(f"{argument} must be a function, got {type(f).__name__}.")
        if f is not None and grad is False and argument in ("vjp", "hessp"):
            raise TypeError(f"grad=False says that there is no gradient: leave out {argument}.")
    if grad and given["vjp"]:
        raise TypeError("grad and vjp were both given. Pass one of them.")
    if grad and given["jvp"]:
        raise TypeError(
            "grad and jvp were both given. grad gives all first derivatives: leave jvp out."
        )


def _check_executor(executor: futures.Executor | None, functions: Sequence[Function]) -> None:
    if executor is not None and not isinstance(executor, futures.Executor):
        raise TypeError(
            "executor must be a concurrent.futures.Executor, for example ThreadPoolExecutor(), or "
            f"None, got {executor!r}."
        )
    if isinstance(executor, futures.ProcessPoolExecutor):
        for f in functions:
            try:
                pickle.dumps(f)
            except Exception as error:
                is_at_top = getattr(f, "__qualname__", "<lambda>").isidentifier()
                advice = _UNDER_ITS_NAME.format(calls.name_of(f)) if is_at_top else _AT_TOP
                raise TypeError(
                    "executor is a process pool, to which the engine cannot be sent: "
                    f"{said(error)}. {advice} Or use a ThreadPoolExecutor."
                ) from error


_AT_TOP = "Define it at the top level of a module, not as a lambda or closure."
_UNDER_ITS_NAME = (
    "Processes look for {0} under its name, where its module must have the function itself: define "
    "it without the decorator, and write another name = from_numpy({0}, executor=...)."
)
