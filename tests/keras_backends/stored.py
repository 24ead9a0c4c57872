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


def by_vjp(decorator):
    def activation(x):
        return misled(bent)(x), lambda u: u * bent_slope(x)

    def loss(y_true, y_pred):
        slope = error_slope(y_true, y_pred)
        return misled(error)(y_true, y_pred), lambda u: (None, u[..., None] * slope)

    return decorator(activation), decorator(loss)


def by_gradient():
    activation = sgtrick.with_gradient(misled(bent, "activation"), bent_slope)
    loss = sgtrick.with_gradient(misled(error, "loss"), error_slope, argnums=1)
    return activation, loss


def by_jvp():
    activation = sgtrick.custom_jvp(misled(bent, "activation"))
    loss = sgtrick.custom_jvp(misled(error, "loss"))

    @activation.defjvp
    def _(primals, tangents):
        return bent(*primals), bent_slope(*primals) * tangents[0]

    @loss.defjvp
    def _(primals, tangents):
        slope = error_slope(*primals)
        return error(*primals), ops.sum(slope * (tangents[1] - tangents[0]), -1)

    return activation, loss


MAKERS = {
    "native": lambda: (bent, error),
    "keras.custom_vjp": lambda: by_vjp(sgtrick.keras.custom_vjp),
    "custom_vjp": lambda: by_vjp(sgtrick.custom_vjp),
    "with_gradient": by_gradient,
    "custom_jvp": by_jvp,
}
OF_KERAS = ["native", "keras.custom_vjp"]
OF_TENSORFLOW = ["custom_vjp", "with_gradient", "custom_jvp"]
ENABLED = OF_KERAS + (OF_TENSORFLOW if BACKEND == "tensorflow" else [])


def registered(form, function, role):
    name = f"{role} by {form}"
    return keras.saving.register_keras_serializable("stored", name)(function)


FORMS = {
    form: tuple(map(registered, [form] * 2, MAKERS[form](), ["activation", "loss"]))
    for form in ENABLED
}
# For custom_objects: the same, known to Keras by nothing but their names.
UNREGISTERED = {
    form: {"activation": activation, "loss": loss}
    for form, (activation, loss) in ((f, MAKERS[f]()) for f in ENABLED if f != "native")
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
OF_SYMBOLS = {"call": lambda f, loss: in_the_middle(f)}  # the functional API
OF_METHODS = {"method": lambda f, loss: in_the_middle(Method() if f is not bent else Bent(bent))}


def places(form):
    """How a model is made that has the function in each place that is open to the form."""
    return PLACES | (OF_SYMBOLS | OF_METHODS if form in OF_KERAS else {})


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
