"""Functions that return their value and its gradient together."""

from __future__ import annotations  # signatures that show the names of types

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, devices, structures
from sgtrick._arguments.returned import as_tuple, checked_value, pair_of
from sgtrick._arguments.structures import Leaf
from sgtrick._core import adjoint, embedding, unknown
from sgtrick._core.adjoint import paired
from sgtrick._core.guard import message
from sgtrick._core.point import ValueAtPoint, select
from sgtrick._tensorflow import autograph, graphs, overrides, tapes
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
    return calls.as_form(
        fn, lambda fn: _from_value_and_gradient(fn, argnums, has_aux, batch_ndims, device)
    )


def _from_value_and_gradient(
    function: calls.Callee,
    argnums: Argnums,
    has_aux: bool,
    batch_ndims: int | None,
    device: Device,
) -> Function:
    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Structure:
        name, f = function.name, converted(function.f)

        def jacobians(gradients: Structure, y: Tensor) -> list[Leaf | None]:
            if callable(gradients):
                raise TypeError(
                    f"{name} must return (value, gradient), but returned a function as the "
                    "gradient. For a function from the upstream gradient to the gradients of the "
                    "arguments, use sgtrick.custom_vjp."
                )
            return point.jacobians(as_tuple(gradients, argnums, name), y, batch_ndims)

        with devices.scope(device):
            point = select(function, argnums, args, kwargs)
            at = point.read()
            with tapes.recording():  # a tape inside fn would find no gradient
                value = ValueAtPoint.of(name, point, f)
            y, gradients = pair_of(value.result, f"{name} must return (value, gradient)")
            if has_aux:
                y, aux = pair_of(y, f"{name} must return ((value, aux), gradient)")
            y = checked_value(y, name, point.call)

            def evaluated(call: calls.Call) -> list[Leaf | None]:
                return jacobians(call(f)[1], y)

            known = _differentiable(value, at, jacobians(gradients, y), evaluated)
            # Not named y: the Jacobians are those of the value that is not embedded.
            embedded = value.embed_leaves(y, at, evaluated, known)
            return (embedded, _auxiliary(value, aux)) if has_aux else embedded

    return autograph.form(call)


def _auxiliary(value: ValueAtPoint, aux: Structure) -> Structure:
    """The auxiliary results, whose derivatives are errors."""
    inputs = [*value.point.xs, *value.passed.xs, *value.used.values]

    def kept(result: Any) -> Any:
        if isinstance(result, tf.TensorArray) and structures.has_derivatives(result):
            raise TypeError(_ARRAY.format(value.name))
        if not (tf.is_tensor(result) and structures.is_differentiable(result.dtype)):
            return result
        return embedding.auxiliary(value.name, result, inputs, value.used.has_lists)

    return tf.nest.map_structure(kept, aux, expand_composites=True)


def _differentiable(
    value: ValueAtPoint,
    at: calls.Call,
    leaves: list[Leaf | None],
    evaluated: Callable[[calls.Call], list[Leaf | None]],
) -> Callable[[], list[Leaf | None]]:
    """The gradients that came with the value; to differentiate them, `fn` is evaluated again."""
    known = [leaf.gx for leaf in leaves if leaf is not None]

    def read_variables() -> list[Tensor]:
        with tapes.not_recording():
            trainable = map(tf.convert_to_tensor, value.used.variables)
            return [*trainable, *map(tapes.value_of, value.used.fixed)]

    is_differentiated = not tf.executing_eagerly() or tapes.somebody_records()
    reads = read_variables() if is_differentiated else []

    def gradients(
        reads: Sequence[Tensor],
        returned: Sequence[Tensor],
        zs: Sequence[Tensor | None],
        xs: Sequence[Tensor],
        passed: Sequence[Tensor],
    ) -> list[Gradient]:
        points = [tf.identity(x) for x in xs]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(points)
            again = evaluated(value.at(at, points, passed))
            gxs, given = paired([leaf.gx for leaf in again if leaf is not None], zs)
        found = unknown.unless_refused(
            lambda: list(tape.gradient(gxs, points, given)), xs, given, message(value.name)
        )
        if graphs.is_thrown_away():
            return found
        is_same = unknown.are_equal(read_variables(), reads) if reads else tf.constant(True)
        found = unknown.known_unless(is_same, _ASSIGNED.format(value.name), found, xs, given)
        pairs = zip(returned, (leaf.gx for leaf in again if leaf is not None), strict=True)
        is_same = ~is_same | tf.reduce_all(tf.stack(list(itertools.starmap(_are_near, pairs))))
        return unknown.known_unless(is_same, _DRAWN.format(value.name), found, xs, given)

    def differentiable() -> list[Leaf | None]:
        if overrides.is_storing():
            return evaluated(value.at(at, value.point.xs, value.passed.xs))
        # In a gradient graph, what was read and returned is out of reach for the graph that
        # differentiates it.
        then = [list(map(graphs.here, tensors)) for tensors in (reads, known)]
        gxs = iter(value.embed(known, functools.partial(gradients, *then)))
        return [leaf and leaf._replace(gx=next(gxs)) for leaf in leaves]

    return differentiable


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
