"""Cost of HMC against chains and dimensions, and weak scaling over two workers; prints Markdown.

    PYTHONPATH=.:tests python tests/benchmarks/scale.py docs/_static/scale.png > docs/scale.inc

Times are the best of several turns, since a shared machine only ever adds to them.
"""

import json
import os
import socket
import subprocess
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
import two_workers

TURNS = 7
TRANSITIONS = 3
LEAPFROGS = 2
CHAINS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]  # of 1,000 dimensions
DIMENSIONS = [10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
ROWS = 200_000  # for each worker


def values(x):
    return sgtrick.custom_gradient(-0.5 * tf.reduce_sum(x**2, -1), -x, x)


def engine(x):
    return -0.5 * np.sum(x**2), -x


FORMS = {"custom_gradient": values, "from_numpy": sgtrick.from_numpy(engine)}


def hmc(log_prob, chains, dimensions):
    """Seconds of a gradient evaluation, all else that HMC does included."""
    kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.01, LEAPFROGS)
    state = tf.zeros([chains, dimensions])

    @tf.function
    def run(state):
        return tfp.mcmc.sample_chain(
            1, state, kernel=kernel, num_burnin_steps=TRANSITIONS - 1, trace_fn=None, seed=[1, 2]
        )

    run(state)
    seconds = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        run(state).numpy()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / (TRANSITIONS * LEAPFROGS)


def fitted(sizes, seconds):
    """`(a, b, p)` of `a + b * size**p`, by least relative squares."""
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds)
    best = (np.inf,)
    for p in np.arange(0.5, 1.5, 0.005):
        columns = np.stack([np.ones_like(sizes), sizes**p], 1) / seconds[:, None]
        ab, *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
        error = np.sum((columns @ ab - 1) ** 2)
        if min(ab) >= 0 and error < best[0]:
            best = error, *ab, p
    return best[1:]


def worker(task, addresses):
    """Prints the seconds of a step of the fit, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[task]})
    if len(addresses) > 1:
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": task}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.get_strategy()
    random = np.random.default_rng(task)
    data = tf.constant(random.normal(size=(ROWS, 3))), tf.constant(random.normal(size=ROWS))
    times = []
    two_workers.fit(strategy, *data, steps=40, after_step=lambda i: times.append(time.time()))
    print(np.median(np.diff(times)[5:]))


def weak_scaling(n):
    """Seconds of a step with `n` workers, each with the same number of rows."""
    bound = [socket.socket() for _ in range(n)]
    for s in bound:
        s.bind(("127.0.0.1", 0))
    addresses = ["{}:{}".format(*s.getsockname()) for s in bound]
    for s in bound:
        s.close()
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(i), *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for i in range(n)
    ]
    return max(float(w.communicate(timeout=200)[0]) for w in workers)


def plot(curves, path):
    colours = {"custom_gradient": "#0072B2", "from_numpy": "#D55E00"}  # Okabe and Ito's
    markers = {"custom_gradient": "o", "from_numpy": "s"}
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    for axis, (what, forms) in zip(axes, curves.items(), strict=True):
        for name, (sizes, seconds) in forms.items():
            a, b, p = fitted(sizes, seconds)
            line = np.geomspace(sizes[0], sizes[-1], 100)
            axis.plot(line, 1e3 * (a + b * line**p), color=colours[name], lw=1)
            axis.plot(
                sizes, 1e3 * np.array(seconds), markers[name], color=colours[name], label=name, ms=5
            )
        axis.set(xscale="log", yscale="log", xlabel=what)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms a leapfrog step")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main(path):
    curves = {
        "chains, 1,000 dimensions each": {
            name: (CHAINS, [hmc(h, n, 1000) for n in CHAINS]) for name, h in FORMS.items()
        },
        "dimensions, one chain": {
            name: (DIMENSIONS, [hmc(h, 1, n) for n in DIMENSIONS]) for name, h in FORMS.items()
        },
    }
    print("| HMC | against | smallest | largest | fixed part | exponent |")
    print("| --- " * 6 + "|")
    for what, forms in curves.items():
        for name, (sizes, seconds) in forms.items():
            a, _, p = fitted(sizes, seconds)
            ends = [f"{1e3 * s:.3g} ms at {n:,}" for n, s in zip(sizes, seconds, strict=True)]
            print(f"| `{name}` | {what} | {ends[0]} | {ends[-1]} | {1e3 * a:.2g} ms | {p:.2f} |")
    turns = [(weak_scaling(1), weak_scaling(2)) for _ in range(3)]
    one, two = (1e3 * np.array(times) for times in zip(*turns, strict=True))
    print(
        f"\nThe fit of [](distribution.md) with {ROWS:,} rows a worker takes {min(one):.0f} to "
        f"{max(one):.0f} ms a step with one worker and {min(two):.0f} to {max(two):.0f} ms with "
        f"two, one core each, in three turns: an efficiency of {100 * min(one / two):.0f} to "
        f"{100 * max(one / two):.0f} %. TensorFlow {tf.__version__}."
    )
    plot(curves, path)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(int(sys.argv[2]), sys.argv[3:])
    else:
        main(sys.argv[1])
