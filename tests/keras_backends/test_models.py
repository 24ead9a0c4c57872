"""`sgtrick.keras` inside models: a layer and a loss in `fit`, mixed precision."""

import keras
import numpy as np
import pytest
from keras import ops
from transformations import array, dtype_of, gradient

import sgtrick.keras

random = np.random.default_rng(0)
X = random.normal(size=(16, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.3).astype("float32")
START = [[0.1], [0.2], [0.3]]


@sgtrick.keras.custom_vjp
def matmul(x, kernel):
    """A product whose forward computation has no derivative of its own."""
    value = ops.stop_gradient(ops.matmul(x, kernel))
    return value, lambda u: (
        ops.matmul(u, ops.transpose(kernel)),
        ops.matmul(ops.transpose(x), u),
    )


class Linear(keras.layers.Layer):
    """`x @ kernel`, by one of the forms or natively."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form = form

    def build(self, input_shape):
        start = keras.initializers.Constant(START)
        self.kernel = self.add_weight(shape=(input_shape[-1], 1), initializer=start)

    def call(self, x):
        kernel = ops.convert_to_tensor(self.kernel)
        if self.form == "native":
            return ops.matmul(x, kernel)
        if self.form == "custom_vjp":
            return matmul(x, self.kernel)
        value = ops.stop_gradient(ops.matmul(x, kernel))[:, 0]
        # x belongs to the batch, the kernel is shared by it: gx is fx.shape + kernel.shape.
        gx = [ops.broadcast_to(kernel[:, 0], ops.shape(x)), x[..., None]]
        by_x = sgtrick.keras.custom_gradient(value, [gx[0], None], [x, kernel], batch_ndims=1)
        by_kernel = sgtrick.keras.custom_gradient(value, gx[1], kernel, batch_ndims=0)
        return ops.expand_dims(by_x + by_kernel - ops.stop_gradient(by_x), -1)


def squared_error(y_true, y_pred):
    """A loss whose value has no derivative of its own."""
    residual = y_pred - y_true
    value = ops.stop_gradient(ops.mean(residual**2, -1))
    return sgtrick.keras.custom_gradient(value, 2 * residual, y_pred)


def make(form, loss, dtype):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(3, kernel_initializer="identity", dtype=dtype)(inputs)
    model = keras.Model(inputs, Linear(form, dtype=dtype)(hidden))
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


def trained(model):
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [np.array(w, "float32") for w in model.get_weights()]


@pytest.mark.parametrize(("dtype", "rtol"), [(None, 1e-4), ("mixed_bfloat16", 0.03)])
def test_fit_takes_the_steps_of_the_native_layer_and_loss(dtype, rtol):
    native, *forms = (
        trained(make(form, loss, dtype))
        for form, loss in [
            ("native", "mse"),
            ("custom_vjp", "mse"),
            ("custom_gradient", squared_error),
        ]
    )
    assert np.abs(native[2] - START).max() > 0.1
    for weights in forms:
        for a, b in zip(weights, native, strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_an_argument_that_a_batch_shares_in_half_precision():
    """Its gradient is a sum over the batch, which float16 ends at 2,048."""
    rows = ops.ones((4096, 2), "float16")

    def form(w):
        return sgtrick.keras.custom_gradient(ops.matmul(rows, w), rows, w)

    w, u = ops.ones((2,), "float16"), ops.full((4096,), 1 / 4096, "float16")
    (came,) = gradient(form, [w], u)
    assert dtype_of(came) == "float16"
    np.testing.assert_allclose(array(came), [1, 1], rtol=1e-3)
