"""PyTorch and JAX functions, whose gradients their frameworks compute, as host engines."""

import importlib
import sys
from concurrent.futures import Executor

from sgtrick._core import calls
from sgtrick._core.types import Decorated, DTypeLike, Function, Structure
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
) -> Decorated:
    """Turns a PyTorch function into a TensorFlow function, with its gradient from autograd.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def log_prob(x):  # a torch.Tensor [2]
        ...     return -0.5 * (x**2).sum()
        >>> h = sgtrick.from_torch(log_prob)
        >>> h(tf.constant([[1.0, 2.0], [3.0, 4.0]])).numpy()
        array([ -2.5, -12.5], dtype=float32)

    Args:
        fn: Takes PyTorch tensors without batch dimensions and returns a scalar tensor, or
            `(scalar, aux)`. The tensors are on the CPU; `fn` may move them. Without `fn`, a
            decorator is returned.
        event_ndims: As in `from_numpy`.
        vectorized: Whether a batch is evaluated in one call, by `torch.func.vmap`. Pass False for
            functions that cannot be mapped, for example because their control flow depends on
            values: they are called once for each member. An argument that all members share is not
            copied.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the tensors that `fn` gets.
        executor: As in `from_numpy`, but threads only: processes need a function at the top level
            of a module, and the engine that calls `fn` is not one.
        on_error: As in `from_numpy`.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for PyTorch.
        Hessian-vector products are exact, and computed only when requested.

    Raises:
        ImportError: PyTorch is not installed; the message contains the command that installs it.

    All errors of `from_numpy` apply. Functions that cannot work at any point raise a `TypeError`
    whatever `on_error` is: those that do not return a scalar tensor, and those that cut the value
    off from an argument (`.item()`, `.detach()`, `torch.no_grad()`). Value and gradient come from
    one pass of `torch.func.grad_and_value`; only arrays cross the boundary.
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
) -> Decorated:
    """Turns a JAX function into a TensorFlow function, with its gradient from JAX.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def log_prob(x):  # a jax.Array [2]
        ...     return -0.5 * (x**2).sum()
        >>> h = sgtrick.from_jax(log_prob)
        >>> h(tf.constant([[1.0, 2.0], [3.0, 4.0]])).numpy()
        array([ -2.5, -12.5], dtype=float32)

    Args:
        fn: Takes JAX arrays without batch dimensions and returns a scalar, or `(scalar, aux)`. It
            is compiled by `jax.jit`, once for each shape. Without `fn`, a decorator is returned.
        event_ndims: As in `from_numpy`.
        vectorized: Whether a batch is evaluated in one call, by `jax.vmap`. If False, `fn` is
            called once for each member. An argument that all members share is not copied.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the arrays that `fn` gets. JAX's 64-bit mode is on while `fn`
            runs with a 64-bit argument, integers included; otherwise it is left unchanged.
        executor: As in `from_numpy`, but threads only.
        on_error: As in `from_numpy`.
        jit: Whether `fn` is compiled by `jax.jit`. Pass False for functions that cannot be traced,
            for example because an `if` depends on a value; they also need `vectorized=False`.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for JAX.
        Hessian-vector products are exact (forward over reverse), and computed only when requested.

    Raises:
        ImportError: JAX is not installed; the message contains the command that installs it.

    All errors of `from_numpy` apply. Functions that cannot be traced or do not return a scalar
    raise a `TypeError`, whatever `on_error` is. Value and gradient come from one pass of
    `jax.value_and_grad`; only arrays cross the boundary.
    """
    _import("jax", "JAX", "from_jax")
    from sgtrick._host.jax import Jax

    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name, broadcasts=True,
    )  # fmt: skip
    return _form(fn, Jax(jit=jit), options)


def _form(fn: Function | None, framework: Framework, options: Options) -> Decorated:
    """The host function, or a decorator if `fn` is None."""

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
            f"{form} needs {framework}, which is not installed for {sys.executable}. Install the "
            f"extra sgtrick[{package}], or the package alone: {sys.executable} -m pip install "
            f"{package}",
            name=package,
        ) from error
