"""A Keras model whose layer and loss use sgtrick, for Keras 3 and tf-keras on any strategy."""

import numpy as np
import tensorflow as tf

import sgtrick


def normal(keras, seed):
    return keras.initializers.RandomNormal(seed=seed)


def binary_layer(keras):
    class Binary(keras.layers.Layer):
        """Weights of -1 and 1, trained straight through."""

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 1), initializer=normal(keras, 1))

        def call(self, x):
            kernel = tf.convert_to_tensor(self.kernel)
            return x @ sgtrick.straight_through(tf.sign(kernel), kernel)

    return Binary()


def logistic(margin):
    """A loss and its derivative by NumPy, for one example."""
    return np.logaddexp(0, -margin), -1 / (1 + np.exp(margin))


@sgtrick.with_gradient(grad=lambda margin: -tf.sigmoid(-margin))
def native_loss(margin):
    return tf.math.softplus(-tf.stop_gradient(margin))


LOSSES = {
    "from_numpy": sgtrick.from_numpy(logistic, event_ndims=0),
    "with_gradient": native_loss,
}


def fitted_weights(keras, strategy, loss, features, batch_size):
    """The weights after some steps of `model.fit`, which changes them all."""
    with strategy.scope():
        dense = keras.layers.Dense(2, kernel_initializer=normal(keras, 2))
        model = keras.Sequential([dense, binary_layer(keras)])
        model.compile(
            keras.optimizers.SGD(0.1),
            loss=lambda y, margin: LOSSES[loss](y * margin)[:, 0],
            jit_compile=False,  # which cannot call the host
        )
        model.build((None, features.shape[-1]))
    before = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((features, np.sign(features[:, :1])))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model.fit(data.batch(batch_size).with_options(options), epochs=2, shuffle=False, verbose=0)
    assert all((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    return [weight.tolist() for weight in model.get_weights()]
