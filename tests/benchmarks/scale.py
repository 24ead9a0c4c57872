"""Cost of HMC against chains and dimensions; prints Markdown.

    PYTHONPATH=. python tests/benchmarks/scale.py > docs/scale.inc

Times are the best of several turns, since a shared machine only ever adds to them.
"""

import os
import time

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from scipy import optimize

import sgtrick

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


def main():
    sizes = {
        "{:,} to {:,} chains, 1,000 dimensions each": (CHAINS, lambda n: (n, 1000)),
        "{:,} to {:,} dimensions, one chain": (DIMENSIONS, lambda n: (1, n)),
    }
    print("| HMC | against | fixed part | exponent | at the most |")
    print("| --- " * 5 + "|")
    for against, (numbers, shape) in sizes.items():
        for name, form in FORMS.items():
            seconds = [hmc(form, *shape(n)) for n in numbers]
            a, _, p = fitted(numbers, seconds)
            of = against.format(numbers[0], numbers[-1])
            fixed, largest = f"{1e3 * a:.2g}&nbsp;ms", f"{1e3 * seconds[-1]:.3g}&nbsp;ms"
            print(f"| `{name}` | {of} | {fixed} | {p:.2f} | {largest} |")
    print(f"\nTensorFlow {tf.__version__}, {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
