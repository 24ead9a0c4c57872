"""What a function of TensorFlow's tensors is asked to do by Keras on another backend, and by files.

Nothing here imports Keras, JAX or PyTorch.
"""

import sys
from typing import Any

from sgtrick._core import structures

_TENSORS = {"jax": "Array", "torch": "Tensor"}
_CALLS = {
    "jax": "jax.pure_callback(engine, shapes, jax.lax.stop_gradient(x))",
    "torch": "engine(x.detach().numpy())",
}


def refuse_tensors(engine: str, parameter: str, argument: Any) -> None:
    """Raises at tensors of JAX and PyTorch, of which TensorFlow would take no more than the value.

    Args:
        engine: What errors call the function.
        parameter: What errors call the argument.
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
                    f"{engine} takes tensors of TensorFlow, and {path} is one of {framework}, by "
                    "which it would get no gradient. With the engine as it was before from_numpy: "
                    f"value, gradient = {_CALLS[framework]}, and then "
                    "sgtrick.keras.custom_gradient(value, gradient, x)."
                )


def not_stored(engine: str) -> TypeError:
    """What is raised when Keras asks a host engine for its configuration."""
    return TypeError(
        f"Keras cannot store {engine}, a host engine: it is Python code of this process. Call it "
        "in a function that is registered with keras.saving.register_keras_serializable, and use "
        "that as loss, metric, activation or in a Lambda; or make it in the __init__ of a layer."
    )
