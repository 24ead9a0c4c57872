"""Outputs whose gradient is a pullback, by an override around the formula.

Where TensorFlow honours the override, the pullback is called. Where it drops it, the forward
computation is differentiated instead, which is `stop(y) + L(x - stop(x))` with `L` the transpose of
the pullback.
"""

import itertools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from sgtrick import _devices, _leaves, _trick

Pullback = Callable[..., list[Any]]
Forward = Callable[[list[Any], list[Any], Pullback], list[Any]]


def at_once(outputs: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """Eager execution honours overrides, forward mode too as long as `y` itself has no gradient."""
    return _trick.overridden([tf.stop_gradient(y) for y in outputs], inputs, pull)


def _traced(outputs: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """An override that forward mode honours as well, around the formula."""
    return _in_function(_formula(outputs, inputs, pull), inputs, _nested(_traced_within, pull))


def _traced_within(outputs: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """The same in a grad_fn, where functions would never end.

    A tape differentiates the call of a function before anyone asks for it. So a sine whose grad_fn
    calls a cosine whose grad_fn calls the sine would be traced for ever.
    """
    return _trick.overridden(_formula(outputs, inputs, pull), inputs, _nested(_traced_within, pull))


def _without_derivative(outputs: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """In a grad_fn that is being transposed: what depends on the arguments is a coefficient."""
    stopped = [tf.stop_gradient(y) for y in outputs]
    return _trick.overridden(stopped, inputs, _nested(_without_derivative, pull))


def _refusing(outputs: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """In the transpose of a grad_fn: the formula would need the transpose of the transpose."""
    refused = _refusal(outputs, inputs, "its transpose calls a custom_vjp function again")
    return _trick.overridden(refused, inputs, _nested(_without_derivative, pull))


# How calls are differentiated that are traced now.
FORWARD: ContextVar[Forward] = ContextVar("FORWARD", default=_traced)


def forward() -> Forward:
    """How calls are differentiated here."""
    return at_once if _trick.eager() else FORWARD.get()


def _nested(forward: Forward, f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f`, in which calls are differentiated that way."""

    def inside(*args: Any) -> Any:
        token = FORWARD.set(forward)
        try:
            return f(*args)
        finally:
            FORWARD.reset(token)

    return inside


def _formula(outputs: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """Returns `stop(y) + L(z)`, or an error for whoever differentiates it where there is no `L`."""
    if not inputs or not any(_leaves.is_differentiable(y.dtype) for y in outputs):
        return outputs
    try:
        terms = _transposed(outputs, pull, [_trick.zero(x) for x in inputs])
    except Exception as error:  # whatever grad_fn raises is for whoever asks for a gradient
        return _refusal(outputs, inputs, f"{type(error).__name__}: {error}")
    return [
        _trick.with_linear(tf.stop_gradient(y), [] if term is None else [term])
        for y, term in zip(outputs, terms, strict=True)
    ]


def _refusal(outputs: list[Any], inputs: list[Any], why: str) -> list[Any]:
    """The outputs, connected to the inputs by an error."""
    message = (
        "A transformation that drops custom gradients (tf.vectorized_map under a tape, a "
        "SavedModel stored with experimental_custom_gradients=False) needs grad_fn of a "
        f"custom_vjp function transposed, which TensorFlow cannot do: {why}. Put the host call "
        "inside grad_fn into a custom_vjp function of its own, whose grad_fn is the transpose, or "
        "map with tf.map_fn, or store with experimental_custom_gradients=True."
    )

    return [
        _trick.refusing(tf.stop_gradient(y), inputs, message)
        if _leaves.is_differentiable(y.dtype)
        else y
        for y in outputs
    ]


def _transposed(outputs: list[Any], pull: Pullback, z: list[Any]) -> list[Any]:
    """Returns `L(z)`, the transpose of `pull`, by output; None where it does not depend on `z`.

    Raises:
        LookupError: TensorFlow cannot differentiate `pull`.
    """
    differentiable = [_leaves.is_differentiable(y.dtype) for y in outputs]

    def transpose(*z: Any) -> list[Any]:
        # pull is linear, so that its derivative is the same at any upstream.
        upstream = [
            tf.ones_like(y) if d else None for y, d in zip(outputs, differentiable, strict=True)
        ]
        at = [u for u in upstream if u is not None]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(at)
            gradients = _nested(_without_derivative, pull)(*upstream)
        pairs = [_sparse_or_dense(g, z) for g, z in zip(gradients, z, strict=True) if g is not None]
        types = _made_from(at)
        if "EagerPyFunc" in types.values():
            # It has a derivative: another host call, which every forward computation would make.
            raise LookupError("it calls tf.py_function")
        for g, _ in pairs:
            _insist_on_derivative(tape, g, at, types)
        push = _nested(_refusing, tape.gradient)
        terms = iter(push([g for g, _ in pairs], at, [z for _, z in pairs]))
        return [next(terms) if d else None for d in differentiable]

    concrete = _function(transpose, z)
    # What grad_fn was made from is a coefficient of L: differentiating it would cost, turn 0 * inf
    # into NaN and double the second derivative.
    concrete.set_external_captures(
        [
            tf.stop_gradient(c) if _leaves.is_differentiable(c.dtype) else c
            for c in concrete.captured_inputs
        ]
    )
    return list(concrete(*z))


def _sparse_or_dense(g: Any, z: Any) -> tuple[Any, Any]:
    """A gradient and what it is multiplied with."""
    if isinstance(g, tf.IndexedSlices):
        return g.values, tf.gather(z, g.indices)
    return g, tf.cast(z, g.dtype)


def _insist_on_derivative(tape: Any, g: Any, upstream: list[Any], types: dict[Any, str]) -> None:
    """Raises where `g` is computed from `upstream` and TensorFlow cannot see how."""
    if g.ref() in types and all(d is None for d in tape.gradient(g, upstream)):
        through = ", ".join(sorted({*types.values()}))
        raise LookupError(f"there is no derivative through all of {through}")


def _made_from(upstream: list[Any]) -> dict[Any, str]:
    """The tensors that the values of `upstream` enter, with the types of their operations."""
    types = {u.ref(): u.op.type for u in upstream}
    for op in upstream[0].graph.get_operations():
        by_shape_alone = op.type in ("ZerosLike", "OnesLike")
        if not by_shape_alone and any(t.ref() in types for t in op.inputs):
            types |= {t.ref(): op.type for t in op.outputs if _leaves.is_differentiable(t.dtype)}
    return types


def _function(f: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Traces `f` for such tensors. TensorFlow warns of calling a new tf.function each time."""
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    return tf.function(f, autograph=False).get_concrete_function(*specs)


_NUMBERS = itertools.count()


def _in_function(natural: list[Any], inputs: list[Any], pull: Pullback) -> list[Any]:
    """The same as an operation in a function of its own.

    Forward mode drops overrides in the graph that is being traced. Here it differentiates the call
    of a function instead, and honours them.
    """
    n = len(natural)

    def override(*tensors: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        name = f"sgtrick.custom_vjp-{next(_NUMBERS)}"

        @tf.RegisterGradient(name)  # type: ignore[untyped-decorator]
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def gradient(op: Any, *upstream: Any) -> list[Any]:
            # tf.saved_model.save traces this function without an operation. An operation of another
            # graph was loaded without its custom gradient, or copied, and keeps the formula.
            if op is not None and op.graph is not graph:
                return [*upstream[:n], *[None] * len(inputs)]
            with _devices.of(natural[0]):
                return [*[None] * n, *pull(*upstream[:n])]

        with graph.gradient_override_map({"IdentityN": name}):
            return tf.identity_n(tensors, name=_IF_LOST)[:n]

    return list(_function(override, [*natural, *inputs])(*natural, *inputs))


# TensorFlow's error names the operation whose registered gradient is missing.
_IF_LOST = "custom_vjp_needs_a_SavedModel_with_experimental_custom_gradients"
