"""Functions with their own vector-Jacobian product, with one signature on every backend."""

from __future__ import annotations  # signatures that show the names of types

import keras
import tensorflow as tf

import sgtrick
from sgtrick._arguments import calls
from sgtrick._types import Function, Structure
from sgtrick.keras import _backends
from sgtrick.keras._rule import FunctionRule
from sgtrick.keras._symbolic import Call, any_symbolic


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
            cast to the dtype of their argument: numbers, arrays and masks will do. Reverse mode
            calls `grad`. Forward mode transposes it on tensorflow and jax, where it must be linear
            in `upstream`; torch has no forward mode of such a function, nor forward over reverse.
            Higher derivatives are those of `grad`. `f` must return the same for the same arguments,
            since jax and torch run it again for the gradient: pass random masks as arguments.

            The signatures that Keras documents are accepted too. `grad(*args, upstream)` and
            `grad(*args, upstream=None)`, where `upstream` is keyword-only, get the arguments of `f`
            in the order of their gradients. `grad(x, y, upstream)` gets them under their own names.
            In all these, and in `grad(upstream)`, several leaves of `y` give an `upstream` in the
            structure of `y`. Other parameters that have a default keep it.

    Returns:
        A plain function of the arguments of `f` that returns `y`, or its `KerasTensor` for symbolic
        arguments. `f` gets the values of Keras variables among the arguments. Methods can be
        decorated too. Keras stores the function by name, like any function: register it with
        `keras.saving.register_keras_serializable` above this decorator, or list it in
        `custom_objects` when a model is loaded.

    Raises:
        TypeError: `f` does not return such a pair, reads a trainable variable that is not among its
            arguments, assigns one, or adds a loss; or `grad` cannot take the upstream gradients, or
            returned a gradient for something that has no derivatives, or a complex one for a real
            argument.
        ValueError: `grad` returned gradients of another number or shape, or `f` was registered with
            Keras before.
        LookupError: A derivative with respect to a tensor whose values `f` reads but does not take
            as an argument; or a second derivative where no gradient is connected to an argument:
            they are constants, or computed from the arguments only through `stop_gradient` or
            NumPy. (On tensorflow as in `sgtrick.custom_vjp`.)
        RuntimeError: On torch, a backward pass after a tensor that `grad` names, such as the
            result or a variable of `self`, was changed in place.
        NotImplementedError: On torch, forward mode, and `torch.func` inside `torch.compile`. On
            jax, forward mode where `grad` is not linear (NaN where only the numbers tell and the
            code is compiled or mapped) or cannot be transposed. The backend has no derivatives.
    """
    if f is None:
        return custom_vjp
    name = getattr(f, "__name__", None)
    if name and keras.saving.get_registered_name(f) != name:
        raise ValueError(
            f"{name} is registered with Keras already, without its rule, and would be "
            "loaded so. Put register_keras_serializable on the line above custom_vjp."
        )
    form: Function = calls.as_form(f, _custom_vjp)
    return form


def _custom_vjp(function: calls.Callee) -> Function:
    function.is_held_by = _backends.constant(function.is_held_by)

    # A plain function, because Keras stores functions by name but no other callables.
    def h(*args: Structure, **kwargs: Structure) -> Structure:
        if any_symbolic((args, kwargs)):
            return Call(h).symbolic_call(args, kwargs)
        rule = FunctionRule(function, args, kwargs)
        if _backends.is_tensorflow():
            return rule.pack(sgtrick.custom_vjp(rule)(*rule.inputs))
        return rule.pack(_backends.native().with_vjp(rule))

    h.__name__ = function.name
    if _backends.is_tensorflow():
        h = tf.autograph.experimental.do_not_convert(h)
    return h
