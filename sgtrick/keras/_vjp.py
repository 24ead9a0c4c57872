"""Functions with their own vector-Jacobian product, with one signature on every backend."""

import keras
import tensorflow as tf

from sgtrick._arguments import calls
from sgtrick._types import Function, Kwargs, Structure
from sgtrick.keras import _backends, _compiling
from sgtrick.keras._rule import Rule
from sgtrick.keras._symbolic import any_symbolic


def custom_vjp(f: Function | None = None) -> Function:
    """Decorates a function that returns its value and its vector-Jacobian product.

    `f(*args)` returns `(y, grad)`, and `grad(*upstream)` returns the gradient of each argument. The
    same code works on the tensorflow, jax and torch backends, whereas `keras.ops.custom_gradient`
    needs a different `grad` for each.

        >>> import numpy as np
        >>> from keras import ops
        >>> import sgtrick.keras
        >>> @sgtrick.keras.custom_vjp
        ... def log1pexp(x):
        ...     e = ops.exp(x)
        ...     return ops.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))
        >>> x = ops.convert_to_tensor([0.0, 1.0], "float32")
        >>> ops.convert_to_numpy(log1pexp(x)).round(3)
        array([0.693, 1.313], dtype=float32)

    Args:
        f: Returns `(y, grad)`, where `y` is a structure of tensors. `grad` is called with one
            upstream gradient for each leaf of `y`, None for leaves without derivatives. It returns
            one gradient for each argument, in the structure of the argument or None, or one for
            each leaf of all arguments, as `grad_fn` of `sgtrick.custom_vjp` does. Gradients are
            cast to the dtype of their argument: numbers, arrays and masks will do. `grad` must be
            linear in `upstream`: reverse mode calls it, forward mode transposes it. Higher
            derivatives are those of `grad`.

            The signatures that Keras documents are accepted too. `grad(*args, upstream)` and
            `grad(*args, upstream=None)`, where `upstream` is keyword-only, get the arguments of `f`
            in the order of their gradients. There, and in `grad(upstream)`, several leaves of `y`
            give an `upstream` in the structure of `y`.

    Returns:
        A plain function of the arguments of `f` that returns `y`, or its `KerasTensor` for symbolic
        arguments. `f` gets the values of Keras variables among the arguments. Methods can be
        decorated too. Keras stores the function by name, like any function: register it with
        `keras.saving.register_keras_serializable` above this decorator, or list it in
        `custom_objects` when a model is loaded.

    Raises:
        TypeError: `f` does not return such a pair, reads a trainable variable that is not among its
            arguments, or assigns one; or `grad` returned a gradient for something that has no
            derivatives, or a complex one for a real argument.
        ValueError: `grad` returned gradients of another number or shape.
        LookupError: A derivative with respect to a tensor that `f` reads but does not take as an
            argument; or a second derivative where `grad` computes gradients from an argument only
            through `stop_gradient` or NumPy; or on torch, forward mode with a `grad` that is not
            linear, which gives NaN in `torch.func`. (On tensorflow as in `sgtrick.custom_vjp`.)
        NotImplementedError: On jax, forward mode with a `grad` that cannot be transposed; on torch,
            forward mode over forward mode, and `torch.func` inside `torch.compile`; or the backend
            has no derivatives.
    """
    if f is None:
        return custom_vjp
    if isinstance(f, (classmethod, staticmethod)):
        return type(f)(custom_vjp(f.__func__))

    function = calls.Callee(f)
    function.is_held_by = _compiling.constant(function.is_held_by)

    def h(*args: Structure, **kwargs: Structure) -> Structure:
        if any_symbolic((args, kwargs)):
            return CustomVJPCall(h)(*args, **kwargs)
        rule = Rule(function, args, kwargs)
        return rule.pack(_backends.native().with_vjp(rule, rule.inputs, rule.reads()))

    if _backends.is_tensorflow():
        h = tf.autograph.experimental.do_not_convert(h)
    # A plain function, because Keras stores functions by name but no other callables.
    function.form = _named(calls.imitate(h, f), f)
    return function.form


def _named(h: Function, f: Function) -> Function:
    """`h` with the name of `f`, changed if it is one that Keras could not load."""
    h.__name__ = calls.name_of(f)
    if h.__name__ == "<lambda>":  # Keras would store the code, which is that of h, not of f
        h.__name__ = "custom_vjp(<lambda>)"
    return h


@keras.saving.register_keras_serializable(package="sgtrick")
class CustomVJPCall(keras.Operation):  # type: ignore[misc]
    """A decorated function in a functional model."""

    def __init__(self, function: Function, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._function = function

    def call(self, *args: Structure, **kwargs: Structure) -> Structure:
        return self._function(*args, **kwargs)

    def get_config(self) -> Kwargs:
        return {
            "name": self.name,
            "function": keras.saving.serialize_keras_object(self._function),
        }

    @classmethod
    def from_config(cls, config: Kwargs) -> "CustomVJPCall":
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(function, name=config["name"])
