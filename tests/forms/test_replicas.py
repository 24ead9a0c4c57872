"""The same on many replicas: over two devices of this process, and over two worker processes."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import keras_model
import two_workers
from hanging import HANGS
from matrix import spread
from shared import EXECUTED, gradients
from two_workers import FORMS, A, B, T, W

SCRIPT = Path(two_workers.__file__)


def expected_gradients():
    """By autodiff of the true function of all the data, in this process."""
    return gradients(two_workers.value, *map(tf.constant, (W, B, A, T)))[:2]


@pytest.fixture(scope="module")
def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def sharded(strategy, data):
    n = strategy.num_replicas_in_sync

    def of(context):
        return tf.constant(data[context.replica_id_in_sync_group :: n])

    return strategy.experimental_distribute_values_from_function(of)


class TestMirrored:
    @pytest.mark.parametrize(("name", "wrap"), spread(FORMS, EXECUTED, together=1))
    def test_gradients_of_mirrored_variables(self, mirrored, name, wrap):
        with mirrored.scope():
            w, b = tf.Variable(W), tf.Variable(B)
        data = sharded(mirrored, A), sharded(mirrored, T)
        args = {"h": FORMS[name]}, w, b, *data
        run = EXECUTED[wrap](lambda: mirrored.run(two_workers.summed_gradients, args))
        for g, expected in zip(run()["h"], expected_gradients(), strict=True):
            copies = mirrored.experimental_local_results(g)
            assert len(copies) == 2
            for copy in copies:
                np.testing.assert_allclose(copy, expected, rtol=1e-12)

    def test_fit(self, mirrored):
        single = two_workers.fit(tf.distribute.get_strategy(), tf.constant(A), tf.constant(T))
        both = two_workers.fit(mirrored, sharded(mirrored, A), sharded(mirrored, T))
        np.testing.assert_allclose(both, single, rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "loss"), spread(["keras", "tf_keras"], keras_model.LOSSES, together=1)
)
def test_model_fit(mirrored, name, loss):
    keras = importlib.import_module(name)
    strategies = mirrored, tf.distribute.get_strategy()
    # By batches of 4, 2 for each replica.
    both, single = (keras_model.fitted_weights(keras, s, loss, A, 4) for s in strategies)
    for mine, expected in zip(both, single, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def ended():
    """`(exit status, stdout, stderr)` of two worker processes, ended whatever happens.

    Raises `TimeoutExpired` for a worker that hangs.
    """
    addresses = two_workers.free_addresses(2)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(task), *addresses],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=HANGS) for process in processes]
        return [(process.returncode, *o) for process, o in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.long
class TestTwoWorkers:
    def test_gradients_and_fit(self, ended):
        replies = []
        for _, out, err in ended:
            assert out, err
            replies.append(json.loads(out))
        single = two_workers.fit(tf.distribute.get_strategy(), tf.constant(A), tf.constant(T))
        model = two_workers.fitted_models(tf.distribute.get_strategy())
        for reply in replies:
            assert set(reply["gradients"]) == set(FORMS)
            for name, found in reply["gradients"].items():
                for g, expected in zip(found, expected_gradients(), strict=True):
                    np.testing.assert_allclose(g, expected, rtol=1e-12, err_msg=name)
            np.testing.assert_allclose(reply["fit"], single, rtol=1e-10)
            for loss, weights in reply["weights"].items():
                for mine, expected in zip(weights, model[loss], strict=True):
                    np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
        assert replies[0] == replies[1]

    def test_a_worker_that_dies_ends_the_other(self, ended):
        (code, _, err), (died, _, _) = ended
        assert died == 7
        assert code not in (0, 7)
        assert "/job:worker/task:1" in err or "/job:worker/replica:0/task:1" in err
