"""Functions that return their value and its gradient together."""

from __future__ import annotations  # signatures that show the names of types

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, devices, structures
from sgtrick._arguments.returned import as_tuple, checked_value, pair_of
from sgtrick._arguments.structures import Leaf
from sgtrick._core import adjoint, known_jacobian, unknown
from sgtrick._core.adjoint import paired
from sgtrick._core.covered import select
from sgtrick._core.guarded import message
from sgtrick._core.stopped_point import ValueAtPoint
from sgtrick._tensorflow import autograph, graphs, ongoing, operation, tapes
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


def from_value_and_gradient(
    fn: Function | None = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    batch_ndims: int | None = None,
    device: Device = None,
) -> Decorated:
    """Makes a function differentiable that returns its value and its gradient together.

    For code that computes both at once, like `tfp.math.value_and_gradient` and
    `jax.value_and_grad`. Other arguments, and variables that `fn` reads, keep their autodiff
    gradient.

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
        fn: Returns `(value, gradient)`: a tensor `B + R`, and a Jacobian `B + R + D` in the
            structure of the argument, or a tuple of these if `argnums` is a tuple. With `has_aux`
            it returns `((value, aux), gradient)`. Without `fn`, `from_value_and_gradient` returns a
            decorator.
        argnums: The arguments that the gradient is with respect to: positions or parameter names.
        has_aux: Whether `fn` also returns auxiliary results, in any structure. Nothing is known of
            their derivatives: each is an error or NaN. If a result counts as a constant, use
            `tf.stop_gradient` of it.
        batch_ndims: As in `custom_gradient`: `len(B)`, or None to infer it.
        device: As in `custom_gradient`; `fn` runs there too.

    Returns:
        A function with the arguments of `fn` that returns the value, or `(value, aux)`, and whose
        gradient is the one that `fn` returned. A second derivative evaluates `fn` once more and
        differentiates the gradient that it returns; in eager execution it also traces `fn`. A
        derivative with respect to another argument, or to what `fn` closes over, that is
        differentiated with respect to `argnums` is an error.

    Raises:
        TypeError: `fn` does not return such a pair (if it returns a function from the upstream
            gradient to the gradients, use `custom_vjp`), or an auxiliary result is a
            `tf.TensorArray`.
        ValueError: `argnums` does not name an argument, or a gradient does not have the structure
            or shape of its argument.
        LookupError: When a higher derivative is taken, as in `with_gradient`, or if TensorFlow
            refuses to differentiate the gradient, or if a variable that `fn` reads has
            been assigned since the call, or if `fn` draws other random numbers; or when an
            auxiliary result is differentiated.
    """
    if fn is None:
        return functools.partial(
            from_value_and_gradient,
            argnums=argnums,
            has_aux=has_aux,
            batch_ndims=batch_ndims,
            device=device,
        )
    calls.check_function(fn, "fn")
    options = argnums, has_aux, batch_ndims, device
    return calls.as_form(fn, lambda fn: _FromValueAndGradient(fn, *options).form)


class _FromValueAndGradient:
    """A function that returns its value and its gradient, and the options."""

    def __init__(
        self,
        function: calls.Callee,
        argnums: Argnums,
        has_aux: bool,
        batch_ndims: int | None,
        device: Device,
    ) -> None:
        self.function, self.argnums, self.batch_ndims = function, argnums, batch_ndims
        self._has_aux, self._device = has_aux, device
        self.form = autograph.form(self.__call__)

    def __call__(self, converted: autograph.Converted, args: Args, kwargs: Kwargs) -> Structure:
        """The value of a call, whose gradient is the one that came with it."""
        with devices.scope(self._device):
            found = _Evaluation(self, converted, args, kwargs)
            return (found.value(), found.auxiliary()) if self._has_aux else found.value()

    def pair(self, returned: Structure) -> tuple[Structure, Structure, Structure]:
        """The value, auxiliary results and gradient that the function returned."""
        name, aux = self.function.name, None
        y, gradient = pair_of(returned, f"{name} must return (value, gradient)")
        if self._has_aux:
            y, aux = pair_of(y, f"{name} must return ((value, aux), gradient)")
        return y, aux, gradient


class _Evaluation:
    """The function at a stopped point, and again where its gradient is differentiated."""

    def __init__(
        self,
        form: _FromValueAndGradient,
        converted: autograph.Converted,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        self._form, self._name = form, form.function.name
        self._f = converted(form.function.f)
        self._covered = select(form.function, form.argnums, args, kwargs)
        self._frozen = self._covered.read()
        with tapes.recording():  # a tape inside the function would find no gradient
            self._at_point = ValueAtPoint.of(self._name, self._covered, self._f)
        y, self._aux, gradient = form.pair(self._at_point.result)
        # Without the derivative: its Jacobians are those of the value that is not embedded.
        self._y = checked_value(y, self._name, self._covered.call)
        self._leaves = self._checked(gradient)
        # The variables that the gradient depends on, as they are now.
        is_differentiated = not tf.executing_eagerly() or tapes.somebody_records()
        self._reads = self._read_variables() if is_differentiated else []

    def value(self) -> Tensor:
        """The value, with its gradient."""
        return self._at_point.attach_jacobians(
            self._y, self._frozen, self.jacobians, self.known_jacobians
        )

    def auxiliary(self) -> Structure:
        """The auxiliary results, whose derivatives are errors."""
        passed, used = self._at_point.passed, self._at_point.used
        inputs = [*self._covered.xs, *passed.xs, *used.values]

        def kept(result: Any) -> Any:
            if isinstance(result, tf.TensorArray) and structures.has_derivatives(result):
                raise TypeError(_ARRAY.format(self._name))
            if not (tf.is_tensor(result) and structures.is_differentiable(result.dtype)):
                return result
            return known_jacobian.auxiliary(self._name, result, inputs, used.has_lists)

        return tf.nest.map_structure(kept, self._aux, expand_composites=True)

    def jacobians(self, call: calls.Call) -> list[Leaf | None]:
        """The Jacobians that the function returns for the arguments of `call`."""
        return self._checked(call(self._f)[1])

    def _checked(self, gradients: Structure) -> list[Leaf | None]:
        if callable(gradients):
            raise TypeError(
                f"{self._name} must return (value, gradient), but returned a function as the "
                "gradient. For a function from the upstream gradient to the gradients of the "
                "arguments, use sgtrick.custom_vjp."
            )
        gradients = as_tuple(gradients, self._form.argnums, self._name)
        return self._covered.jacobians(gradients, self._y, self._form.batch_ndims)

    def known_jacobians(self) -> list[Leaf | None]:
        """The Jacobians that came with the value, whose derivative is that of another call."""
        if operation.is_storing():
            at, passed = self._at_point, self._at_point.passed.xs
            return self.jacobians(at.with_xs(self._frozen, self._covered.xs, passed))
        # In a gradient graph, what was read and returned is out of reach for the graph that
        # differentiates it.
        known = _gradients_in(self._leaves)
        then = [list(map(graphs.here, tensors)) for tensors in (self._reads, known)]
        gxs = iter(
            self._at_point.attach_rule(known, functools.partial(self._pull_of_gradients, *then))
        )
        return [leaf and leaf._replace(gx=next(gxs)) for leaf in self._leaves]

    def _pull_of_gradients(
        self,
        reads: Sequence[Tensor],
        returned: Sequence[Tensor],
        zs: Sequence[Tensor | None],
        xs: Sequence[Tensor],
        passed: Sequence[Tensor],
    ) -> list[Gradient]:
        """The pullback of the gradients, for which the function is evaluated once more.

        Args:
            reads: The values that variables had in the call.
            returned: The gradients that came with the value.
            zs: Upstream gradients of these.
            xs: The point.
            passed: The other arguments.
        """
        points = [tf.identity(x) for x in xs]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(points)
            again = _gradients_in(
                self.jacobians(self._at_point.with_xs(self._frozen, points, passed))
            )
            gxs, given = paired(again, zs)
        found = unknown.unless_refused(
            lambda: list(tape.gradient(gxs, points, given)), xs, given, message(self._name)
        )
        if ongoing.is_probe():
            return found
        is_same = unknown.are_equal(self._read_variables(), reads) if reads else tf.constant(True)
        found = unknown.known_unless(is_same, _ASSIGNED.format(self._name), found, xs, given)
        are_near = [_are_near(*pair) for pair in zip(returned, again, strict=True)]
        is_same = ~is_same | tf.reduce_all(tf.stack(are_near))
        return unknown.known_unless(is_same, _DRAWN.format(self._name), found, xs, given)

    def _read_variables(self) -> list[Tensor]:
        used = self._at_point.used
        with tapes.not_recording():
            trainable = map(tf.convert_to_tensor, used.variables)
            return [*trainable, *map(tapes.value_of, used.fixed)]


def _gradients_in(leaves: Sequence[Leaf | None]) -> list[Tensor]:
    return [leaf.gx for leaf in leaves if leaf is not None]


def _are_near(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors are the same but for rounding, which depends on how they are computed."""
    if tf.executing_eagerly() and np.array_equal(a, b):
        return tf.constant(True)
    difference = tf.abs(tf.where(tf.equal(a, b), tf.zeros_like(a), a - b))
    size = tf.reduce_max(tf.abs(a)) + tf.reduce_max(tf.abs(b))
    return tf.reduce_all(adjoint.are_near(difference, size))


_DRAWN = (
    "The gradient of {0} was differentiated, for which {0} is evaluated again, and at the same "
    "point it returned another gradient: it draws random numbers, or keeps a state. Draw before, "
    "and pass what was drawn to {0} as an argument; or draw by tf.random.stateless_uniform and the "
    "like."
)

_ASSIGNED = (
    "The gradient of {0} was differentiated after a variable was assigned that {0} reads, but the "
    "gradient is that of the call. Assign the variable after the derivative, or pass it to {0} as "
    "an argument."
)

_ARRAY = (
    "{0} returned a tf.TensorArray beside its value (aux). Its derivatives are unknown, and "
    "nothing tells who reads it. Return what is in it, by array.stack()."
)
