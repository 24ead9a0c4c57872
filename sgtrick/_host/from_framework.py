"""PyTorch and JAX functions, whose gradients their frameworks compute, as host engines."""

from __future__ import annotations  # signatures that show the names of types

import functools
from collections.abc import Callable

from sgtrick._host import checks, packages
from sgtrick._host.autodiff import Framework, MappedFunctions
from sgtrick._host.engine import Engine, floating, number
from sgtrick._host.host_function import HostFunction
from sgtrick._host.layout import Space, check_fills, value_space
from sgtrick._types import Argnums, Decorated, DTypeLike, Function, Kwargs, Structure


def from_torch(
    fn: Function | None = None,
    *,
    argnums: Argnums | None = None,
    value_shape: Structure = (),
    event_ndims: int | Structure = 1,
    dtype: DTypeLike = "float64",
    on_error: str | float = "raise",
    name: str | None = None,
    **gone: object,
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
        fn: Takes PyTorch tensors without batch dimensions and returns a tensor or a structure of
            tensors. The tensors are on the CPU; `fn` may move them. A batch is evaluated in one
            call, by `torch.func.vmap`. Without `fn`, a decorator is returned.
        argnums: As in `from_numpy`.
        value_shape: As in `from_numpy`: by default, the value is one number.
        event_ndims: As in `from_numpy`.
        dtype: The floating dtype of the tensors that `fn` gets.
        on_error: As in `from_numpy`.
        name: As in `from_numpy`.
        **gone: Refused, with what to do instead.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for PyTorch. The
        gradient of one number comes with it. For any other value, products with the Jacobian are
        computed when they are requested, as are second derivatives. All are exact.

    Raises:
        ImportError: PyTorch is not installed; the message contains the command that installs it.

    All errors of `from_numpy` apply. Functions that cannot work at any point raise a `TypeError`
    whatever `on_error` is: those that PyTorch cannot map or differentiate, those that do not return
    floating tensors, and those that cut the value off from all arguments (`.item()`, `.detach()`,
    `torch.no_grad()`). What is detached beside other parts is a constant. Value and gradient come
    from one pass of `torch.func.vjp`; only arrays cross the boundary.
    """
    checks.refuse_options("from_torch", gone)
    packages.check("torch", "from_torch", "PyTorch")
    value = value_space(value_shape)
    from sgtrick._host.torch import Torch

    options: Kwargs = {
        "argnums": argnums, "value_shape": value_shape, "event_ndims": event_ndims,
        "dtype": dtype, "on_error": on_error, "name": name,
    }  # fmt: skip
    return _form(from_torch, fn, Torch, options, value)


def from_jax(
    fn: Function | None = None,
    *,
    argnums: Argnums | None = None,
    value_shape: Structure = None,
    event_ndims: int | Structure = 1,
    dtype: DTypeLike = "float64",
    on_error: str | float = "raise",
    native: bool = False,
    name: str | None = None,
    **gone: object,
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
        fn: Takes JAX arrays without batch dimensions and returns an array or a structure of arrays.
            It is compiled by `jax.jit`, once for each shape, and a batch is evaluated in one call,
            by `jax.vmap`. Without `fn`, a decorator is returned.
        argnums: As in `from_numpy`.
        value_shape: As in `from_numpy`. If None, `jax.eval_shape` finds it.
        event_ndims: As in `from_numpy`.
        dtype: The floating dtype of the arrays that `fn` gets. JAX's 64-bit mode is on while `fn`
            runs with a 64-bit argument, integers included; otherwise it is left unchanged.
        native: Whether `fn` becomes operations of the graph, by `jax.experimental.jax2tf`, instead
            of a call of the host. They compile under XLA, run on the device of the graph, can be
            stored in SavedModels, and have all derivatives that JAX can compute. `value_shape` and
            `on_error` do not apply. An argument without batch dimensions is shared by all members.
        on_error: As in `from_numpy`.
        name: As in `from_numpy`.
        **gone: Refused, with what to do instead.

    Returns:
        What `from_numpy` returns. Leaves that are not floating are constants for JAX. The gradient
        of one number comes with it. For any other value, products with the Jacobian are computed
        when they are requested, as are second derivatives (forward over reverse). All are exact. If
        `native`, a plain function, without counters.

    Raises:
        ImportError: JAX is not installed; the message contains the command that installs it. Or, if
            `native`, it has no `jax2tf`.
        TypeError: `value_shape` or `on_error` was given with `native`.

    All errors of `from_numpy` apply. Functions that JAX cannot trace, map or differentiate, or that
    do not return floating arrays, raise a `TypeError` whatever `on_error` is. Value and gradient
    come from one pass of `jax.vjp`; only arrays cross the boundary.
    """
    checks.refuse_options("from_jax", gone)
    packages.check("jax", "from_jax", "JAX")
    if native:
        for key, is_given in (
            ("value_shape", value_shape is not None),
            ("on_error", on_error != "raise"),
        ):
            if is_given:
                raise TypeError(
                    f"from_jax(native=True) has no {key}: the function becomes operations of the "
                    f"graph, which do not call the host. Leave out {key}, or native."
                )
        from sgtrick._host.native import as_operations

        make = functools.partial(as_operations, event_ndims, argnums, dtype, name)
        return make if fn is None else make(fn)
    value = None if value_shape is None else value_space(value_shape)
    from sgtrick._host.jax import Jax

    options: Kwargs = {
        "argnums": argnums, "value_shape": value_shape, "event_ndims": event_ndims,
        "dtype": dtype, "on_error": on_error, "name": name,
    }  # fmt: skip
    return _form(from_jax, fn, Jax, options, value)


def _form(
    form: Callable[..., Decorated],
    fn: Function | None,
    framework: Callable[[], Framework],
    options: Kwargs,
    value: Space | None,
) -> Decorated:
    """The host function, or a decorator if `fn` is None."""
    if fn is None:
        return functools.partial(form, **options)
    dtype, instead = floating(options["dtype"]), number(options["on_error"])
    if value is not None:
        check_fills(value, instead)

    def engine_of(name: str) -> Engine:
        takes, argnums = options["event_ndims"], options["argnums"]
        mapped = MappedFunctions(fn, framework(), name, instead)
        return Engine(
            name, takes, argnums, value or mapped.value_space, mapped.functions, dtype,
            vectorized=True, broadcasts=True, instead=instead,
        )  # fmt: skip

    return HostFunction(fn, form, options, engine_of)
