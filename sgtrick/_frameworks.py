"""Functions of other frameworks, which derive their gradients themselves, as host engines."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick import _arguments
from sgtrick._host import HostFunction, from_numpy


def from_torch(
    fn: Callable[..., Any],
    *,
    event_ndims: Any = 1,
    vectorized: bool = True,
    has_aux: bool = False,
    dtype: Any = "float64",
    executor: Any = None,
    on_error: Any = "raise",
    name: str | None = None,
) -> HostFunction:
    """Brings a function of PyTorch into TensorFlow; its gradient comes from PyTorch's autograd.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def log_prob(x):  # a torch.Tensor [2]
        ...     return -0.5 * (x**2).sum()
        >>> h = sgtrick.from_torch(log_prob)
        >>> h(tf.constant([[1.0, 2.0], [3.0, 4.0]])).numpy()
        array([ -2.5, -12.5], dtype=float32)

    Args:
        fn: From `torch.Tensor`s without batch dimensions to a scalar tensor, or to `(scalar, aux)`.
            The tensors are on the CPU; it may move them.
        event_ndims: As in `from_numpy`.
        vectorized: Whether a batch is evaluated in one call, by `torch.func.vmap`. False for
            functions that this cannot take, for example with control flow that hangs on values:
            they are called for one member after the other.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the tensors that `fn` gets.
        executor: As in `from_numpy`, of threads: what is sent to processes must be a function of a
            module, which this is not.
        on_error: As in `from_numpy`.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Arguments that are not floating, or of which a leaf is not, are
        constants for PyTorch.

    Raises:
        ImportError: PyTorch is not installed: `pip install sgtrick[torch]`.

    And what `from_numpy` raises. Value and gradient come from one pass, by
    `torch.func.grad_and_value`; only arrays cross the boundary.
    """
    import torch

    def to_tensors(args: Any) -> Any:
        return tf.nest.map_structure(torch.from_numpy, args)

    def to_arrays(results: Any) -> Any:
        return tf.nest.map_structure(lambda t: t.detach().cpu().numpy(), results)

    def one_pass(argnums: tuple[int, ...], batch_ndims: int) -> Callable[..., Any]:
        f = torch.func.grad_and_value(fn, argnums, has_aux)
        for _ in range(batch_ndims):
            f = torch.func.vmap(f)
        return lambda *args: f(*args)[::-1]

    engine = _engine(fn, event_ndims, one_pass, to_tensors, to_arrays)
    return from_numpy(
        engine,
        event_ndims=event_ndims,
        vectorized=vectorized,
        has_aux=has_aux,
        dtype=dtype,
        executor=executor,
        on_error=on_error,
        name=name,
    )


def from_jax(
    fn: Callable[..., Any],
    *,
    event_ndims: Any = 1,
    vectorized: bool = True,
    has_aux: bool = False,
    dtype: Any = "float64",
    executor: Any = None,
    on_error: Any = "raise",
    name: str | None = None,
) -> HostFunction:
    """Brings a function of JAX into TensorFlow; its gradient comes from `jax.value_and_grad`.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def log_prob(x):  # a jax.Array [2]
        ...     return -0.5 * (x**2).sum()
        >>> h = sgtrick.from_jax(log_prob)
        >>> h(tf.constant([[1.0, 2.0], [3.0, 4.0]])).numpy()
        array([ -2.5, -12.5], dtype=float32)

    Args:
        fn: From `jax.Array`s without batch dimensions to a scalar, or to `(scalar, aux)`. It is
            compiled by `jax.jit`, once for each shape.
        event_ndims: As in `from_numpy`.
        vectorized: Whether a batch is evaluated in one call, by `jax.vmap`; else `fn` is called
            for one member after the other.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the arrays that `fn` gets. With float64 JAX's 64-bit mode is
            on while `fn` runs, and only then.
        executor: As in `from_numpy`, threads.
        on_error: As in `from_numpy`.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Arguments that are not floating, or of which a leaf is not, are
        constants for JAX.

    Raises:
        ImportError: JAX is not installed: `pip install sgtrick[jax]`.

    And what `from_numpy` raises. Only arrays cross the boundary.
    """
    import jax
    import jax.experimental

    # Where it has been since JAX 0.8, and where it was before.
    enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    wide = np.dtype(getattr(dtype, "as_numpy_dtype", dtype)).itemsize == 8

    def one_pass(argnums: tuple[int, ...], batch_ndims: int) -> Callable[..., Any]:
        f = jax.value_and_grad(fn, argnums, has_aux)
        for _ in range(batch_ndims):
            f = jax.vmap(f)
        f = jax.jit(f)

        def in_width(*args: Any) -> Any:
            with enable_x64(wide):
                return f(*args)

        return in_width

    def to_arrays(results: Any) -> Any:
        return tf.nest.map_structure(np.asarray, results)

    engine = _engine(fn, event_ndims, one_pass, lambda args: args, to_arrays)
    return from_numpy(
        engine,
        event_ndims=event_ndims,
        vectorized=vectorized,
        has_aux=has_aux,
        dtype=dtype,
        executor=executor,
        on_error=on_error,
        name=name,
    )


def _engine(
    fn: Callable[..., Any],
    event_ndims: Any,
    one_pass: Callable[[tuple[int, ...], int], Callable[..., Any]],
    to_framework: Callable[[Any], Any],
    to_arrays: Callable[[Any], Any],
) -> Any:
    """An engine for `from_numpy` of a framework's value and gradient.

    Args:
        fn: The function of one member.
        event_ndims: As in `from_numpy`.
        one_pass: Makes, for the arguments by which to differentiate and for a number of batch
            dimensions, a function that returns `(value, gradients)`.
        to_framework: From arrays.
        to_arrays: From whatever the framework returns.
    """
    one_pass = functools.cache(one_pass)

    def engine(*args: Any) -> Any:
        leaves = tf.nest.flatten(args)
        batch_ndims = leaves[0].ndim - tf.nest.flatten(event_ndims)[0] if leaves else 0
        argnums = tuple(
            i
            for i, arg in enumerate(args)
            if all(leaf.dtype.kind == "f" for leaf in tf.nest.flatten(arg))
        )
        if not argnums:
            raise TypeError(
                "No argument is of a floating dtype, so there is no gradient to derive. Pass one "
                "as a float, or call the function itself."
            )
        value, gradients = to_arrays(one_pass(argnums, batch_ndims)(*to_framework(args)))
        found = dict(zip(argnums, gradients, strict=True))
        by_argument = [
            found[i] if i in found else tf.nest.map_structure(lambda _: None, arg)
            for i, arg in enumerate(args)
        ]
        return value, by_argument[0] if len(args) == 1 else tuple(by_argument)

    return _arguments.imitate(engine, fn)
