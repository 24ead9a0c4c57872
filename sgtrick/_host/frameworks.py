"""PyTorch and JAX functions, whose gradients their frameworks compute, as host engines."""

from __future__ import annotations  # signatures that show the names of types

import functools
from concurrent.futures import Executor

from sgtrick._host import packages
from sgtrick._host.derived import Derived, Framework
from sgtrick._host.engine import Functions, Options
from sgtrick._host.host_function import HostFunction
from sgtrick._host.value_shape import ValueShape
from sgtrick._types import Decorated, DTypeLike, Function, Structure


def from_torch(
    fn: Function | None = None,
    *,
    value_shape: Structure = (),
    event_ndims: int | Structure = 1,
    vmap: bool = True,
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
        fn: Takes PyTorch tensors without batch dimensions and returns a tensor, a structure of
            tensors, or `(value, aux)`. The tensors are on the CPU; `fn` may move them. Without
            `fn`, a decorator is returned.
        value_shape: As in `from_numpy`: by default, the value is one number.
        event_ndims: As in `from_numpy`.
        vmap: Whether a batch is evaluated in one call, by `torch.func.vmap`. Pass False for
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
        What `from_numpy` returns. Leaves that are not floating are constants for PyTorch. The
        gradient of one number comes with it. For any other value, products with the Jacobian are
        computed when they are requested, as are second derivatives. All are exact.

    Raises:
        ImportError: PyTorch is not installed; the message contains the command that installs it.

    All errors of `from_numpy` apply. Functions that cannot work at any point raise a `TypeError`
    whatever `on_error` is: those that do not return floating tensors, and those that cut the value
    off from all arguments (`.item()`, `.detach()`, `torch.no_grad()`). What is detached beside
    other parts is a constant. Value and gradient come from one pass of `torch.func.vjp`; only
    arrays cross the boundary.
    """
    packages.check("torch", "from_torch", "PyTorch")
    ValueShape(value_shape)  # not None: only JAX finds it
    from sgtrick._host.torch import Torch

    options = Options(
        vectorized=vmap, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name,
        value_shape=value_shape,
    )  # fmt: skip
    return _form(fn, Torch(), options)


def from_jax(
    fn: Function | None = None,
    *,
    value_shape: Structure = None,
    event_ndims: int | Structure = 1,
    vmap: bool = True,
    has_aux: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    jit: bool = True,
    native: bool = False,
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
        fn: Takes JAX arrays without batch dimensions and returns an array, a structure of arrays,
            or `(value, aux)`. It is compiled by `jax.jit`, once for each shape. Without `fn`, a
            decorator is returned.
        value_shape: As in `from_numpy`. If None, `jax.eval_shape` finds it; without `jit`, the
            value is then one number.
        event_ndims: As in `from_numpy`.
        vmap: Whether a batch is evaluated in one call, by `jax.vmap`. If False, `fn` is
            called once for each member. An argument that all members share is not copied.
        has_aux: As in `from_numpy`.
        dtype: The floating dtype of the arrays that `fn` gets. JAX's 64-bit mode is on while `fn`
            runs with a 64-bit argument, integers included; otherwise it is left unchanged.
        executor: As in `from_numpy`, but threads only.
        on_error: As in `from_numpy`.
        jit: Whether `fn` is compiled by `jax.jit`. Pass False for functions that cannot be traced,
            for example because an `if` depends on a value; they also need `vmap=False`.
        native: Whether `fn` becomes operations of the graph, by `jax.experimental.jax2tf`, instead
            of a call of the host. They compile under XLA, run on the device of the graph, can be
            stored in SavedModels, and have derivatives of every order. `executor`, `on_error`,
            `vmap`, `jit` and `value_shape` do not apply. An argument without batch dimensions is
            shared by all members; its rank must be known.
        name: As in `from_numpy`.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for JAX. The gradient
        of one number comes with it. For any other value, products with the Jacobian are computed
        when they are requested, as are second derivatives (forward over reverse). All are exact. If
        `native`, a plain function, without counters.

    Raises:
        ImportError: JAX is not installed; the message contains the command that installs it. Or, if
            `native`, it has no `jax2tf`.
        TypeError: An option was given that does not apply if `native`.

    All errors of `from_numpy` apply. Functions that cannot be traced or do not return floating
    arrays raise a `TypeError`, whatever `on_error` is. Value and gradient come from one pass of
    `jax.vjp`; only arrays cross the boundary.
    """
    packages.check("jax", "from_jax", "JAX")
    if native:
        given = {"executor": executor, "on_error": on_error, "vmap": vmap, "jit": jit}
        usual = {"executor": None, "on_error": "raise", "vmap": True, "jit": True}
        given["value_shape"], usual["value_shape"] = value_shape, None
        for key, value in given.items():
            if value != usual[key]:
                raise TypeError(
                    f"from_jax(native=True) has no {key}: the function becomes operations of the "
                    f"graph, which do not call the host. Leave out {key}, or native."
                )
        from sgtrick._host.native import as_operations

        make = functools.partial(as_operations, event_ndims, has_aux, dtype, name)
        return make if fn is None else make(fn)
    from sgtrick._host.jax import Jax

    options = Options(
        vectorized=vmap, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name,
        value_shape=() if value_shape is None and not jit else value_shape,
    )  # fmt: skip
    return _form(fn, Jax(jit=jit), options)


def _form(fn: Function | None, framework: Framework, options: Options) -> Decorated:
    """The host function, or a decorator if `fn` is None."""

    def derive(fn: Function, name: str) -> Derived:
        return Derived(fn, framework, options.event_ndims, options.has_aux, name)

    if fn is None:
        return lambda fn: HostFunction(Functions(fn), options, derive)
    return HostFunction(Functions(fn), options, derive)
