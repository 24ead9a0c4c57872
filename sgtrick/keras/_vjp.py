"""Functions that bring their own vector-Jacobian product: one signature on every backend."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

import sgtrick
from sgtrick import _arguments, _dtypes
from sgtrick import _custom_vjp as _vjp
from sgtrick.keras import _backends, _symbolic, _trick


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
        A function of the arguments of `f` that returns `y`, or its `KerasTensor` for symbolic
        arguments. Keras variables among the arguments arrive in `f` as their values. Methods can be
        decorated too. In a functional model that is to be saved, the function has to be registered
        with `keras.saving.register_keras_serializable`, above this decorator.

    Raises:
        TypeError: `f` does not return such a pair, or reads a trainable variable that is not among
            its arguments, or assigns one.
        ValueError: `grad` returned gradients of the wrong number or shape, or a symbolic call of a
            function that is not registered is saved.
        LookupError: A derivative is taken by a tensor that `f` reads and that is no argument. (On
            tensorflow the tensor is unconnected.)
        NotImplementedError: On jax, forward mode with a `grad` that cannot be transposed; on torch,
            forward mode over forward mode; or the backend has no derivatives.
    """
    return custom_vjp if f is None else _CustomVJP(f)


class _CustomVJP:
    """The decorated function: a callable, and a descriptor so that methods can be decorated."""

    def __init__(self, f: Any) -> None:
        _arguments.imitate(self, f)
        self._f = f

    def __get__(self, instance: Any, owner: Any = None) -> "_CustomVJP":
        return _CustomVJP(_arguments.bound(self._f, instance, owner))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _symbolic.any_symbolic((args, kwargs)):
            return CustomVJPCall(self)(*args, **kwargs)
        args, kwargs = tf.nest.map_structure(
            _value_of, _vjp.arguments_of(self._f, args, kwargs), expand_composites=False
        )
        if _backends.is_tensorflow():
            return sgtrick.custom_vjp(_without_variables(self._f))(*args, **kwargs)
        rule = _Rule(self._f, args, kwargs)
        outputs = _backends.native().with_vjp(rule, rule.inputs, _read(self._f))
        return tf.nest.pack_sequence_as(rule.y, outputs)


class _Rule:
    """A call of the caller's function, between flat lists of tensors."""

    def __init__(self, f: Any, args: Any, kwargs: Any) -> None:
        leaves = _vjp.leaves_of(args, kwargs)
        self._f, self._call = f, (args, list(kwargs.values()))
        self._keywords = list(kwargs)
        self._paths = [path for path, _ in leaves]
        self._leaves = [leaf for _, leaf in leaves]
        self._primals = [
            leaf
            if ops.is_tensor(leaf) and _dtypes.is_differentiable(_trick.dtype_of(leaf))
            else None
            for leaf in self._leaves
        ]
        self.inputs = [x for x in self._primals if x is not None]
        self.y: Any = None  # the structure of the value, known after a call

    def __call__(self, *xs: Any) -> tuple[list[Any], Any]:
        """Returns the outputs at `xs`, and what pulls back from them to `xs`."""
        some = iter(xs)
        leaves = [
            leaf if x is None else next(some)
            for leaf, x in zip(self._leaves, self._primals, strict=True)
        ]
        args, values = tf.nest.pack_sequence_as(self._call, leaves)
        kwargs = dict(zip(self._keywords, values, strict=True))
        y, grad = _vjp.value_and_rule(self._f, _without_variables(self._f)(*args, **kwargs))
        self.y = y

        def pull(*us: Any) -> list[Any]:
            name = _arguments.name_of(self._f)
            kept = _vjp.gradients_of(self._primals, grad(*us), self._paths, name)
            return [
                _checked(g, x, path, name) for (g, path), x in zip(kept, self.inputs, strict=True)
            ]

        return [ops.convert_to_tensor(leaf) for leaf in tf.nest.flatten(y)], pull


def _checked(g: Any, x: Any, path: str, name: str) -> Any:
    if g is None:
        return None
    g = ops.convert_to_tensor(g)
    _vjp.check_shape(tuple(g.shape), tuple(x.shape), path, name)
    return _trick.cast(g, _trick.dtype_of(x))


def _value_of(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


def _read(f: Any) -> LookupError:
    return LookupError(
        f"{_arguments.name_of(f)} reads a tensor that is being differentiated and is not among its "
        "arguments, so that its gradient is not known. Pass it as an argument, or stop it."
    )


def _without_variables(f: Any) -> Any:
    """A function that is refused variables, of which no rule gives the gradients."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        with _Uses() as uses:
            returned = f(*args, **kwargs)
        name = _arguments.name_of(f)
        if uses.read:
            raise TypeError(
                f"{name} reads the variables {[v.path for v in uses.read]}, which would get no "
                "gradient. Pass them as arguments, and return their gradients."
            )
        if uses.assigned:
            raise TypeError(
                f"{name} assigns the variables {[v.path for v in uses.assigned]}. Return the new "
                "values, and assign them outside."
            )
        return returned

    return _arguments.imitate(checked, f)


class _Uses(keras.StatelessScope):  # type: ignore[misc]
    """Sees which variables are read and assigned, and leaves them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []
        self.assigned: list[Any] = []

    def get_current_value(self, variable: Any) -> Any:
        if variable.trainable and all(v is not variable for v in self.read):
            self.read.append(variable)
        return self.original_scope and self.original_scope.get_current_value(variable)

    def add_update(self, update: Any) -> None:
        self.assigned.append(update[0])


@keras.saving.register_keras_serializable(package="sgtrick")
class CustomVJPCall(keras.Operation):  # type: ignore[misc]
    """A decorated function in a functional model."""

    def __init__(self, function: Any, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        registered = keras.saving.get_registered_name(self._function)
        if keras.saving.get_registered_object(registered) is not self._function:
            name = _arguments.name_of(self._function)
            raise ValueError(
                f"{name} is part of a functional model that is being saved, so it has to be "
                "registered: put @keras.saving.register_keras_serializable() above the decorator "
                "custom_vjp."
            )
        return {"name": self.name, "function": registered}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CustomVJPCall":
        function = keras.saving.get_registered_object(config["function"])
        if function is None:
            raise ValueError(
                f"The model calls a function that is registered as {config['function']!r}, and "
                "there is none. Import the module that registers it."
            )
        return cls(function, name=config["name"])
