"""Functions with a custom gradient with respect to some arguments; all others keep autodiff."""

from __future__ import annotations  # signatures that show the names of types

import functools

from sgtrick._arguments import calls, devices
from sgtrick._arguments.returned import as_tuple, checked_value
from sgtrick._arguments.structures import Leaf
from sgtrick._core.covered import select
from sgtrick._core.stopped_point import ValueAtPoint
from sgtrick._tensorflow import autograph
from sgtrick._types import (
    Argnums,
    Args,
    Decorated,
    Device,
    Function,
    Kwargs,
    Tensor,
)


def with_gradient(
    f: Function | None = None,
    grad: Function | None = None,
    *,
    argnums: Argnums = 0,
    batch_ndims: int | None = None,
    device: Device = None,
) -> Decorated:
    """Gives a function the gradient that another function computes.

    The result has the value of `f`. With respect to the arguments `argnums`, its gradient is what
    `grad` returns for the same arguments. All other arguments, and the variables that `f` reads,
    keep their autodiff gradient, so gradients can be partially stopped without any bookkeeping.

    As a function, as a decorator, and as a decorator that gets its rule later:

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> log1pexp = sgtrick.with_gradient(lambda x: tf.math.log(1 + tf.exp(x)), tf.sigmoid)
        >>> @sgtrick.with_gradient(grad=tf.sigmoid)
        ... def log1pexp(x):
        ...     return tf.math.log(1 + tf.exp(x))
        >>> @sgtrick.with_gradient
        ... def log1pexp(x):
        ...     return tf.where(x > 50, x, tf.math.log(1 + tf.exp(x)))
        >>> @log1pexp.defgrad
        ... def _(x):
        ...     return tf.sigmoid(x)
        >>> x = tf.constant([0.0, 100.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = log1pexp(x)
        >>> tape.gradient(y, x).numpy()  # autodiff returns NaN for the second
        array([0.5, 1. ], dtype=float32)

    Args:
        f: The function. It takes any arguments, structures included, and returns one tensor
            `B + R`; for auxiliary results beside it, see `from_value_and_gradient`. On methods,
            `self` does not count as an argument, and `grad` is a method too.
        grad: Called with the arguments of `f`, with defaults filled in and keywords turned into
            positions where possible; arguments that have their default may be missing among its
            parameters. It returns a Jacobian `B + R + D` in the structure of the
            argument, with None for leaves that get no gradient; or a tuple of these if `argnums` is
            a tuple. It is called when a derivative is requested, once in each backward pass and
            never in a forward pass, and sees variables among the arguments with the values that
            they had when `f` was called. It cannot take `variables`: the rule of `custom_vjp` can.
        argnums: The arguments whose gradients `grad` returns: positions or parameter names.
        batch_ndims: As in `custom_gradient`: `len(B)`, or None to infer it.
        device: As in `custom_gradient`; `f` and `grad` run there too.

    Returns:
        The function, or the decorator if `f` is None. Its value is that of `f` to the last bit.
        Higher derivatives are those of `grad`, as TensorFlow differentiates it; in eager execution,
        they trace `grad`, as forward mode does. Mixed ones are right if the derivative with respect
        to `argnums` is taken first. First with respect to another argument, a variable or a tensor
        that `f` closes over, and then with respect to `argnums`, they are an error.

    Raises:
        TypeError: `f` does not return one floating tensor, or is called before it has a `grad`; or
            `grad` takes `variables`.
        ValueError: `argnums` does not name an argument; or, when the gradient is requested, one is
            missing or does not have the structure or shape of its argument.
        LookupError: When a higher derivative is taken and a gradient is connected to nothing with
            respect to which it could be differentiated (it is a constant, to which you can add
            `0 * x`, came from NumPy, or is stopped), or a host call computes it, or `grad` cannot
            be traced; or for a mixed derivative as above. Inside a `tf.function` this is a
            `tf.errors.InvalidArgumentError` when the function runs; around it and in XLA, where
            nothing can raise, the derivative is NaN. In eager execution, one by something that the
            argument was computed from is NaN with a warning.
    """
    options: Kwargs = {"argnums": argnums, "batch_ndims": batch_ndims, "device": device}
    if f is None:
        return functools.partial(with_gradient, grad=grad, **options)
    return calls.as_form(f, lambda f: _WithGradient(f, grad, **options).form, "defgrad")


class _WithGradient:
    """A function, its gradient function, and the options of both."""

    def __init__(
        self,
        function: calls.Callee,
        grad: Function | None,
        argnums: Argnums,
        batch_ndims: int | None,
        device: Device,
    ) -> None:
        self.function, self.argnums, self.batch_ndims = function, argnums, batch_ndims
        self._device = device
        self._grad: calls.Callee | None = None
        self.form = autograph.form(self.__call__)
        self.form.defgrad = self.defgrad  # type: ignore[attr-defined]
        if grad is not None:
            self.defgrad(grad)

    def __call__(self, converted: autograph.Converted, args: Args, kwargs: Kwargs) -> Tensor:
        """The value of a call, whose gradient is what the gradient function returns."""
        name = self.function.name
        if self._grad is None:
            raise TypeError(
                f"{name} has no gradient function. Pass grad= to with_gradient, or define it with "
                f"the decorator @{name}.defgrad."
            )
        with devices.scope(self._device):
            return _Evaluation(self, self._grad, converted, args, kwargs).value()

    def defgrad(self, grad: Function) -> Function:
        """Sets the gradient function; a decorator."""
        calls.check_function(grad, "grad")
        given, name = calls.Callee(calls.unbound(grad)), self.function.name
        if given.takes("variables") and not self.function.takes("variables"):
            raise TypeError(
                f"grad of {name} takes `variables`, but the variables that {name} reads keep their "
                "autodiff gradient. Leave them out; or, to give them other gradients, use "
                "sgtrick.custom_vjp, whose rule takes variables."
            )
        self._grad = given
        return grad


class _Evaluation:
    """The function at a stopped point, and its gradient function at any point."""

    def __init__(
        self,
        form: _WithGradient,
        grad: calls.Callee,
        converted: autograph.Converted,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        function = form.function
        self._form, self._grad = form, grad
        self._covered = select(function, form.argnums, args, kwargs)
        f, self._converted_grad = converted(function.f), converted(grad.f)
        self._frozen = self._covered.read()
        self._at_point = ValueAtPoint.of(function.name, self._covered, f)
        self._y = checked_value(self._at_point.result, function.name, self._covered.call)

    def value(self) -> Tensor:
        """The value, with its gradient."""
        return self._at_point.attach_jacobians(self._y, self._frozen, self.jacobians)

    def jacobians(self, call: calls.Call) -> list[Leaf | None]:
        """What the gradient function returns for the arguments of `call`, checked."""
        function, argnums = self._form.function, self._form.argnums
        defaulted = function.defaulted(self._covered.call)
        gradients = function.for_rule(self._grad, call, defaulted)(self._converted_grad)
        gradients = as_tuple(gradients, argnums, f"grad of {function.name}")
        return self._covered.jacobians(gradients, self._y, self._form.batch_ndims)
