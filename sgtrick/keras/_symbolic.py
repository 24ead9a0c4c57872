"""Functions in functional models, where tensors have a shape and a dtype but no value yet."""

import keras

from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras import _structures
from sgtrick.keras._types import Tensor, TensorLike


def any_symbolic(structure: Structure) -> bool:
    """Whether a leaf is a tensor of the functional API."""
    return any(map(_is_symbolic, _structures.leaves(structure)))


@keras.saving.register_keras_serializable(package="sgtrick")
class Call(keras.Operation):  # type: ignore[misc]
    """A function, which Keras stores by name, as an operation of a model.

    It takes the arguments as a tuple and a dictionary, since Keras has its own use for some names.
    """

    def __init__(self, function: Function, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._function = function

    def call(self, args: Args, kwargs: Kwargs) -> Structure:
        return self._function(*args, **kwargs)

    def compute_output_spec(self, args: Args, kwargs: Kwargs) -> Structure:
        leaves = _structures.leaves((args, kwargs))

        # jax traces all arguments. So functions and variables are not among them.
        def of_symbols(*values: Tensor) -> Structure:
            rest = iter(values)
            given = [next(rest) if _is_symbolic(leaf) else leaf for leaf in leaves]
            return self.call(*_structures.pack((args, kwargs), given))

        symbols = tuple(map(_dense, filter(_is_symbolic, leaves)))
        operation = Call(of_symbols, name=self.name)
        try:
            return super(Call, operation).compute_output_spec(symbols, {})
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


def _is_symbolic(leaf: TensorLike) -> bool:
    return isinstance(leaf, keras.KerasTensor)


def _dense(leaf: keras.KerasTensor) -> keras.KerasTensor:
    """A tensor that is dense: Keras takes `2 * x` for sparse, but only while it is symbolic."""
    return keras.KerasTensor(leaf.shape, leaf.dtype) if leaf.sparse else leaf
