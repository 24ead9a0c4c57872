"""Functions with gradients of their own; what the gradients are not by keeps autodiff."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick._core import ancestry, calls, devices, embedding, lost, loud, mixed, structures
from sgtrick._core._tensorflow import autograph, tapes
from sgtrick._core.closures import Closure
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.structures import Leaf
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Argnums, Args, Device, Function, Gradient, Kwargs, Structure, Tensor
from sgtrick._core.variables import Reader, pull_variables


def with_gradient(
    f: Function | None = None,
    grad: Function | None = None,
    *,
    argnums: Argnums = 0,
    batch_ndims: int | None = None,
    device: Device = None,
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
            there is none. It is called when a derivative is asked for, once a backward pass, with
            the values that variables among the arguments had when `f` was called, and never in a
            forward pass. A `grad` that takes a keyword `variables` is given the trainable variables
            that `f` read and that are not among its arguments, each once, in the order read, and
            returns `(gradients, variable_gradients)`: for each variable the Jacobian, of the shape
            of the value followed by that of the variable, for a scalar value also as
            `tf.IndexedSlices`. That is then exactly their gradient. What else `f` closes over has
            none then.
        argnums: The arguments whose gradients `grad` returns: positions or parameter names.
        batch_ndims: As in `custom_gradient`: `len(B)`, where it is not to be inferred.
        device: As in `custom_gradient`; `f` and `grad` run there too.

    Returns:
        The function, or the decorator if `f` is None. Its value is that of `f` to the last bit.
        Derivatives of higher order are those of `grad`, mixed ones with other arguments included.

    Raises:
        TypeError: `f` does not return one floating tensor, or there is no `grad` when called.
        ValueError: `argnums` names no argument, or, when the gradient is asked for, one is missing
            or does not have the structure or shape of its argument or variable.
        LookupError: When a derivative of higher order is taken and a gradient is not connected to
            the point: it came from the host or NumPy, was stopped, or is a constant (to which
            `0 * x` is to be added). Inside of a `tf.function` this is a
            `tf.errors.InvalidArgumentError` when it is run, and around it and in XLA, which cannot
            raise, the derivative is NaN.
    """
    options: dict[str, Any] = {"argnums": argnums, "batch_ndims": batch_ndims, "device": device}
    if f is None:
        return functools.partial(with_gradient, grad=grad, **options)
    _check_function(f, "f")
    return calls.as_form(f, lambda f: _with_gradient(f, grad, **options), "defgrad")


def _with_gradient(
    f: Function, grad: Any, argnums: Argnums, batch_ndims: int | None, device: Device
) -> Function:
    function = calls.Callee(f)
    read = Reader()
    rule: calls.Callee | None = None

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Any:
        if rule is None:
            raise TypeError(
                f"{function.name} has no gradient function. Pass grad= to with_gradient, or define "
                f"it with the decorator @{function.name}.defgrad."
            )
        with devices.scope(device):
            point = _point(function, argnums, args, kwargs)
            f, grad = converted(function.f), converted(rule.f)

            def jacobians(gradients: Structure, y: Tensor) -> list[Leaf | None]:
                what = f"the gradient function of {function.name}"
                gradients = _as_tuple(gradients, argnums, what)
                return point.jacobians(gradients, y, batch_ndims)

            if rule.takes("variables") and not function.takes("variables"):
                return _with_variables(function.name, point, f, grad, jacobians, read)
            others = point.others()
            closure = Closure(lambda: point.stopped(f), others.xs)
            y = _checked_value(closure.result, function.name)
            at, call = point.read(), _Call(function.name, point, others, closure)

            def evaluated(call: calls.Call) -> list[Leaf | None]:
                return jacobians(call(grad), y)

            return call.embed(y, at, lambda: evaluated(at), evaluated)

    form = autograph.form(call)

    def defgrad(grad: Function) -> Function:
        """Sets the gradient function; a decorator."""
        nonlocal rule
        _check_function(grad, "grad")
        rule = calls.Callee(calls.unbound(grad))
        return grad

    if grad is not None:
        defgrad(grad)
    form.defgrad = defgrad  # type: ignore[attr-defined]
    return form


class _Call(NamedTuple):
    """A call whose value was computed at a fixed point.

    Attributes:
        name: What errors call the function.
        point: The arguments by which there are gradients.
        others: The others.
        closure: The call itself.
    """

    name: str
    point: calls.Selection
    others: calls.Selection
    closure: Closure

    def embed(
        self,
        y: Tensor,
        at: calls.Call,
        known: Callable[[], list[Any]],
        evaluated: Callable[[calls.Call], list[Any]],
    ) -> Tensor:
        """The value with its gradients; what else it depends on keeps autodiff.

        Args:
            y: The value.
            at: The call, read when it was made.
            known: The gradients of this call.
            evaluated: Those of another call.
        """
        xs = self.point.xs
        if not xs:
            return y
        rule = embedding.of_jacobians(self.name, y, known)
        if not tf.executing_eagerly() and not ancestry.has_sources(
            y, self.point.stopped_xs, self.closure.before
        ):
            # TensorFlow would look for the derivatives of all of f, for nobody.
            return keep([y], xs, rule)[0]
        others = self.closure.others([y], self.point.stopped_xs)
        if others is None:
            return keep([y], [y, *xs], embedding.beside(rule)._replace(sources=xs))[0]

        def gradients(
            us: Sequence[Tensor], xs: Sequence[Tensor], passed: Sequence[Tensor]
        ) -> list[Gradient]:
            leaves = evaluated(self.at(at, xs, passed))
            return [leaf and TENSORFLOW.transpose(leaf, us[0]) for leaf in leaves]

        moving = mixed.ByPoint(self.name, gradients, xs, others)
        return mixed.keep_own(moving, [y], rule._replace(sources=xs))[0]

    def at(self, call: calls.Call, xs: Sequence[Tensor], passed: Sequence[Tensor]) -> calls.Call:
        """A call at another point, and with others in their place."""
        return self.others.on(self.point.on(call, xs), passed)


def _with_variables(
    name: str,
    point: calls.Selection,
    f: Function,
    grad: Function,
    jacobians: Callable[[Any, Any], list[Any]],
    read: Reader,
) -> Any:
    """The call where `grad` also returns the gradients by the variables that `f` reads.

    All derivatives of `f` go through one pullback, since there is no other way to stop the
    variables and nothing else.
    """
    others, at = point.others(), point.read()
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(others.xs)
        y, variables = read(lambda: others.at(others.xs)(f), point.call.leaves())
    y = _checked_value(y, name)
    reads = [tf.convert_to_tensor(v) for v in variables]

    def pull(upstream: Tensor) -> list[Gradient]:
        gradients, by_variables = _pair(
            grad(*at.args, **at.kwargs, variables=variables),
            f"The gradient function of {name} takes variables, so it must return "
            "(gradients, variable_gradients)",
        )
        return [
            *(leaf and TENSORFLOW.transpose(leaf, upstream) for leaf in jacobians(gradients, y)),
            *tape.gradient(y, others.xs, upstream),
            *pull_variables(by_variables, variables, reads, y, upstream, name),
        ]

    xs = [*point.xs, *others.xs, *reads]
    return keep([y], xs, Rule(name, pull, sources=[*xs, *variables]))[0]


def from_value_and_gradient(
    fn: Function | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    batch_ndims: int | None = None,
    device: Device = None,
) -> Any:
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
            With `has_aux` it returns `((value, aux), gradient)`. Without `fn`,
            `from_value_and_gradient` returns a decorator.
        argnums: The arguments by which the gradient is: positions or parameter names.
        has_aux: Whether there is something else beside the value.
        batch_ndims: As in `custom_gradient`: `len(B)`, where it is not to be inferred.
        device: As in `custom_gradient`; `fn` runs there too.

    Returns:
        A function with the arguments of `fn` that returns the value, or `(value, aux)`, with the
        gradient. A second derivative evaluates `fn` once more and differentiates its gradient.

    Raises:
        TypeError: `fn` returns something else; a function in the gradient's place belongs to
            `custom_vjp`.
        ValueError: `argnums` names no argument, or the gradient does not have the structure or
            shape of its argument.
        LookupError: When a second derivative is taken of a gradient that TensorFlow cannot
            differentiate, as in `with_gradient`.
    """
    if fn is None:
        return functools.partial(
            from_value_and_gradient,
            argnums=argnums,
            has_aux=has_aux,
            batch_ndims=batch_ndims,
            device=device,
        )
    _check_function(fn, "fn")
    return calls.as_form(
        fn, lambda fn: _from_value_and_gradient(fn, argnums, has_aux, batch_ndims, device)
    )


def _from_value_and_gradient(
    fn: Function, argnums: Argnums, has_aux: bool, batch_ndims: int | None, device: Device
) -> Function:
    function = calls.Callee(fn)

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Any:
        name, f = function.name, converted(function.f)

        def jacobians(gradients: Structure, y: Tensor) -> list[Leaf | None]:
            if callable(gradients):
                raise TypeError(
                    f"{name} returned a function in the place of the gradient. A value with the "
                    "function that pulls back is the protocol of sgtrick.custom_vjp."
                )
            return point.jacobians(_as_tuple(gradients, argnums, name), y, batch_ndims)

        with devices.scope(device):
            point = _point(function, argnums, args, kwargs)
            others = point.others()
            # Without a record, a tape in it would say that there is no gradient.
            run = functools.partial(tapes.unsuspended, lambda: point.stopped(f))
            closure = Closure(run, others.xs)
            y, gradients = _pair(closure.result, f"{name} must return (value, gradient)")
            if has_aux:
                y, aux = _pair(y, f"{name} must return ((value, aux), gradient)")
            y = _checked_value(y, name)
            at, call = point.read(), _Call(name, point, others, closure)

            def evaluated(call: calls.Call) -> list[Leaf | None]:
                return jacobians(call(f)[1], y)

            known = _differentiable(call, at, jacobians(gradients, y), evaluated)
            y = call.embed(y, at, known, evaluated)
            return (y, aux) if has_aux else y

    return autograph.form(call)


def _differentiable(
    call: _Call,
    at: calls.Call,
    leaves: list[Any],
    evaluated: Callable[[calls.Call], list[Any]],
) -> Callable[[], list[Any]]:
    """The gradients that came with the value, whose derivatives are those of another evaluation."""
    known = [leaf.gx for leaf in leaves if leaf is not None]
    others = call.closure.others(known, call.point.stopped_xs) or mixed.Others(())

    def gradients(
        zs: Sequence[Tensor], xs: Sequence[Tensor], passed: Sequence[Tensor]
    ) -> list[Gradient]:
        points = [tf.identity(x) for x in xs]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(points)
            again = evaluated(call.at(at, points, passed))
        gxs = [leaf.gx for leaf in again if leaf is not None]
        found = tape.gradient(gxs, points, output_gradients=list(zs))
        if all(g is None for g in found):
            return [loud.failure(x, lost.message(call.name), zs) for x in xs]
        return [tf.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)]

    def jacobians() -> list[Leaf | None]:
        moving = mixed.ByPoint(call.name, gradients, call.point.xs, others)
        gxs = iter(mixed.keep_own(moving, known))
        return [leaf and leaf._replace(gx=next(gxs)) for leaf in leaves]

    return jacobians


def _point(f: calls.Callee, argnums: Argnums, args: Args, kwargs: Kwargs) -> calls.Selection:
    point = f.select(argnums, args, kwargs)
    if not point.xs:
        point.check_numbers(f.name)
    return point


def _check_function(f: Any, name: str) -> None:
    if not callable(f) and not hasattr(f, "__get__"):
        raise TypeError(f"{name} must be a function, got {type(f).__name__}: {f!r}.")


def _checked_value(y: Tensor, name: str) -> Tensor:
    if isinstance(y, (tuple, list)):  # which would be stacked
        raise TypeError(
            f"{name} must return one tensor, got a {type(y).__name__} of {len(y)}. For several "
            "outputs there are sgtrick.custom_jvp and sgtrick.custom_vjp."
        )
    y = structures.to_tensor(y, f"what {name} returns")
    if not structures.is_differentiable(y.dtype):
        raise TypeError(
            f"{name} returned dtype {y.dtype.name}, which has no derivatives. Cast it to a "
            "floating dtype."
        )
    return y


def _pair(result: Structure, what: str) -> Any:
    if not structures.is_pair(result):
        raise TypeError(f"{what}, got {type(result).__name__}: {result!r}.")
    return result


def _as_tuple(gradients: Structure, argnums: Argnums, name: str) -> Any:
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
