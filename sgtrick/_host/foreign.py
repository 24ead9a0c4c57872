"""Refusals of host engines: of JAX and PyTorch tensors, and of being stored by Keras.

Nothing here imports Keras, JAX or PyTorch.
"""

import sys
from typing import Any

from sgtrick._arguments import structures

_TENSORS = {"jax": "Array", "torch": "Tensor"}
_CALLS = {
    "jax": "jax.pure_callback(engine, shapes, jax.lax.stop_gradient(x))",
    "torch": "engine(x.detach().numpy())",
}


def refuse_tensors(engine: str, parameter: str, argument: Any) -> None:
    """Raises for tensors of JAX and PyTorch, from which TensorFlow would take only the value.

    Args:
        engine: The function's name in error messages.
        parameter: The argument's name in error messages.
        argument: A structure.

    Raises:
        TypeError: A leaf is such a tensor, or a Keras variable that holds one.
    """
    for framework, kind in _TENSORS.items():
        tensor = getattr(sys.modules.get(framework), kind, None)
        if tensor is None:
            continue
        for path, leaf in structures.flatten(argument, parameter):
            if isinstance(leaf, tensor) or isinstance(getattr(leaf, "value", None), tensor):
                raise TypeError(
                    f"{engine} takes tensors of TensorFlow, and {path} is one of {framework}, "
                    "which would get no gradient. Call the engine without from_numpy instead: "
                    f"value, gradient = {_CALLS[framework]}, and then "
                    "sgtrick.keras.custom_gradient(value, gradient, x)."
                )


def not_stored(engine: str) -> TypeError:
    """The error to raise when Keras asks a host engine for its configuration."""
    return TypeError(
        f"Keras cannot store {engine}, a host engine: it is Python code of this process. Call it "
        "in a function that is registered with keras.saving.register_keras_serializable, and use "
        "that as loss, metric, activation or in a Lambda; or create it in a layer's __init__."
    )
