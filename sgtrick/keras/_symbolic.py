"""Functions in functional models, where tensors have a shape and a dtype but no value yet."""

import keras

from sgtrick._types import Function, Kwargs, Structure
from sgtrick.keras import _structures
from sgtrick.keras._types import TensorLike


def any_symbolic(structure: Structure) -> bool:
    """Whether a leaf is a tensor of the functional API."""
    return any(isinstance(leaf, keras.KerasTensor) for leaf in _structures.leaves(structure))


@keras.saving.register_keras_serializable(package="sgtrick")
class Call(keras.Operation):  # type: ignore[misc]
    """A function, which Keras stores by name, as an operation of a model."""

    def __init__(self, function: Function, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._function = function

    def call(self, *args: Structure, **kwargs: Structure) -> Structure:
        return self._function(*args, **kwargs)

    def compute_output_spec(self, *args: Structure, **kwargs: Structure) -> Structure:
        args, kwargs = keras.tree.map_structure(_dense, (args, kwargs))
        try:
            return super().compute_output_spec(*args, **kwargs)
        except Exception as error:  # which asks to implement this very method
            raise (error.__context__ or error) from None

    def get_config(self) -> Kwargs:
        return {
            "name": self.name,
            "function": keras.saving.serialize_keras_object(self._function),
        }

    @classmethod
    def from_config(cls, config: Kwargs) -> "Call":
        function = keras.saving.deserialize_keras_object(config["function"])
        return cls(function, name=config["name"])


def _dense(leaf: TensorLike) -> TensorLike:
    """Keras takes `2 * x` for sparse while `x` is symbolic; called, it is dense."""
    is_sparse = isinstance(leaf, keras.KerasTensor) and leaf.sparse
    return keras.KerasTensor(leaf.shape, leaf.dtype) if is_sparse else leaf
