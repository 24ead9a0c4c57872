"""Functions of other frameworks, which derive their gradients themselves, as host engines."""

import importlib
import sys
from concurrent.futures import Executor
from typing import Any

from sgtrick._core import calls
from sgtrick._core.types import DTypeLike, Function, Structure
from sgtrick._host.derived import Derived, Framework
from sgtrick._host.host_function import Derivatives, HostFunction, Options


def from_torch(
    fn: Function | None = None,
    *,
    event_ndims: int | Structure = 1,
    vectorized: bool = True,
    has_aux: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    name: str | None = None,
) -> Any:
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
            The tensors are on the CPU; it may move them. Without `fn`, a decorator is returned.
        event_ndims: As in `from_numpy`.
        vectorized: Whether a batch is evaluated in one call, by `torch.func.vmap`. False for
            functions that this cannot take, for example with control flow that hangs on values:
            they are called for one member after the other. An argument that members share is not
            copied.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the tensors that `fn` gets.
        executor: As in `from_numpy`, of threads: what is sent to processes must be a function of a
            module, which this is not.
        on_error: As in `from_numpy`.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for PyTorch. Products
        with the Hessian are exact, and computed only when asked for.

    Raises:
        ImportError: PyTorch is not installed; the message has the command that installs it.

    And what `from_numpy` raises; a `TypeError`, whatever `on_error` is, for functions that can work
    nowhere: that return no scalar tensor, or cut the value off from an argument (`.item()`,
    `.detach()`, `torch.no_grad()`). Value and gradient come from one pass, by
    `torch.func.grad_and_value`; only arrays cross the boundary.
    """
    _import("torch", "PyTorch", "from_torch")
    from sgtrick._host.torch import Torch

    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name, broadcasts=True,
    )  # fmt: skip
    return _form(fn, Torch(), options)


def from_jax(
    fn: Function | None = None,
    *,
    event_ndims: int | Structure = 1,
    vectorized: bool = True,
    has_aux: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    jit: bool = True,
    name: str | None = None,
) -> Any:
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
            compiled by `jax.jit`, once for each shape. Without `fn`, a decorator is returned.
        event_ndims: As in `from_numpy`.
        vectorized: Whether a batch is evaluated in one call, by `jax.vmap`; else `fn` is called
            for one member after the other. An argument that members share is not copied.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the arrays that `fn` gets. JAX's 64-bit mode is on while `fn`
            runs with an argument of 64 bits, integers included; else it is as it was.
        executor: As in `from_numpy`, threads.
        on_error: As in `from_numpy`.
        jit: Whether `fn` is compiled by `jax.jit`. False for functions that cannot be traced, say
            with an `if` that hangs on values; they also need `vectorized=False`.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for JAX. Products with
        the Hessian are exact, forward over reverse, and computed only when asked for.

    Raises:
        ImportError: JAX is not installed; the message has the command that installs it.

    And what `from_numpy` raises; a `TypeError`, whatever `on_error` is, for functions that cannot
    be traced or return no scalar. Only arrays cross the boundary.
    """
    _import("jax", "JAX", "from_jax")
    from sgtrick._host.jax import Jax

    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name, broadcasts=True,
    )  # fmt: skip
    return _form(fn, Jax(jit=jit), options)


def _form(fn: Function | None, framework: Framework, options: Options) -> Any:
    """The host function, or without `fn` a decorator."""

    def make(functions: Derivatives) -> Derivatives:
        name = options.name or calls.name_of(functions.fn)
        derived = Derived(functions.fn, framework, options.event_ndims, options.has_aux, name)
        return Derivatives(derived.evaluate, hessp=derived.hessian_times)

    if fn is None:
        return lambda fn: HostFunction(Derivatives(fn), options, make)
    return HostFunction(Derivatives(fn), options, make)


def _import(package: str, framework: str, form: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{form} needs {framework}, which is not installed for {sys.executable}. The extra "
            f"sgtrick[{package}] brings it, or alone: {sys.executable} -m pip install {package}",
            name=package,
        ) from error
