"""Functions with gradients of their own; what the gradients are not by keeps autodiff."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick import _arguments, _devices, _leaves, _override, _trick, _variables


def with_gradient(
    f: Callable[..., Any] | None = None,
    grad: Callable[..., Any] | None = None,
    *,
    argnums: Any = 0,
    order: int = 1,
    batch_ndims: int | None = None,
    device: Any = None,
) -> Any:
    """Gives a function the gradient that another function computes.

    The result has the value of `f`. By the arguments `argnums` its gradient is what `grad` returns
    for the same call; by all other arguments, and by the variables that `f` reads, it is what
    autodiff finds in `f`. So a gradient can be stopped in part, without any bookkeeping.

    As a function, as a decorator, and as a decorator whose rule is given later:

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
        >>> tape.gradient(y, x).numpy()  # autodiff has NaN for the second
        array([0.5, 1. ], dtype=float32)

    Args:
        f: The function, of any arguments, structures included, and one tensor `B + R` as its value.
            On methods, `argnums` does not count `self`, and `grad` is called as a method too.
        grad: Called with the arguments of `f`, defaults filled in and keywords as positions where
            `f` has them there. Returns the gradient for an int or name `argnums`, a tuple of them
            for a tuple: a Jacobian `B + R + D` in the structure of its argument, with None where
            there is none. With order 1 it is called once a backward pass in eager, with the values
            that variables among the arguments had when `f` was called, and once while tracing. A
            `grad` that takes a keyword `variables` is given the trainable variables that `f` read
            and that are not among its arguments, each once, in the order read, and returns
            `(gradients, variable_gradients)`: for each variable the Jacobian, of the shape of the
            value followed by that of the variable, for a scalar value also as `tf.IndexedSlices`.
            That is then exactly their gradient. What else `f` closes over has none then.
        argnums: The arguments whose gradients `grad` returns: positions or parameter names.
        order: Through which order derivatives by these arguments are exact. 1: `grad` is stopped,
            and second derivatives by these arguments are unconnected (and lack the part with the
            Hessian in nonlinear functions of the result). `k`: `grad` is called at
            `ceil(k / 2)` points and kept differentiable, mixed derivatives with other arguments
            included; then the first backward pass differentiates it too.
        batch_ndims: As in `custom_gradient`: `len(B)`, where it is not to be inferred.
        device: As in `custom_gradient`; `f` and `grad` run there too.

    Returns:
        The function, or the decorator if `f` is None. Under every transformation it has the
        derivatives of ::

            f(s, y) + sum_i w_i <grad(s + c_i z, y), z>,    s = stop(x), z = x - s

        with the Gauss-Legendre nodes `c_i` and weights `w_i` on [0, 1]: the quadrature of the line
        integral of the gradient from `s` to `x`. Order 1 has the one node 0, where `grad` is
        stopped.

    Raises:
        TypeError: `f` does not return one floating tensor, or there is no `grad` when called.
        ValueError: `argnums` names no argument, `order` is no positive int, or above 1 for a `grad`
            that takes `variables`, or a gradient is missing or does not have the structure or shape
            of its argument or variable; in eager with order 1 when the gradient is asked for.
    """
    options = {"argnums": argnums, "batch_ndims": batch_ndims, "device": device}
    if f is None:
        return functools.partial(with_gradient, grad=grad, order=order, **options)
    return WithGradient(f, grad, Order(order), **options)


class WithGradient:
    """A function with a gradient of its own; made by `with_gradient`."""

    def __init__(
        self,
        f: Callable[..., Any],
        grad: Callable[..., Any] | None,
        order: "Order",
        argnums: Any,
        batch_ndims: int | None,
        device: Any,
    ) -> None:
        _insist_on_function(f, "f")
        if grad is not None:
            _insist_on_function(grad, "grad")
        _arguments.imitate(self, f)
        self._f, self._grad = _arguments.Function(f), grad and _arguments.Function(grad)
        self._read, self._order = _variables.Reader(), order
        self._argnums, self._batch_ndims, self._device = argnums, batch_ndims, device

    def defgrad(self, grad: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the gradient function; a decorator."""
        _insist_on_function(grad, "grad")
        self._grad = _arguments.Function(grad)
        return grad

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds `f` and `grad` as methods."""
        if instance is None:
            return self
        f = _arguments.bound(self._f.f, instance, owner)
        grad = self._grad and _arguments.bound(self._grad.f, instance, owner)
        return WithGradient(f, grad, self._order, self._argnums, self._batch_ndims, self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value of `f`, with the gradient that `grad` returns."""
        name = self._f.name
        if self._grad is None:
            raise TypeError(
                f"{name} has no gradient function. Pass grad= to with_gradient, or define it with "
                f"the decorator @{name}.defgrad."
            )
        grad = self._grad.f
        order = self._order.now()
        with _devices.scope(self._device):
            point = _point(self._f, self._argnums, args, kwargs)
            if self._grad.takes("variables") and not self._f.takes("variables"):
                return self._with_variables(point, order)
            y = _value(point.stopped(self._f), name)

            def jacobians(call: _arguments.Call) -> list[Any]:
                with self._order.inside_rule(order):
                    gradients = call(grad)
                return self._jacobians(point, gradients, y)

            if order == 0:
                return self._order.ended(y, point.xs, name)
            if order == 1:
                call = point.read()
                return _trick.embed(y, point.xs, lambda: jacobians(call))
            z = [_trick.zero(x, guard=True) for x in point.xs]
            return _trick.with_linear(
                y,
                [
                    weight * term
                    for call, weight in nodes(point, z, order)
                    for term in _trick.linear(jacobians(call), z, y.dtype)
                ],
            )

    def _with_variables(self, point: _arguments.Point, order: int) -> Any:
        """The call where `grad` also returns the gradients by the variables that `f` reads.

        All derivatives of `f` go through one pullback, since there is no other way to stop the
        variables and nothing else.
        """
        assert self._grad is not None
        if order > 1:
            raise ValueError(
                f"order={order} needs the gradient of {self._f.name} at other points than the "
                "variables have. Pass the variables as arguments and name these in argnums, or "
                "leave order at 1."
            )
        grad, others = self._grad.f, point.others()
        at = point.read()

        def call() -> Any:
            return others.at(others.xs)(self._f)

        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(others.xs)
            y, variables = self._read(call, point.call.leaves())
        y = _value(y, self._f.name)
        reads = [tf.convert_to_tensor(v) for v in variables]

        def pull(upstream: Any) -> list[Any]:
            gradients, by_variables = _pair(
                grad(*at.args, **at.kwargs, variables=variables),
                f"The gradient function of {self._f.name} takes variables, so it must return "
                "(gradients, variable_gradients)",
            )
            leaves = self._jacobians(point, gradients, y)
            return [
                *(leaf and _trick.transpose(leaf, upstream) for leaf in leaves),
                *tape.gradient(y, others.xs, upstream),
                *_variables.pull(by_variables, variables, reads, y, upstream, self._f.name),
            ]

        (h,) = _override.forward()([y], [*point.xs, *others.xs, *reads], pull)
        return h

    def _jacobians(self, point: _arguments.Point, gradients: Any, y: Any) -> list[Any]:
        """What `grad` returned for the arguments."""
        what = f"the gradient function of {self._f.name}"
        gradients = _as_tuple(gradients, self._argnums, what)
        return point.jacobians(gradients, y, self._batch_ndims)


def from_value_and_gradient(
    fn: Callable[..., Any],
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    batch_ndims: int | None = None,
    device: Any = None,
) -> Callable[..., Any]:
    """Embeds a function that returns its value and its gradient together.

    For engines that compute both at once, in the manner of `tfp.math.value_and_gradient` and
    `jax.value_and_grad`. What other arguments and variables contribute to the value keeps autodiff.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def normal(x, scale):
        ...     return -0.5 * tf.reduce_sum((x / scale) ** 2, -1), -x / scale**2
        >>> log_prob = sgtrick.from_value_and_gradient(normal)
        >>> x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = log_prob(x, 2.0)
        >>> tape.gradient(y, x).numpy()
        array([[-0.25, -0.5 ],
               [-0.75, -1.  ]], dtype=float32)

    Args:
        fn: Returns `(value, gradient)`: a tensor `B + R`, and for an int or name `argnums` a
            Jacobian `B + R + D` in the structure of the argument, for a tuple a tuple of these.
            With `has_aux` it returns `((value, aux), gradient)`.
        argnums: The arguments by which the gradient is: positions or parameter names.
        has_aux: Whether there is something else beside the value.
        batch_ndims: As in `custom_gradient`: `len(B)`, where it is not to be inferred.
        device: As in `custom_gradient`; `fn` runs there too.

    Returns:
        A function with the arguments of `fn` that returns the value, or `(value, aux)`, with the
        gradient, of first order: `value + <stop(gradient), x - stop(x)>`, where `fn` is given
        `stop(x)`.

    Raises:
        TypeError: `fn` returns something else; a function in the gradient's place belongs to
            `custom_vjp`.
        ValueError: `argnums` names no argument, or the gradient does not have the structure or
            shape of its argument.
    """
    f = _arguments.Function(fn)

    def h(*args: Any, **kwargs: Any) -> Any:
        with _devices.scope(device):
            point = _point(f, argnums, args, kwargs)
            y, gradients = _pair(point.stopped(f), f"{f.name} must return (value, gradient)")
            if has_aux:
                y, aux = _pair(y, f"{f.name} must return ((value, aux), gradient)")
            y = _value(y, f.name)
            if callable(gradients):
                raise TypeError(
                    f"{f.name} returned a function in the place of the gradient. A value with the "
                    "function that pulls back is the protocol of sgtrick.custom_vjp."
                )
            gradients = _as_tuple(gradients, argnums, f.name)
            leaves = point.jacobians(gradients, y, batch_ndims)
            y = _trick.embed(y, point.xs, lambda: leaves)
            return (y, aux) if has_aux else y

    return _arguments.imitate(h, fn)  # type: ignore[no-any-return]


def _point(
    f: _arguments.Function, argnums: Any, args: Any, kwargs: dict[str, Any]
) -> _arguments.Point:
    point = f.point(argnums, args, kwargs)
    if not point.xs:
        point.insist_on_numbers(f.name)
    return point


def nodes(point: _arguments.Point, z: list[Any], order: int) -> list[tuple[_arguments.Call, float]]:
    """The calls at `stop(x) + c z` and their weights, which make derivatives exact through `order`.

    The sum over them is the Gauss-Legendre quadrature of the line integral of the gradient from
    `stop(x)` to `x`. With `n` nodes its error is `O(z^(2 n + 1))`, and its derivatives through
    order `2 n` at `z = 0` are those of the integral. Order 1 takes the one node `c = 0`, where
    nothing but `z` is differentiated.
    """
    if order == 1:
        return [(point.stopped, 1.0)]
    c, w = np.polynomial.legendre.leggauss((order + 1) // 2)
    s = [tf.stop_gradient(x) for x in point.xs]
    return [
        (
            point.at(
                [
                    s_i + tf.cast((c_i + 1) / 2, s_i.dtype) * z_i
                    for s_i, z_i in zip(s, z, strict=True)
                ]
            ),
            w_i / 2,
        )
        for c_i, w_i in zip(c, w, strict=True)
    ]


class Order:
    """The order through which a rule has to be exact, one less for calls inside the rule itself.

    A rule may call the function that it belongs to, as that of `exp` does. A rule that is to be
    differentiated `k - 1` times needs such calls to be exact through order `k - 1`, and order 0 is
    the value alone, which ends the recursion.
    """

    def __init__(self, order: Any) -> None:
        if isinstance(order, bool) or not isinstance(order, int) or order < 1:
            raise ValueError(f"order must be a positive int, got {order!r}.")
        self._order, self._inside = order, threading.local()

    def __deepcopy__(self, memo: Any) -> "Order":
        return self  # a copy of the function calls itself by its name, which is that of this one

    def now(self) -> int:
        """The order that the present call is to have."""
        return self._order - getattr(self._inside, "depth", 0)

    def ended(self, y: Any, xs: list[Any], name: str) -> Any:
        """A value of order 0: a rule that differentiates such a call would miss something."""
        if not xs or not _leaves.is_differentiable(y.dtype):
            return y
        message = (
            f"The rule of {name} differentiates a call of {name}, which inside of its own rule has "
            f"one order less, and order={self._order} leaves none. State order={self._order + 1} "
            "or more, one for each call within a call; or write the derivative out."
        )
        return _trick.refusing(y, xs, message)

    @contextlib.contextmanager
    def inside_rule(self, left: int) -> Iterator[None]:
        """While the rule runs for a call of order `left`."""
        before = getattr(self._inside, "depth", 0)
        self._inside.depth = self._order - left + 1
        try:
            yield
        finally:
            self._inside.depth = before


def _insist_on_function(f: Any, name: str) -> None:
    if not callable(f) and not hasattr(f, "__get__"):
        raise TypeError(f"{name} must be a function, got {type(f).__name__}: {f!r}.")


def _value(y: Any, name: str) -> Any:
    if isinstance(y, (tuple, list)):  # which would be stacked
        raise TypeError(
            f"{name} must return one tensor, got a {type(y).__name__} of {len(y)}. For several "
            "outputs there are sgtrick.custom_jvp and sgtrick.custom_vjp."
        )
    y = _leaves.to_tensor(y, f"what {name} returns")
    if not _leaves.is_differentiable(y.dtype):
        raise TypeError(
            f"{name} returned dtype {y.dtype.name}, which has no derivatives. Cast it to a "
            "floating dtype."
        )
    return y


def _pair(result: Any, what: str) -> Any:
    if not (isinstance(result, (list, tuple)) and len(result) == 2):
        raise TypeError(f"{what}, got {type(result).__name__}: {result!r}.")
    return result


def _as_tuple(gradients: Any, argnums: Any, name: str) -> Any:
    """One gradient for one argument, a tuple of them for a tuple `argnums`."""
    if not isinstance(argnums, (list, tuple)):
        return (gradients,)
    if not (isinstance(gradients, (list, tuple)) and len(gradients) == len(argnums)):
        raise ValueError(
            f"{name} must return a tuple of {len(argnums)} gradients, one for each of "
            f"argnums={argnums!r}, got {type(gradients).__name__}"
            + (f" of {len(gradients)}." if isinstance(gradients, (list, tuple)) else ".")
        )
    return gradients
