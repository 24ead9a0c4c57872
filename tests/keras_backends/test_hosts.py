"""Engines of `sgtrick.from_numpy` in Keras: where they can be, and what says so where they cannot."""

import keras
import numpy as np
import pytest
from keras import ops
from transformations import BACKEND, check_reverse, gradient, tensor

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


def model_with(layer, loss):
    model = keras.Sequential([keras.Input((3,), dtype="float64"), layer])
    model.compile("sgd", loss, jit_compile=False)
    return model


def in_a_lambda(function):
    return keras.layers.Lambda(function, output_shape=(), dtype="float64")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="engines are called otherwise there")
class TestOnTensorFlow:
    def test_stored_by_a_registered_name(self, tmp_path):
        model_with(in_a_lambda(registered_engine), registered_loss).save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        (g,) = gradient(model, [tensor(POINTS)], tensor(np.ones(4)))
        np.testing.assert_allclose(g, np.cos(POINTS))

    @pytest.mark.parametrize(
        ("engine", "loss", "file", "name"),
        [
            (engine, registered_loss, "model.keras", "waves"),
            (registered_engine, loss, "model.h5", "absolute"),
        ],
    )
    def test_by_itself_it_is_not_stored(self, engine, loss, file, name, tmp_path):
        model = model_with(in_a_lambda(engine), loss)
        with pytest.raises(TypeError, match=f"cannot store {name}, .*register_keras_serializable"):
            model.save(tmp_path / file)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="they are functions of its tensors")
class TestElsewhere:
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: engine(keras.Variable(x)),
            lambda x: engine({"a": tensor(x)}),
            lambda x: gradient(engine, [tensor(x)], tensor(np.ones(4))),
        ],
        ids=["variable", "structure", "derivative"],
    )
    def test_says_what_to_use_there(self, call):
        message = f"waves takes tensors of TensorFlow, and x.* is one of {BACKEND}.*custom_gradient"
        with pytest.raises(TypeError, match=message):
            call(POINTS)

    def test_and_that_is_right(self):
        def there(x):
            if BACKEND == "torch":
                return custom_gradient(*waves(x.detach().numpy()), x)
            import jax

            shapes = [jax.ShapeDtypeStruct(s, "float64") for s in (x.shape[:-1], x.shape)]
            return custom_gradient(*jax.pure_callback(waves, shapes, jax.lax.stop_gradient(x)), x)

        def truth(x):
            return ops.cast(ops.sum(ops.sin(x), -1), "float64")  # some of keras.ops are float32

        check_reverse(there, truth, POINTS)
