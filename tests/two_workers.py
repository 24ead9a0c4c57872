"""One of several worker processes: gradients of every form, and fits, of data that they share out.

    python two_workers.py TASK ADDRESS...

Prints JSON. After that the last worker dies in the middle of another fit.
"""

import contextlib
import json
import os
import socket
import sys

import numpy as np
import tensorflow as tf
import tf_keras

import keras_model
import sgtrick

_random = np.random.default_rng(11)
A, T = _random.normal(size=(12, 3)), _random.normal(size=12)
W, B = np.array([0.4, -1.1, 0.7]), np.array(1.3)


def value(w, b, a, t):
    return tf.reduce_sum(tf.sin(tf.linalg.matvec(a, w)) * t) * b


def gradients(w, b, a, t):
    s = tf.linalg.matvec(a, w)
    return tf.linalg.matvec(a, t * tf.cos(s), transpose_a=True) * b, tf.reduce_sum(tf.sin(s) * t)


def stopped(w, b, a, t):
    """The value, whose own derivative would be lost."""
    return value(tf.stop_gradient(w), tf.stop_gradient(b), a, t)


def custom_gradient(w, b, a, t):
    return sgtrick.custom_gradient(value(w, b, a, t), gradients(w, b, a, t), (w, b))


def with_hessian(w, b, a, t):
    by_w, by_b = gradients(w, b, a, t)
    curved = a * (t * tf.sin(tf.linalg.matvec(a, w)))[:, None]
    hessian = (-tf.matmul(a, curved, transpose_a=True) * b, by_w / b), (by_w / b, None)
    return sgtrick.custom_gradient(value(w, b, a, t), (by_w, by_b), (w, b), hx=hessian)


def reads_b(w, b, a, t):
    """By `b`, which the function reads, autodiff."""
    h = sgtrick.with_gradient(
        lambda w: value(tf.stop_gradient(w), b, a, t), lambda w: gradients(w, b, a, t)[0]
    )
    return h(w)


def custom_vjp(w, b, a, t):
    @sgtrick.custom_vjp
    def h(w, b):
        return value(w, b, a, t), lambda u: tuple(u * g for g in gradients(w, b, a, t))

    return h(w, b)


def custom_jvp(w, b, a, t):
    @sgtrick.custom_jvp
    def h(w, b):
        return value(w, b, a, t)

    @h.defjvp
    def _(primals, tangents):
        by_w, by_b = gradients(*primals, a, t)
        return h(*primals), tf.reduce_sum(by_w * tangents[0]) + by_b * tangents[1]

    return h(w, b)


def engine(w, b, a, t):
    s = a @ w
    return np.sum(np.sin(s) * t) * b, ((t * np.cos(s)) @ a * b, np.sum(np.sin(s) * t), None, None)


def implicit_root(w, b, a, t):
    w = tf.convert_to_tensor(w)
    root = tf.sign(w) * tf.abs(w) ** (1 / 3)
    return value(sgtrick.implicit_root(lambda r, w: r**3 - w, root, w) ** 3, b, a, t)


def clip_gradient(w, b, a, t):
    return value(sgtrick.clip_gradient(w, -1e4, 1e4), b, a, t)


FORMS = {
    "custom_gradient": custom_gradient,
    "custom_gradient, hx": with_hessian,
    "with_gradient": sgtrick.with_gradient(stopped, gradients, argnums=(0, 1)),
    "with_gradient, reads a variable": reads_b,
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda *args: (stopped(*args), gradients(*args)), argnums=(0, 1)
    ),
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "from_numpy": sgtrick.from_numpy(engine, event_ndims=(1, 0, 2, 1)),
    "implicit_root": implicit_root,
    "clip_gradient": clip_gradient,
}


def summed_gradients(forms, w, b, a, t):
    """The gradients of each form, summed over all replicas."""
    found = {}
    for name, form in forms.items():
        with tf.GradientTape() as tape:
            y = form(w, b, a, t)
        found[name] = tape.gradient(y, [w, b])
        assert all(g is not None for g in found[name]), name
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, found)


def regression(w, a, t):
    """The log likelihood of a linear regression, by NumPy, and its gradient by `w`."""
    residual = t - a @ w
    return -0.5 * np.sum(residual**2), (residual @ a, None, None)


log_likelihood = sgtrick.from_numpy(regression, event_ndims=(1, 2, 1))


def fit(strategy, a, t, after_step=lambda i: None):
    """Variational inference for a regression with a normal prior: means and log scales.

    Every replica takes the same draws, its own data, and its share of prior and entropy.
    """
    with strategy.scope():
        q = [tf.Variable(tf.zeros(3, tf.float64)), tf.Variable(tf.zeros(3, tf.float64))]
    share = 1 / strategy.num_replicas_in_sync

    def step(i, a, t):
        noise = tf.random.stateless_normal([4, 3], [1, i], dtype=tf.float64)
        with tf.GradientTape() as tape:
            mean, log_scale = (tf.convert_to_tensor(v) for v in q)
            w = mean + tf.exp(log_scale) * noise
            prior = -0.5 * tf.reduce_sum(w**2, -1)
            elbo = log_likelihood(w, a, t) + share * (prior + tf.reduce_sum(log_scale))
            elbo = tf.reduce_mean(elbo)
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tape.gradient(elbo, q))

    run = tf.function(lambda i: strategy.run(step, (i, a, t)), autograph=False)
    for i in range(20):
        for v, g in zip(q, run(tf.constant(i)), strict=True):
            v.assign_add(0.03 * strategy.experimental_local_results(g)[0])
        after_step(i)
    return [v.numpy().tolist() for v in q]


def fitted_models(strategy):
    """The weights of a Keras model by loss. Of tf-keras: Keras 3 takes no more than one process."""
    return {
        loss: keras_model.fitted_weights(tf_keras, strategy, loss, A, len(A))
        for loss in keras_model.LOSSES
    }


def free_addresses(n):
    """Of workers of this machine."""
    with contextlib.ExitStack() as ports:
        bound = [ports.enter_context(socket.socket()) for _ in range(n)]
        for s in bound:
            s.bind(("127.0.0.1", 0))
        return ["{}:{}".format(*s.getsockname()) for s in bound]


def strategy_of(task, addresses):
    """That of one of several workers."""
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": task}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(addresses)
    return strategy


def placed(device):
    """Where the operations run for a choice of `device=`, None if it is said to be absent."""
    try:
        return sgtrick.custom_gradient(1.0, 2.0, tf.constant(3.0), device=device).device
    except ValueError as error:
        lists_present = "/job:worker/replica:0/task:1/device:CPU:0" in str(error)
        return None if lists_present else str(error)


def main(task, addresses):
    strategy = strategy_of(task, addresses)
    n = strategy.num_replicas_in_sync
    own = f"/job:worker/replica:0/task:{task}/device:CPU:0"
    assert placed("CPU:0") == placed(own) == placed(f"/task:{task}/CPU:0") == own
    assert placed("/job:worker/task:3/CPU:0") is placed("/job:localhost/CPU:0") is None
    a, t = tf.constant(A[task::n]), tf.constant(T[task::n])
    with strategy.scope():
        w, b = tf.Variable(W), tf.Variable(B)
    run = tf.function(lambda: strategy.run(summed_gradients, (FORMS, w, b, a, t)), autograph=False)
    local = tf.nest.map_structure(lambda g: strategy.experimental_local_results(g)[0], run())
    found = tf.nest.map_structure(lambda g: g.numpy().tolist(), local)
    reply = {"gradients": found, "fit": fit(strategy, a, t), "weights": fitted_models(strategy)}
    print(json.dumps(reply), flush=True)

    def after_step(i):
        if task == n - 1 and i == 5:
            os._exit(7)

    fit(strategy, a, t, after_step=after_step)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
