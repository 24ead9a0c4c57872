"""Engines of `sgtrick.from_numpy` in Keras: where they can be, and what says so where they cannot."""

import keras
import numpy as np
import pytest
from transformations import BACKEND, array, gradient, tensor

import sgtrick
from sgtrick.keras import custom_gradient

POINTS = np.random.default_rng(5).normal(size=(4, 3))


def waves(x):
    return np.sin(x).sum(-1), np.cos(x)


def absolute(y_true, y_pred):
    residual = y_pred - y_true
    return np.abs(residual).sum(-1), (None, np.sign(residual))


engine = sgtrick.from_numpy(waves, vectorized=True)
loss = sgtrick.from_numpy(absolute, vectorized=True)


@keras.saving.register_keras_serializable("hosts")
def registered_engine(x):
    return engine(x)


@keras.saving.register_keras_serializable("hosts")
def registered_loss(y_true, y_pred):
    return loss(y_true, y_pred)


@keras.saving.register_keras_serializable("hosts")
class Waves(keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        self.engine = sgtrick.from_numpy(waves, vectorized=True)

    def call(self, x):
        return self.factor * self.engine(x)

    def compute_output_shape(self, shape):
        return shape[:-1]

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


def model_with(layer, loss="mse"):
    model = keras.Sequential([keras.Input((3,), dtype="float64"), layer])
    model.compile("sgd", loss, jit_compile=False)
    return model


def in_a_lambda(function):
    return keras.layers.Lambda(function, output_shape=(), dtype="float64")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="engines are called otherwise there")
class TestOnTensorFlow:
    @pytest.mark.parametrize(
        "layer", [in_a_lambda(registered_engine), Waves(1.0, dtype="float64")], ids=["def", "layer"]
    )
    def test_stored_by_a_registered_name(self, layer, tmp_path):
        model_with(layer, registered_loss).save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        (g,) = gradient(model, [tensor(POINTS)], tensor(np.ones(4)))
        np.testing.assert_allclose(g, np.cos(POINTS))

    @pytest.mark.parametrize("suffix", [".keras", ".h5"])
    def test_by_itself_it_is_not_stored(self, tmp_path, suffix):
        with pytest.raises(TypeError, match=r"cannot store waves, .*register_keras_serializable"):
            model_with(in_a_lambda(engine)).save(tmp_path / f"model{suffix}")
        with pytest.raises(TypeError, match="cannot store absolute, a host engine"):
            model_with(Waves(1.0, dtype="float64"), loss).save(tmp_path / f"model{suffix}")


@pytest.mark.skipif(BACKEND == "tensorflow", reason="they are functions of its tensors")
class TestElsewhere:
    @pytest.mark.parametrize("of", ["tensor", "variable", "structure", "derivative"])
    def test_says_what_to_use_there(self, of):
        calls = {
            "tensor": lambda: engine(tensor(POINTS)),
            "variable": lambda: engine(keras.Variable(POINTS)),
            "structure": lambda: engine({"a": tensor(POINTS)}),
            "derivative": lambda: gradient(engine, [tensor(POINTS)], tensor(np.ones(4))),
        }
        message = (
            rf"waves takes tensors of TensorFlow, and x.* is one of {BACKEND}.*custom_gradient"
        )
        with pytest.raises(TypeError, match=message):
            calls[of]()

    def test_and_that_is_right(self):
        def there(x):
            if BACKEND == "torch":
                value, slope = map(tensor, waves(x.detach().numpy()))
            else:
                import jax

                shapes = [jax.ShapeDtypeStruct(s, "float64") for s in (x.shape[:-1], x.shape)]
                value, slope = jax.pure_callback(waves, shapes, jax.lax.stop_gradient(x))
            return custom_gradient(value, slope, x)

        (g,) = gradient(there, [tensor(POINTS)], tensor(np.ones(4)))
        np.testing.assert_allclose(array(g), np.cos(POINTS))
        np.testing.assert_allclose(array(there(tensor(POINTS))), np.sin(POINTS).sum(-1))
