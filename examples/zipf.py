# %% [markdown]
# # Zipf's law in Wonderland: a gradient that TensorFlow does not have
#
# Most words in a book occur once, and a few occur a thousand times. The number $k$ of occurrences
# of a word follows Zipf's law,
#
# $$p(k) = \frac{k^{-s}}{\zeta(s)}, \qquad \zeta(s) = \sum_{n=1}^\infty n^{-s}.$$
#
# TensorFlow Probability has this distribution, but TensorFlow silently takes the derivative of
# $\zeta(s)$ with respect to $s$ to be zero. Any method that follows gradients then ends up in the
# wrong place. `sgtrick.with_gradient` gives $\log\zeta$ the missing derivative, computed in
# NumPy.

# %%
"""The posterior of Zipf's exponent of word counts, with the gradient that TensorFlow lacks."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import special, stats
from tqdm import tqdm

BEGIN = time.perf_counter()


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Newer TensorFlow prints to file descriptor 2 before it reads its own log level."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with silent_stderr():
    import tensorflow as tf
    import tensorflow_probability as tfp

    import sgtrick
    from sgtrick.tfp import Factor
tf.get_logger().setLevel("ERROR")  # effective_sample_size warns of a cast of its own
tfd = tfp.distributions

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()

# %% [markdown]
# ## The counts

# %%
COUNTS = json.loads((HERE / "data" / "alice_word_counts.json").read_text())["counts"]
# WORDS[i] words occur VALUES[i] times.
VALUES, WORDS = np.unique(list(COUNTS.values()), return_counts=True)
total, different = sum(COUNTS.values()), len(COUNTS)
print(f"{total} words, {different} of them different, {WORDS[0]} occur once.")

# %% [markdown]
# ## The derivative
#
# By the Euler-Maclaurin formula, with $f(x) = x^{-s} \log x$ and $N = 100$,
#
# $$-\zeta'(s) = \sum_{n<N} f(n) + \int_N^\infty f + \frac{f(N)}{2} - \frac{f'(N)}{12} + \dots$$

# %%
N = 100


def log_zeta_derivative(s: np.ndarray) -> np.ndarray:
    """The derivative of log zeta: NumPy and SciPy only."""
    n, log = np.arange(1, N), np.log(N)
    with np.errstate(all="ignore"):  # s = 1, where zeta is infinite, is rejected
        head = np.sum(n ** -s[..., None] * np.log(n), axis=-1)
        integral = N * (log / (s - 1) + 1 / (s - 1) ** 2)
        tail = N**-s * (integral + log / 2 - (1 - s * log) / (12 * N))
        return -(head + tail) / special.zeta(s)


def host_derivative(s: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(
        tf.numpy_function(log_zeta_derivative, [s], s.dtype), s.shape
    )


@sgtrick.with_gradient(grad=host_derivative)
def log_zeta(s: tf.Tensor) -> tf.Tensor:
    return tf.math.log(tf.math.zeta(s, tf.ones_like(s)))


s, h = np.linspace(1.1, 4, 30), 1e-5
differences = (np.log(special.zeta(s + h)) - np.log(special.zeta(s - h))) / (2 * h)
error = np.abs(log_zeta_derivative(s) - differences).max()
print(f"The derivative differs from finite differences by {error:.0e} at most.")

# %% [markdown]
# ## Two models
#
# They have the same density, and differ only in its gradient. `Factor` puts a log likelihood into
# a joint distribution.

# %%
PRIOR_MEAN, PRIOR_SD = np.float64(0), np.float64(1)  # of log(s - 1)


def tfp_log_likelihood(s: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(
        WORDS * tfd.Zipf(s[..., None], dtype=s.dtype).log_prob(VALUES), -1
    )


def mended_log_likelihood(s: tf.Tensor) -> tf.Tensor:
    return -s * np.sum(WORDS * np.log(VALUES)) - np.sum(WORDS) * log_zeta(s)


def posterior(
    log_likelihood: Callable[[tf.Tensor], tf.Tensor],
) -> Callable[[tf.Tensor], tf.Tensor]:
    """The unnormalised log posterior of `log(s - 1)`."""

    @tfd.JointDistributionCoroutine
    def model():
        x = yield tfd.JointDistributionCoroutine.Root(
            tfd.Normal(PRIOR_MEAN, PRIOR_SD, name="x")
        )
        yield Factor(log_likelihood(1 + tf.exp(x)), name="words")

    return model.experimental_pin(words=tf.zeros([0])).unnormalized_log_prob


TARGETS = {
    "TensorFlow's gradient": posterior(tfp_log_likelihood),
    "mended gradient": posterior(mended_log_likelihood),
}
x = tf.constant(0.0, tf.float64)
for name, target in TARGETS.items():
    value, gradient = tfp.math.value_and_gradient(target, x)
    print(f"{name:22} at s = 2: log density {value:.3f}, derivative {gradient:9.3f}")

# %% [markdown]
# ## The exact posterior, in one dimension by quadrature with SciPy

# %%
grid = np.linspace(1.4, 2.2, 4001)
likelihood = -grid * np.sum(WORDS * np.log(VALUES))
likelihood -= np.sum(WORDS) * np.log(special.zeta(grid))
log_density = likelihood + stats.norm.logpdf(np.log(grid - 1), PRIOR_MEAN, PRIOR_SD)
density = np.exp(log_density - log_density.max()) / (grid - 1)
density /= density.sum() * (grid[1] - grid[0])
exact_mean = np.average(grid, weights=density)
exact_sd = np.sqrt(np.average((grid - exact_mean) ** 2, weights=density))

# %% [markdown]
# ## Hamiltonian Monte Carlo and variational inference
#
# The acceptance step of HMC uses the density, so a wrong gradient only makes it slow, here so
# slow that chains stay where they started. Variational inference relies on the gradient alone.

# %%
CHAINS, WARM_UP, DRAWS, SEED = 16, 300, 500, 1
START = np.random.default_rng(SEED).normal(PRIOR_MEAN, 0.3, CHAINS)


def sample(target: Callable[[tf.Tensor], tf.Tensor]) -> np.ndarray:
    """Draws of s, `[draw, chain]`."""

    @tf.function(autograph=False)
    def run() -> tf.Tensor:
        hmc = tfp.mcmc.HamiltonianMonteCarlo(
            target, step_size=tf.constant(0.02, tf.float64), num_leapfrog_steps=5
        )
        return tfp.mcmc.sample_chain(
            DRAWS,
            tf.constant(START),
            kernel=tfp.mcmc.DualAveragingStepSizeAdaptation(hmc, int(0.8 * WARM_UP)),
            num_burnin_steps=WARM_UP,
            trace_fn=None,
            seed=[SEED, 0],
        )

    return 1 + np.exp(run())


def fit(target: Callable[[tf.Tensor], tf.Tensor]) -> tuple[float, float]:
    """Mean and standard deviation of a normal distribution of log(s - 1), by VI."""
    loc, log_scale = tf.Variable(PRIOR_MEAN), tf.Variable(np.log(0.1))
    surrogate = tfd.Normal(loc, tfp.util.DeferredTensor(log_scale, tf.exp))
    tfp.vi.fit_surrogate_posterior(
        target,
        surrogate,
        optimizer=tf.keras.optimizers.Adam(0.02),
        num_steps=600,
        sample_size=20,
        trainable_variables=[loc, log_scale],
        jit_compile=False,
        seed=[SEED, 1],
    )
    return loc.numpy(), np.exp(log_scale.numpy())


draws, fits = {}, {}
# disable=None: no bar without a terminal.
for name, target in tqdm(TARGETS.items(), disable=None):
    draws[name] = sample(target)
    loc, scale = fit(target)
    fits[name] = stats.lognorm(scale, loc=1, scale=np.exp(loc))

print(f"\n{'posterior of s':32}{'mean':>9}{'sd':>9}")
print(f"{'exact':32}{exact_mean:9.4f}{exact_sd:9.4f}")
for name in TARGETS:
    print(f"{'HMC, ' + name:32}{draws[name].mean():9.4f}{draws[name].std():9.4f}")
    print(f"{'VI, ' + name:32}{fits[name].mean():9.4f}{fits[name].std():9.4f}")

# %% [markdown]
# ## Figure: the counts and the fitted law, and the posteriors

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
BLUE, VERMILLION = "#0072B2", "#D55E00"  # distinct to colour-blind eyes
ABOVE = {"frameon": False, "loc": "lower center", "bbox_to_anchor": (0.5, 1)}
COLORS = dict(zip(TARGETS, [VERMILLION, BLUE], strict=True))
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})

figure, axes = plt.subplots(1, 3, figsize=(13, 5), layout="constrained")
k = np.geomspace(1, VALUES.max(), 200)
axes[0].loglog(VALUES, WORDS, "o", color="black", ms=4, label="words in the book")
for label, s, color in [
    ("Zipf, mended", draws["mended gradient"].mean(), BLUE),
    ("Zipf, VI without", fits["TensorFlow's gradient"].mean(), VERMILLION),
]:
    law = WORDS.sum() * k**-s / special.zeta(s)
    axes[0].loglog(k, law, color=color, label=f"{label}, $s$ = {s:.2f}")
axes[0].set(
    xlabel="A word occurs so often", ylabel="So many words do", ylim=(0.3, None)
)
axes[0].legend(**ABOVE)

for name, color in COLORS.items():
    axes[1].plot(draws[name][:, :8], color=color, lw=0.8)
    axes[1].plot([], color=color, label=f"HMC, {name}")
    axes[1].axhline(fits[name].mean(), color=color, ls="--", label=f"VI, {name}")
axes[1].set(xlabel="Draw", ylabel="$s$")
axes[1].legend(**ABOVE)

near = exact_mean + 5 * exact_sd * np.linspace(-1, 1, 400)
mended = draws["mended gradient"].ravel()
axes[2].hist(mended, bins=40, density=True, color=BLUE, alpha=0.3, label="HMC, mended")
axes[2].plot(
    near, fits["mended gradient"].pdf(near), "--", color=BLUE, label="VI, mended"
)
axes[2].plot(near, np.interp(near, grid, density), color="black", lw=1, label="exact")
axes[2].set(xlabel="$s$", ylabel="Posterior density", xlim=near[[0, -1]])
axes[2].legend(**ABOVE)
figure.savefig(FIGURES / "zipf.png", dpi=150)
print(f"\nFigure: {FIGURES / 'zipf.png'}")

# %% [markdown]
# ## Verdict

# %%
print(f"{time.perf_counter() - BEGIN:.0f} s")
ess = tfp.mcmc.effective_sample_size(
    draws["mended gradient"], cross_chain_dims=1, filter_beyond_positive_pairs=True
)
mended, wrong = fits["mended gradient"], fits["TensorFlow's gradient"]
checks = {
    "error of the derivative": (error, 0, 1e-6),
    "z of HMC's mean": (
        (draws["mended gradient"].mean() - exact_mean) / exact_sd * ess**0.5,
        -4,
        4,
    ),
    "sd ratio of HMC": (draws["mended gradient"].std() / exact_sd, 0.9, 1.1),
    "VI's mean, off by sds": ((mended.mean() - exact_mean) / exact_sd, -0.3, 0.3),
    "sd ratio of VI": (mended.std() / exact_sd, 0.8, 1.2),
    "VI's mean with TensorFlow's gradient, off by sds": (
        abs(wrong.mean() - exact_mean) / exact_sd,
        10,
        np.inf,
    ),
}
off = [
    f"  {what}: {x:.3g} is not between {low} and {high}"
    for what, (x, low, high) in checks.items()
    if not low <= x <= high  # true for NaN
]
if off:
    sys.exit("The posterior is off:\n" + "\n".join(off))
print("The mended posterior agrees with the exact one, and the other one is far away.")
