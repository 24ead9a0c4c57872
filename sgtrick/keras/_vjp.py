"""Functions that bring their own vector-Jacobian product: one signature on every backend."""

from typing import Any

import keras
import tensorflow as tf

from sgtrick._core import calls
from sgtrick.keras import _backends
from sgtrick.keras._rule import Rule
from sgtrick.keras._symbolic import any_symbolic


def custom_vjp(f: Any = None) -> Any:
    """Decorates a function that returns its value and its vector-Jacobian product.

    `f(*args) -> (y, grad)`, and `grad(*upstream)` returns the gradient of each argument: the same
    on the tensorflow, jax and torch backends, where `keras.ops.custom_gradient` needs a different
    `grad` for each.

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
        f: Returns `(y, grad)`, `y` a structure of tensors. `grad` is called with one upstream
            gradient per leaf of `y`, None for those without derivatives, and returns one gradient
            or None per leaf of the arguments, those passed by keyword in the place where `f`
            declares them, those of `**kwargs` last, in the order of the call. Gradients of the last
            leaves may be left out where these are no tensors or have no derivatives. It has to be
            linear in `upstream`: reverse mode calls it as it is, forward mode transposes it.
            Derivatives of higher order are those of `grad`.

    Returns:
        A plain function of the arguments of `f` that returns `y`, or its `KerasTensor` for symbolic
        arguments. Keras variables among the arguments arrive in `f` as their values, gradients in
        the dtype of their argument. Methods can be decorated too. Keras stores it by name, as any
        function: register it with `keras.saving.register_keras_serializable`, above this decorator,
        or name it in `custom_objects` where a model is loaded.

    Raises:
        TypeError: `f` does not return such a pair, or reads a trainable variable that is not among
            its arguments, or assigns one.
        ValueError: `grad` returned gradients of the wrong number or shape.
        LookupError: A derivative is taken by a tensor that `f` reads and that is no argument. (On
            tensorflow the tensor is unconnected.)
        NotImplementedError: On jax, forward mode with a `grad` that cannot be transposed; on torch,
            forward mode over forward mode, and `torch.func` inside `torch.compile`; or the backend
            has no derivatives.
    """
    if f is None:
        return custom_vjp
    if isinstance(f, (classmethod, staticmethod)):
        return type(f)(custom_vjp(f.__func__))

    body = _body(f)

    def h(*args: Any, **kwargs: Any) -> Any:
        if any_symbolic((args, kwargs)):
            return CustomVJPCall(h)(*args, **kwargs)
        rule = Rule(f, args, kwargs, is_bound=_is_bound(f, body, args))
        return rule.pack(_backends.native().with_vjp(rule, rule.inputs, rule.reads()))

    if _backends.is_tensorflow():
        h = tf.autograph.experimental.do_not_convert(h)
    # A plain function: Keras stores functions by name, and nothing else that can be called.
    return _named(calls.imitate(h, f), f)


def _named(h: Any, f: Any) -> Any:
    """`h` with the name of `f`, and one by which Keras finds what it stored."""
    h.__name__ = calls.name_of(f)
    if h.__name__ == "<lambda>":  # of which Keras stores the code, which would be that of h
        h.__name__ = "custom_vjp(<lambda>)"
    return h


def _body(f: Any) -> str | None:
    """The name of the class in whose body `f` stands."""
    body = getattr(f, "__qualname__", "").rpartition(".")[0]
    return body if body and not body.endswith("<locals>") else None


def _is_bound(f: Any, body: str | None, args: tuple[Any, ...]) -> bool:
    """Whether the first argument is one of that class, or the class, and `f` a method of it."""
    if body is None or not args:
        return False
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    return any(c.__qualname__ == body and f.__name__ in vars(c) for c in owner.__mro__)


@keras.saving.register_keras_serializable(package="sgtrick")
class CustomVJPCall(keras.Operation):  # type: ignore[misc]
    """A decorated function in a functional model."""

    def __init__(self, function: Any, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "function": keras.saving.serialize_keras_object(self._function),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CustomVJPCall":
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(function, name=config["name"])
