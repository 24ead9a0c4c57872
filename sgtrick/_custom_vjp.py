"""Functions that bring their own pullback, by the protocol of `tf.custom_gradient`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import calls, structures, vjp_protocol
from sgtrick._core._tensorflow import autograph, graphs
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
from sgtrick._core.variables import Reader


def custom_vjp(f: Function | None = None) -> Any:
    """Decorates a function that returns its value and its vector-Jacobian product.

    The protocol is that of `tf.custom_gradient`: `f(*args) -> (y, grad_fn)`, and
    `grad_fn(*upstream)` returns the gradient of each argument. What `tf.custom_gradient` silently
    drops under `tf.vectorized_map` and in forward mode holds here.

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
        f: Returns `(y, grad_fn)`, `y` a structure of tensors. Variables among the arguments arrive
            as the values that they have at the call. `grad_fn` is called with one upstream
            gradient per leaf of `y`, only when a gradient is asked for, and returns one gradient or
            None per leaf of the arguments, those passed by keyword in the place where `f` declares
            them, keyword-only ones last, in the order of their declaration, those of `**kwargs` in
            that of the call. Gradients of the last leaves may be left out where these are no
            tensors or have no derivatives. If `f` reads trainable variables that are not among its
            arguments, `grad_fn` must take a keyword `variables`, their list in the order read, and
            return `(gradients, variable_gradients)`. It runs in no forward pass, and may be
            anything: not linear, a loop, a host call. Second and higher derivatives are those of
            `grad_fn`. Forward mode transposes it, by differentiating it with respect to
            `upstream`, and tests the transpose at fixed pseudo-random upstream gradients.

    Returns:
        A function of the arguments of `f` that returns `y`. Methods can be decorated too.

    Raises:
        TypeError: `f` does not return such a pair, or `grad_fn` does not take `variables`.
        ValueError: `grad_fn` returned gradients of the wrong number or shape.
        LookupError: When a derivative is taken that TensorFlow does not find in `grad_fn`: forward
            mode where it is not linear or calls the host, or a derivative of higher order of a
            gradient that is not connected to the arguments. In graphs this is a
            `tf.errors.InvalidArgumentError` when it is run; around a `tf.function` and in XLA, the
            derivative is NaN.
    """
    return custom_vjp if f is None else calls.as_form(f, _custom_vjp)


def _custom_vjp(f: Function) -> Any:
    function, read = calls.Callee(f), Reader()

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = vjp_protocol.arguments_of(f, args, kwargs)
        owner, args = args[: function.own], args[function.own :]  # of a method, without gradient
        given = tf.nest.flatten((args, kwargs))
        args, kwargs = tf.nest.map_structure(_here, (args, kwargs))
        leaves = vjp_protocol.leaves_of(args, kwargs)
        run = functools.partial(converted(f), *owner, *args, **kwargs)
        returned, variables, tape = read.recorded(run, [*given, *(leaf for _, leaf in leaves)])
        y, grad_fn = vjp_protocol.value_and_rule(f, returned)
        rule = _Rule(f, grad_fn, leaves, y, variables)
        sources = [*rule.inputs, *variables]
        kept = Rule(function.name, rule.pull, sources=sources, tape=tape)
        return rule.pack(keep(rule.outputs, rule.inputs, kept))

    return autograph.form(call)


class _Rule:
    """The caller's `grad_fn` between flat lists of tensors."""

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
                "variable_gradients). Or pass them as arguments."
            )
        self._name = calls.name_of(f)
        self._grad_fn = grad_fn
        self._paths = [path for path, _ in leaves]
        self._variables = variables
        primals = [_component(leaf) if _is_input(leaf) else None for _, leaf in leaves]
        self._primals = [
            x if x is not None and structures.is_differentiable(x.dtype) else None for x in primals
        ]
        self.inputs = [x for x in self._primals if x is not None] + [
            tf.convert_to_tensor(v) for v in variables
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
        variable_gradients: Sequence[Any] = []
        if self._variables:
            returned = self._grad_fn(*upstream, variables=self._variables)
            if not structures.is_pair(returned):
                raise TypeError(
                    f"grad_fn of {self._name} was given variables and must return (gradients, "
                    f"variable_gradients), got {returned!r}."
                )
            returned, variable_gradients = returned
            names = [v.name for v in self._variables]
            variable_gradients = list(variable_gradients)
            if len(variable_gradients) != len(names):
                raise ValueError(
                    f"grad_fn of {self._name} returned {len(variable_gradients)} variable "
                    f"gradients, expected {len(names)}, one for each of {names}."
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


def _here(leaf: TensorLike) -> Any:
    """A tensor of the graph that is being traced, composite ones as they are.

    A variable is read now: when the rule runs, it may have been assigned something else.
    """
    return graphs.here(tf.convert_to_tensor(leaf)) if structures.is_dense(leaf) else leaf


def _is_input(leaf: TensorLike) -> bool:
    """Whether someone may ask for the gradient by this argument."""
    return tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__")


def _to_output(leaf: TensorLike) -> Tensor:
    return (
        leaf
        if tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)
        else tf.convert_to_tensor(leaf)
    )


def _component(leaf: TensorLike) -> Tensor:
    """The tensor by which a composite tensor (ragged) is differentiated; other tensors as such."""
    if isinstance(leaf, (tf.Tensor, tf.IndexedSlices)):
        return leaf
    composite = getattr(leaf, "__composite_gradient__", None)
    if composite is not None and not isinstance(leaf, tf.Variable):
        return _component(composite.get_gradient_components(leaf))
    return tf.convert_to_tensor(leaf)


def _with_component(leaf: TensorLike, component: Any) -> Any:
    """`leaf` with another tensor in that place."""
    composite = getattr(leaf, "__composite_gradient__", None)
    if composite is None or component is None:
        return component
    inside = _with_component(composite.get_gradient_components(leaf), component)
    return composite.replace_gradient_components(leaf, inside)
