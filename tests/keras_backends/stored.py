"""Models that hold decorated functions in every place, made here and loaded in a fresh process.

As a script: `stored.py FOLDER` loads each model of the folder, trains it and prints its weights.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
from keras import ops

import sgtrick
import sgtrick.keras

BACKEND = keras.backend.backend()
random = np.random.default_rng(0)
X = random.normal(size=(16, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


def bent(x):
    return x + ops.sin(x)


def bent_slope(x):
    return 1 + ops.cos(x)


def error(y_true, y_pred):
    return ops.mean((y_pred - y_true) ** 2, -1)


def error_slope(y_true, y_pred):
    return 2 * (y_pred - y_true) / y_pred.shape[-1]


def misled(f, name="misled"):
    """A value whose own derivative is lost, so that a lost rule is seen."""

    def value(*args):
        return ops.stop_gradient(f(*args))

    value.__name__ = name  # by which Keras stores it
    return value


def by_vjp():
    @sgtrick.keras.custom_vjp
    def activation(x):
        return misled(bent)(x), lambda u: u * bent_slope(x)

    @sgtrick.keras.custom_vjp
    def loss(y_true, y_pred):
        slope = error_slope(y_true, y_pred)
        return misled(error)(y_true, y_pred), lambda u: (None, u[..., None] * slope)

    return activation, loss


def by_gradient():
    activation = sgtrick.with_gradient(misled(bent, "activation"), bent_slope)
    loss = sgtrick.with_gradient(misled(error, "loss"), error_slope, argnums=1)
    return activation, loss


MAKERS = {"native": lambda: (bent, error), "custom_vjp": by_vjp}
if BACKEND == "tensorflow":  # whose forms all get their names in one way
    MAKERS["with_gradient"] = by_gradient


def registered(form, function, role):
    name = f"{role} by {form}"
    return keras.saving.register_keras_serializable("stored", name)(function)


FORMS = {
    form: tuple(map(registered, [form] * 2, make(), ["activation", "loss"]))
    for form, make in MAKERS.items()
}
# For custom_objects: the same, known to Keras by nothing but their names.
UNREGISTERED = {
    form: dict(zip(("activation", "loss"), make(), strict=True))
    for form, make in MAKERS.items()
    if form != "native"
}


@keras.saving.register_keras_serializable("stored")
class Bent(keras.layers.Layer):
    """A layer that is given the function, and stores it."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)

    def get_config(self):
        function = keras.saving.serialize_keras_object(self.function)
        return {**super().get_config(), "function": function}

    @classmethod
    def from_config(cls, config):
        function = keras.saving.deserialize_keras_object(config.pop("function"))
        return cls(function, **config)


@keras.saving.register_keras_serializable("stored")
class Method(keras.layers.Layer):
    """A layer whose rule is a method."""

    @sgtrick.keras.custom_vjp
    def bent(self, x):
        return misled(bent)(x), lambda u: u * bent_slope(x)

    def call(self, x):
        return self.bent(x)


def in_the_middle(layer, loss=None, metrics=()):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(0.2))(inputs)
    outputs = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant([[0.3], [0.5]]))
    loss = loss or keras.losses.MeanSquaredError()
    return compiled(keras.Model(inputs, outputs(layer(hidden))), loss, metrics)


def compiled(model, loss, metrics=()):
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=list(metrics))
    return model


def load(file, **options):
    model = keras.models.load_model(file, **options)
    # Of the older format, Keras cannot train what it has loaded before it is compiled anew.
    return compiled(model, model.loss) if file.suffix == ".h5" else model


PLACES = {
    "activation": lambda f, loss: in_the_middle(keras.layers.Activation(f)),
    "Dense": lambda f, loss: in_the_middle(keras.layers.Dense(2, f, kernel_initializer="identity")),
    "Lambda": lambda f, loss: in_the_middle(keras.layers.Lambda(f, output_shape=(2,))),
    "layer": lambda f, loss: in_the_middle(Bent(f)),
    "loss": lambda f, loss: in_the_middle(lambda x: x, loss),
    "metric": lambda f, loss: in_the_middle(lambda x: x, metrics=[loss]),
}
OF_KERAS = {
    "call": lambda f, loss: in_the_middle(f),  # the functional API
    "method": lambda f, loss: in_the_middle(Method() if f is not bent else Bent(bent)),
}


def places(form):
    """How a model is made that has the function in each place that is open to the form."""
    return PLACES if form == "with_gradient" else PLACES | OF_KERAS


def trained(model, steps=6):
    """The weights after some steps, and the averages of loss and metric."""
    for i in range(steps):  # without `fit`, whose input pipeline takes longer than all else
        batch = [ops.convert_to_tensor(data.reshape(2, 8, -1)[i % 2]) for data in (X, Y)]
        averages = model.train_on_batch(*batch, return_dict=True)
    weights = [np.asarray(w, "float64").tolist() for w in model.get_weights()]
    return {"weights": weights, "averages": [float(value) for value in averages.values()]}


def main(folder):
    results = {}
    for file in sorted(Path(folder).iterdir()):
        options = {}
        if "unregistered" in file.name:
            form = file.name.split(" in ")[0].removeprefix("unregistered ")
            options["custom_objects"] = UNREGISTERED[form]
        results[file.name] = trained(load(file, **options))
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
