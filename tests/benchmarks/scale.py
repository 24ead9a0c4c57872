"""Cost of HMC against chains and dimensions, and weak scaling over two workers; prints Markdown.

    PYTHONPATH=.:tests python tests/benchmarks/scale.py docs/_static/scale.png > docs/scale.inc

Times of HMC are the best of several turns, since a shared machine only ever adds to them; those of the
fits are medians.
"""

import os
import subprocess
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from scipy import optimize

import sgtrick
import two_workers
from hanging import HANGS

TURNS = 7
TRANSITIONS = 3
LEAPFROGS = 2
CHAINS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]  # of 1,000 dimensions
DIMENSIONS = [10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]


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
    """`(a, b, p)` of `a + b * size**p` with `a` and `b` not negative, by least relative squares."""
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds)
    best = (np.inf,)
    for p in np.arange(0.5, 1.5, 0.005):
        columns = np.stack([np.ones_like(sizes), sizes**p], 1) / seconds[:, None]
        ab, error = optimize.nnls(columns, np.ones_like(sizes))
        if error < best[0]:
            best = error, *ab, p
    return best[1:]


NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)


def mixed(w, a, t):
    """A logistic regression with a random intercept for each row, integrated by quadrature."""
    sign = np.where(t > 0, 1.0, -1.0)
    logits, likelihood, slope = a @ w, 0, 0
    for node, weight in zip(NODES, WEIGHTS, strict=True):  # one by one, in the cache
        p = 1 / (1 + np.exp(-sign * (logits + node)))
        likelihood += weight * p
        slope += weight * sign * p * (1 - p)
    return np.sum(np.log(likelihood)), ((slope / likelihood) @ a, None, None)


FITS = {  # likelihood, rows for each process
    "mixed logistic regression": (sgtrick.from_numpy(mixed, event_ndims=(1, 2, 1)), 30_000),
    "linear regression": (two_workers.log_likelihood, 200_000),
}


def worker(fit, task, addresses):
    """Prints the seconds of a step of the fit, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[task]})
    strategy = two_workers.strategy_of(task, addresses)
    log_likelihood, rows = FITS[fit]
    random = np.random.default_rng(task)
    data = tf.constant(random.normal(size=(rows, 3))), tf.constant(random.normal(size=rows))
    times = []
    two_workers.fit(
        strategy, *data, log_likelihood, steps=40, after_step=lambda i: times.append(time.time())
    )
    print(np.median(np.diff(times)[5:]))


def seconds_of_step(fit, n, *, together):
    """Of `n` processes at once: the workers of one fit, or each with a fit of its own."""
    addresses = two_workers.free_addresses(n) if together else []
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", fit, str(i), *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for i in range(n)
    ]
    return max(float(w.communicate(timeout=HANGS)[0]) for w in workers)


def weak_scaling():
    """Prints the time of two workers beside that of two processes that share nothing.

    What those lose against one, the machine takes: its memory and caches are shared.
    """
    print("| fit | rows a process | one process | two apart | two workers | efficiency |")
    print("| --- " * 6 + "|")
    for fit, (_, rows) in FITS.items():
        turns = [
            (
                seconds_of_step(fit, 1, together=False),
                seconds_of_step(fit, 2, together=False),
                seconds_of_step(fit, 2, together=True),
            )
            for _ in range(5)
        ]
        one, apart, two = 1e3 * np.median(turns, 0)
        print(
            f"| {fit} | {rows:,} | {one:.0f}&nbsp;ms | {apart:.0f}&nbsp;ms | {two:.0f}&nbsp;ms | "
            f"{100 * one / two:.0f}&nbsp;% |"
        )
    print(f"\nTensorFlow {tf.__version__}, {os.cpu_count()} cores.")


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
    print("| HMC | against | fixed part | exponent | at the most |")
    print("| --- " * 5 + "|")
    for what, forms in curves.items():
        for name, (sizes, seconds) in forms.items():
            a, _, p = fitted(sizes, seconds)
            of = f"{sizes[0]:,} to {sizes[-1]:,} {what}"
            fixed, largest = f"{1e3 * a:.2g}&nbsp;ms", f"{1e3 * seconds[-1]:.3g}&nbsp;ms"
            print(f"| `{name}` | {of} | {fixed} | {p:.2f} | {largest} |")
    print()
    weak_scaling()
    plot(curves, path)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        main(sys.argv[1])
