"""Functions that return their own pullback, by the protocol of `tf.custom_gradient`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import calls, structures, vjp_protocol
from sgtrick._core._tensorflow import autograph, graphs, tapes
from sgtrick._core.closures import Rest
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.types import (
    Args,
    Function,
    Gradient,
    Kwargs,
    Structure,
    Tensor,
    TensorLike,
    Variable,
)
from sgtrick._core.variables import recorded


def custom_vjp(f: Function | None = None) -> Function:
    """Decorates a function that returns its value and its vector-Jacobian product.

    The protocol is that of `tf.custom_gradient`: `f(*args) -> (y, grad_fn)`, and
    `grad_fn(*upstream)` returns the gradient of each argument. `tf.custom_gradient` silently drops
    the rule under `tf.vectorized_map` and in forward mode; here it is kept.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> @sgtrick.custom_vjp
        ... def log1pexp(x):
        ...     e = tf.exp(x)
        ...     return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))
        >>> x = tf.constant([1.0, 2.0, 100.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = tf.vectorized_map(log1pexp, x)
        >>> tape.gradient(y, x).numpy().round(3)
        array([0.731, 0.881, 1.   ], dtype=float32)

    Args:
        f: Returns `(y, grad_fn)`, where `y` is a structure of tensors. `f` receives variables among
            the arguments as tensors, with the values that they have at the call. `grad_fn` is
            called with one upstream gradient for each leaf of `y`, only when a gradient is
            requested, and returns a gradient or None for each leaf of the arguments: in the order
            in which `f` declares them, even if they are passed by keyword, keyword-only ones last;
            those of `**kwargs` are in the order of the call. The gradients of trailing leaves that
            are not tensors or have no derivatives may be omitted. If `f` reads trainable variables
            that are not among its arguments, `grad_fn` must take a keyword `variables`, the list of
            these in the order in which they were read, and return
            `(gradients, variable_gradients)`. Other tensors that `f` closes over have no gradient,
            unless they are among the arguments, too: requesting one is an error, or it is None if
            `f` stops the tensor. `grad_fn` never runs in a forward pass, and need not be linear;
            loops and host calls are allowed. Higher derivatives are obtained by differentiating
            `grad_fn`. Forward mode transposes it, by differentiating it with respect to `upstream`,
            and tests the transpose at fixed pseudo-random upstream gradients.

    Returns:
        A function of the arguments of `f` that returns `y`. Methods can be decorated too.

    Raises:
        TypeError: `f` does not return such a pair, or `grad_fn` does not take `variables`.
        ValueError: `grad_fn` returned the wrong number of gradients, or one of the wrong shape.
        LookupError: When TensorFlow cannot compute a derivative from `grad_fn`: in forward mode, if
            it is not linear or calls the host; for higher derivatives, if the gradient, or a part
            of it, is not connected to the arguments; and with respect to a tensor that `f` closes
            over. With respect to what that tensor was computed from, the derivative is NaN. In
            graphs this is a `tf.errors.InvalidArgumentError` when the graph runs; around a
            `tf.function` and in XLA, the derivative is NaN. Also when one eager operation of `f`
            reads several variables, so that their order is unknown; and when a loop or branch in
            `f` reads a `tf.TensorArray` that another loop or a function got as an argument.
    """
    return custom_vjp if f is None else calls.as_form(f, _custom_vjp)


def _custom_vjp(function: calls.Callee) -> Function:
    f = function.f

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Structure:
        if kwargs:
            given = function.given(args, kwargs)
            args, kwargs = given.args, given.kwargs
        own = function.own(args)
        owner, args = args[:own], args[own:]  # of a method, without gradient
        passed = tf.nest.flatten((args, kwargs))
        args, kwargs = tf.nest.map_structure(_own, (args, kwargs))
        leaves = vjp_protocol.leaves_of(args, kwargs)
        run = functools.partial(converted(f), *owner, *args, **kwargs)
        arguments = [*passed, *(leaf for _, leaf in leaves)]
        tensors = [a for a in arguments if tf.is_tensor(a) and not isinstance(a, tf.Variable)]
        rest = Rest(function.name, "grad_fn", list(map(_component, tensors)))
        with rest.noted():
            returned, variables, tape = recorded(run, arguments, function.name)
        y, grad_fn = vjp_protocol.value_and_rule(f, returned, "grad_fn")
        rule = _Rule(f, grad_fn, leaves, y, variables)
        sources = [*rule.inputs, *variables]

        def again(*upstream: Tensor) -> list[Gradient]:
            y, grad_fn = vjp_protocol.value_and_rule(f, run(), "grad_fn")
            return _Rule(f, grad_fn, leaves, y, variables).pull(*upstream)

        kept = Rule(function.name, rule.pull, sources=sources, tape=tape, again=again)
        outputs = keep(rule.outputs, rule.inputs, kept)
        if rule.inputs:  # else the derivatives are those of y itself
            outputs = list(map(rest.unknown, rule.outputs, outputs))
        return rule.pack(outputs)

    return autograph.form(call)


class _Rule:
    """The caller's `grad_fn` as a function of flat lists of tensors."""

    def __init__(
        self,
        f: Function,
        grad_fn: Function,
        leaves: list[tuple[str, Any]],
        y: Tensor,
        variables: list[Variable],
    ) -> None:
        if variables and not _takes_variables(grad_fn):
            raise TypeError(
                f"{calls.name_of(f)} reads the variables {[v.name for v in variables]}, so "
                "its grad_fn must take a keyword argument `variables` and return (gradients, "
                "variable_gradients). Alternatively, pass the variables as arguments."
            )
        self._name = f"grad_fn of {calls.name_of(f)}"
        self._grad_fn = grad_fn
        self._paths = [path for path, _ in leaves]
        self._variables = variables
        primals = [_component(leaf) if _is_input(leaf) else None for _, leaf in leaves]
        self._primals = [
            x if x is not None and structures.is_differentiable(x.dtype) else None for x in primals
        ]
        self.inputs = [x for x in self._primals if x is not None] + [
            structures.as_tensor(v) for v in variables
        ]
        self._y = tf.nest.map_structure(_to_output, y)
        self.outputs = [_component(leaf) for leaf in tf.nest.flatten(self._y)]

    def pack(self, outputs: Sequence[Tensor]) -> Structure:
        """Other tensors in the structure of `y`."""
        leaves = map(_with_component, tf.nest.flatten(self._y), outputs)
        return tf.nest.pack_sequence_as(self._y, list(leaves))

    def pull(self, *upstream: Tensor) -> list[Gradient]:
        """From gradients of the outputs to gradients of the inputs."""
        upstream = tuple(map(_with_component, tf.nest.flatten(self._y), upstream))
        variable_gradients: Sequence[Gradient] = []
        if self._variables:
            returned = self._grad_fn(*upstream, variables=self._variables)
            if not structures.is_pair(returned):
                raise TypeError(
                    f"{self._name} takes variables, so it must return (gradients, "
                    f"variable_gradients), got {structures.kind_of(returned)}."
                )
            returned, variable_gradients = returned
            names = [v.name for v in self._variables]
            variable_gradients = list(variable_gradients)
            if len(variable_gradients) != len(names):
                raise ValueError(
                    f"{self._name} returned {len(variable_gradients)} variable gradients, "
                    f"expected {len(names)}, one for each of {names}."
                )
        else:
            returned = self._grad_fn(*upstream)
            names = []
        kept = vjp_protocol.gradients_of(self._primals, returned, self._paths, self._name)
        kept += [*zip(variable_gradients, (f"variable {n}" for n in names), strict=True)]
        return [
            None if g is None else self._checked(_component(g), x, path)
            for (g, path), x in zip(kept, self.inputs, strict=True)
        ]

    def _checked(self, g: Tensor, x: Tensor, path: str) -> Tensor:
        vjp_protocol.check_shape(
            structures.static_shape(g), structures.static_shape(x), path, self._name
        )
        return g


def _takes_variables(grad_fn: Function) -> bool:
    parameters = inspect.signature(grad_fn).parameters
    return "variables" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _own(leaf: TensorLike) -> TensorLike:
    """A tensor that is the call's own; composite tensors are returned unchanged.

    Variables are read now: by the time the rule runs, they may have been assigned another value.
    """
    if not structures.is_dense(leaf):
        return leaf
    t = structures.as_tensor(leaf)
    return tapes.own(t) if structures.is_differentiable(t.dtype) else graphs.here(t)


def _is_input(leaf: TensorLike) -> bool:
    """Whether a gradient with respect to this argument may be requested."""
    return tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__")


def _to_output(leaf: TensorLike) -> Tensor:
    return (
        leaf
        if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)
        else tf.convert_to_tensor(leaf)
    )


def _component(leaf: TensorLike) -> Tensor:
    """The tensor that holds the numbers of a composite (ragged) tensor; others are their own."""
    if isinstance(leaf, (tf.Tensor, tf.IndexedSlices)):
        return leaf
    composite = getattr(leaf, "__composite_gradient__", None)
    if composite is not None and not isinstance(leaf, tf.Variable):
        return _component(composite.get_gradient_components(leaf))
    return structures.as_tensor(leaf)


def _with_component(leaf: TensorLike, component: Tensor | None) -> Gradient:
    """`leaf` with another tensor as its component."""
    composite = getattr(leaf, "__composite_gradient__", None)
    if composite is None or component is None:
        return component
    inside = _with_component(composite.get_gradient_components(leaf), component)
    return composite.replace_gradient_components(leaf, inside)
