"""Functions with a custom gradient with respect to some arguments; all others keep autodiff."""

from __future__ import annotations  # signatures that show the names of types

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._arguments import calls, devices, structures
from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._arguments.variables import besides, pull_variables
from sgtrick._core import mixed, partial
from sgtrick._core.guard import unknown_by_closure
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.selection import Selection
from sgtrick._core.value_at_point import (
    ValueAtPoint,
    as_tuple,
    checked_value,
    pair_of,
    select,
)
from sgtrick._tensorflow import autograph, tracing, uses
from sgtrick._types import (
    Argnums,
    Args,
    Decorated,
    Device,
    Function,
    Gradient,
    Kwargs,
    Structure,
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
            `B + R`. On methods, `self` does not count as an argument, and `grad` is a method too.
        grad: Called with the arguments of `f`, with defaults filled in and keywords turned into
            positions where possible. It returns a Jacobian `B + R + D` in the structure of the
            argument, with None for leaves that get no gradient; or a tuple of these if `argnums` is
            a tuple. It is called when a derivative is requested, once in each backward pass and
            never in a forward pass, and sees variables among the arguments with the values that
            they had when `f` was called. If `grad` takes a keyword `variables`, it receives the
            trainable variables that `f` read other than as its arguments, each once, in the order
            in which they were created, and returns `(gradients, variable_gradients)`: for each
            variable a Jacobian, of the shape of the value followed by that of the variable. The
            variables then get exactly these gradients. For other tensors that `f` closes over, what
            `custom_vjp` says holds then.
        argnums: The arguments whose gradients `grad` returns: positions or parameter names.
        batch_ndims: As in `custom_gradient`: `len(B)`, or None to infer it.
        device: As in `custom_gradient`; `f` and `grad` run there too.

    Returns:
        The function, or the decorator if `f` is None. Its value is that of `f` to the last bit.
        Higher derivatives are those of `grad`, as TensorFlow differentiates it; in eager execution,
        they trace `grad`. Mixed second derivatives, with respect to the point and to other
        arguments, variables and tensors that `f` closes over, are right; mixed derivatives of
        higher order are right or an error.

    Raises:
        TypeError: `f` does not return one floating tensor, or is called before it has a `grad`.
        ValueError: `argnums` does not name an argument; or, when the gradient is requested, one is
            missing or does not have the structure or shape of its argument or variable; or, when
            called in a graph, `grad` takes variables and `f` closes over a `tf.TensorArray`.
        LookupError: When a higher derivative is taken and a gradient is connected to nothing with
            respect to which it could be differentiated (it is a constant, to which you can add
            `0 * x`, came from NumPy, or is stopped), or a host call computes it, or `grad` cannot
            be traced. Inside a `tf.function` this is a `tf.errors.InvalidArgumentError` when the
            function runs; around it and in XLA, where nothing can raise, the derivative is NaN. In
            eager execution, one by something that the argument was computed from is NaN with a
            warning.
    """
    options: Kwargs = {"argnums": argnums, "batch_ndims": batch_ndims, "device": device}
    if f is None:
        return functools.partial(with_gradient, grad=grad, **options)
    return calls.as_form(f, lambda f: _with_gradient(f, grad, **options), "defgrad")


def _with_gradient(
    function: calls.Callee,
    grad: Function | None,
    argnums: Argnums,
    batch_ndims: int | None,
    device: Device,
) -> Function:
    rule: calls.Callee | None = None

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Tensor:
        if rule is None:
            raise TypeError(
                f"{function.name} has no gradient function. Pass grad= to with_gradient, or define "
                f"it with the decorator @{function.name}.defgrad."
            )
        with devices.scope(device):
            point = select(function, argnums, args, kwargs)
            f, grad = converted(function.f), converted(rule.f)

            def jacobians(gradients: Structure, y: Tensor) -> list[Leaf | None]:
                what = f"grad of {function.name}"
                gradients = as_tuple(gradients, argnums, what)
                return point.jacobians(gradients, y, batch_ndims)

            if rule.takes("variables") and not function.takes("variables"):
                return _with_variables(function.name, point, f, grad, jacobians)
            at = point.read()
            value = ValueAtPoint.of(function.name, point, f)
            y = checked_value(value.result, function.name, point.call)

            def evaluated(call: calls.Call) -> list[Leaf | None]:
                return jacobians(call(grad), y)

            return value.embed(y, at, evaluated)

    form = autograph.form(call)

    def defgrad(grad: Function) -> Function:
        """Sets the gradient function; a decorator."""
        nonlocal rule
        calls.check_function(grad, "grad")
        rule = calls.Callee(calls.unbound(grad))
        return grad

    if grad is not None:
        defgrad(grad)
    form.defgrad = defgrad  # type: ignore[attr-defined]
    return form


def _with_variables(
    name: str,
    point: Selection,
    f: Function,
    grad: Function,
    jacobians: Callable[[Structure, Tensor], list[Leaf | None]],
) -> Tensor:
    """The call where `grad` also returns the gradients with respect to the variables.

    The variables count as part of the point. The other arguments keep the derivatives of `f`, by a
    pullback, since there is no other way to stop the variables alone.
    """
    others, at = point.others(), point.read()
    call = others.at(others.xs)
    passed = [*others.xs, *point.stopped_xs]
    with tracing.differentiated(others.xs) as pull_back:
        y, used = uses.call(lambda: call(f), passed)
    y = checked_value(y, name, point.call)
    leaves = [leaf for leaf in call.leaves if structures.is_dense(leaf)]
    variables = besides(used.variables, leaves)
    values = [structures.as_tensor(v) for v in variables]
    by_others = Rule(name, lambda u, y=y: pull_back([y], [u]))
    (y,) = keep([tf.stop_gradient(y)], others.xs, by_others)

    def pulled(call: calls.Call, upstream: Tensor) -> list[Gradient]:
        gradients, by_variables = pair_of(
            call(grad, variables=variables),
            f"grad of {name} takes variables, so it must return (gradients, variable_gradients)",
        )
        leaves = jacobians(gradients, y)
        return [
            *(leaf and TENSORFLOW.transpose(leaf, upstream) for leaf in leaves),
            *pull_variables(by_variables, variables, values, y, upstream, name),
        ]

    def gradients(
        us: Sequence[Tensor | None], xs: Sequence[Tensor], passed: Sequence[Tensor]
    ) -> list[Gradient]:
        assert us[0] is not None
        return pulled(others.at(passed, point.at(xs[: len(point.xs)], at)), us[0])

    (kept,) = partial.embed(
        name,
        [y],
        [*point.xs, *values],
        mixed.Uncovered(others.xs),
        gradients,
        known=lambda u: pulled(at, u),
        stopped=len(point.xs),
    )
    (kept,) = unknown_by_closure(name, "grad", [kept], used, point.tensors)
    return kept
