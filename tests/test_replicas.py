"""The same on many replicas: over two devices of this process, and over two worker processes."""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
import two_workers
from two_workers import FORMS, A, B, T, W

SCRIPT = Path(two_workers.__file__)
TIMEOUT = 240  # seconds; TensorFlow itself takes about 15 to see that a worker has died


def expected_gradients():
    """By autodiff of the true function of all the data, in this process."""
    w, b = tf.Variable(W), tf.Variable(B)
    with tf.GradientTape() as tape:
        y = two_workers.value(w, b, tf.constant(A), tf.constant(T))
    return tape.gradient(y, [w, b])


@pytest.fixture(scope="module")
def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def sharded(strategy, data):
    n = strategy.num_replicas_in_sync

    def of(context):
        return tf.constant(data[context.replica_id_in_sync_group :: n])

    return strategy.experimental_distribute_values_from_function(of)


class TestMirrored:
    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
    @pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
    def test_gradients_of_mirrored_variables(self, mirrored, form, wrap):
        with mirrored.scope():
            w, b = tf.Variable(W), tf.Variable(B)
        data = sharded(mirrored, A), sharded(mirrored, T)
        run = wrap(lambda: mirrored.run(two_workers.summed_gradients, ({"h": form}, w, b, *data)))
        for g, expected in zip(run()["h"], expected_gradients(), strict=True):
            copies = mirrored.experimental_local_results(g)
            assert len(copies) == 2
            for copy in copies:
                np.testing.assert_allclose(copy, expected, rtol=1e-12)

    def test_fit(self, mirrored):
        single = two_workers.fit(tf.distribute.get_strategy(), tf.constant(A), tf.constant(T))
        both = two_workers.fit(mirrored, sharded(mirrored, A), sharded(mirrored, T))
        np.testing.assert_allclose(both, single, rtol=1e-10)


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


host_loss = sgtrick.from_numpy(logistic, event_ndims=0)


@sgtrick.with_gradient(grad=lambda margin: -tf.sigmoid(-margin))
def native_loss(margin):
    return tf.math.softplus(-tf.stop_gradient(margin))


@pytest.mark.parametrize("loss", [host_loss, native_loss], ids=["from_numpy", "with_gradient"])
@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_model_fit(mirrored, name, loss):
    keras = importlib.import_module(name)

    def weights(strategy):
        with strategy.scope():
            dense = keras.layers.Dense(2, kernel_initializer=normal(keras, 2))
            model = keras.Sequential([dense, binary_layer(keras)])
            model.compile(
                keras.optimizers.SGD(0.1),
                loss=lambda y, margin: loss(y * margin)[:, 0],
                jit_compile=False,  # which cannot call the host
            )
            model.build((None, 3))
        before = model.get_weights()
        # By batches of 4, 2 for each replica.
        labels = np.sign(A[:, :1])
        model.fit(A, labels, batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert all((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
        return model.get_weights()

    for mine, single in zip(weights(mirrored), weights(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(mine, single, rtol=1e-5, atol=1e-6)


@contextlib.contextmanager
def cluster(*options):
    """Two worker processes, ended whatever happens."""
    with contextlib.ExitStack() as ports:
        bound = [ports.enter_context(socket.socket()) for _ in range(2)]
        for s in bound:
            s.bind(("127.0.0.1", 0))
        addresses = ["{}:{}".format(*s.getsockname()) for s in bound]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    workers = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(task), *addresses, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def ended(worker):
    """Returns `(exit status, stdout, stderr)`; raises `TimeoutExpired` for a worker that hangs."""
    out, err = worker.communicate(timeout=TIMEOUT)
    return worker.returncode, out, err


class TestTwoWorkers:
    def test_gradients_and_fit(self):
        with cluster() as workers:
            replies = []
            for code, out, err in map(ended, workers):
                assert code == 0, err
                replies.append(json.loads(out))
        single = two_workers.fit(tf.distribute.get_strategy(), tf.constant(A), tf.constant(T))
        for reply in replies:
            assert set(reply["gradients"]) == set(FORMS)
            for name, found in reply["gradients"].items():
                for g, expected in zip(found, expected_gradients(), strict=True):
                    np.testing.assert_allclose(g, expected, rtol=1e-12, err_msg=name)
            np.testing.assert_allclose(reply["fit"], single, rtol=1e-10)
        assert replies[0] == replies[1]

    def test_a_worker_that_dies_ends_the_other(self):
        with cluster("--dies") as (other, dying):
            assert ended(dying)[0] == 7
            code, out, err = ended(other)
        assert code not in (0, 7)
        assert not out
        assert "/job:worker/task:1" in err or "/job:worker/replica:0/task:1" in err
