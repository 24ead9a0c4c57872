# %% [markdown]
# # The Nile: a Kalman filter in JAX, fitted by TensorFlow Probability's variational inference
#
# The flow of the Nile, measured at Aswan for a hundred years, is modelled as a drifting level
# plus noise:
#
# $$y_t = \mu_t + \varepsilon_t, \qquad \mu_{t+1} = \mu_t + \eta_t,$$
#
# with $\varepsilon_t$ and $\eta_t$ normal. The likelihood of their two standard deviations is a
# Kalman filter, which JAX compiles and differentiates. Variational inference with several
# importance samples evaluates it on a batch with two dimensions. Each sample needs its own
# gradient, and `tfp.math.custom_gradient` mixes them up.

# %%
"""A JAX likelihood in variational inference with several importance samples."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import linalg, optimize, special, stats
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
    import jax
    import tensorflow as tf
    import tensorflow_probability as tfp

    import sgtrick
    from sgtrick.tfp import Factor
tfd = tfp.distributions

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()

# %% [markdown]
# ## The data, and the likelihood in JAX

# %%
DATA = json.loads((HERE / "data" / "nile.json").read_text())
FLOW = np.array(DATA["flow"], float)
YEARS = np.arange(DATA["year"][0], DATA["year"][1] + 1)
START_VARIANCE = 1e7  # of the first level, around zero: as good as unknown


def filtered_log_likelihood(log_sd: jax.Array) -> jax.Array:
    """The log likelihood of the log standard deviations of noise and drift."""
    noise, drift = jax.numpy.exp(2 * log_sd)

    def year(state: tuple, y: jax.Array) -> tuple:
        level, variance = state
        total = variance + noise
        surprise, gain = y - level, variance / total
        log_p = -0.5 * (surprise**2 / total + jax.numpy.log(2 * np.pi * total))
        return (level + gain * surprise, variance * (1 - gain) + drift), log_p

    return jax.lax.scan(year, (0.0, START_VARIANCE), FLOW)[1].sum()


log_likelihood = sgtrick.from_jax(filtered_log_likelihood)

# %% [markdown]
# The maximum likelihood estimates are published.


# %%
def downhill(x: np.ndarray) -> tuple[float, np.ndarray]:
    value, gradient = tfp.math.value_and_gradient(log_likelihood, tf.constant(x))
    return -value.numpy(), -gradient.numpy()


estimates = np.exp(2 * optimize.minimize(downhill, np.log([100.0, 50.0]), jac=True).x)
published = [DATA["reference"][f"{name}_variance"] for name in ("irregular", "level")]
print(f"Most likely variances {estimates.round(1)}, published {published}.")

# %% [markdown]
# ## The model
#
# `Factor` puts the likelihood into a joint distribution. The prior is wide. The last model is the
# same with TFP's `custom_gradient` in place of sgtrick's.

# %%
PRIOR_MEAN, PRIOR_SD = np.log([100.0, 50.0]), 1.0


def posterior(
    log_likelihood: Callable[[tf.Tensor], tf.Tensor],
) -> Callable[[tf.Tensor], tf.Tensor]:
    """The unnormalised log posterior of the log standard deviations."""

    @tfd.JointDistributionCoroutine
    def model():
        prior = tfd.Independent(tfd.Normal(PRIOR_MEAN, PRIOR_SD), 1, name="log_sd")
        log_sd = yield tfd.JointDistributionCoroutine.Root(prior)
        yield Factor(log_likelihood(log_sd), name="flow")

    return model.experimental_pin(flow=tf.zeros([0])).unnormalized_log_prob


def mixed_up(log_sd: tf.Tensor) -> tf.Tensor:
    fx, gx = tfp.math.value_and_gradient(log_likelihood, log_sd)
    return tfp.math.custom_gradient(fx, gx, log_sd)


# %% [markdown]
# ## The exact answer
#
# In two dimensions it is computed by quadrature, and the likelihood in a different way: the
# hundred flows are jointly normal, with a covariance that NumPy factorises. The logarithm of the
# integral over the parameters is the log evidence, which variational inference bounds from below.

# %%
t = np.arange(len(FLOW))
DRIFTED = np.minimum.outer(t, t)  # years of drift that two years have in common


def dense_log_likelihood(log_noise: float, log_drift: float) -> float:
    level = START_VARIANCE + np.exp(2 * log_drift) * DRIFTED
    factor = np.linalg.cholesky(level + np.exp(2 * log_noise) * np.eye(len(t)))
    z = linalg.solve_triangular(factor, FLOW, lower=True)
    return -0.5 * (z @ z + len(t) * np.log(2 * np.pi)) - np.log(np.diag(factor)).sum()


NOISE, DRIFT = np.meshgrid(
    np.linspace(4.3, 5.2, 61), np.linspace(1.5, 5.5, 81), indexing="ij"
)
GRID = np.stack([NOISE, DRIFT], axis=-1).reshape(-1, 2)
log_density = np.array([dense_log_likelihood(*point) for point in GRID])
log_density += stats.norm.logpdf(GRID, PRIOR_MEAN, PRIOR_SD).sum(axis=1)
weight = np.exp(log_density - log_density.max())
evidence = (
    np.log(weight.sum() * np.ptp(NOISE) / 60 * np.ptp(DRIFT) / 80) + log_density.max()
)
exact_mean = np.average(GRID, axis=0, weights=weight)
exact_sd = np.sqrt(np.average((GRID - exact_mean) ** 2, axis=0, weights=weight))

# %% [markdown]
# ## Variational inference
#
# The components of the surrogate are independent and normal, those of the posterior are not. With
# one sample the bound is the usual ELBO; with 16 importance samples it is tighter.

# %%
STEPS, SAMPLES, SEED = 400, 10, 1
# Means, and logs of standard deviations.
START = np.concatenate([PRIOR_MEAN, np.log([0.3, 0.3])])
RUNS = {
    "1 sample": (posterior(log_likelihood), 1),
    "16 samples": (posterior(log_likelihood), 16),
    "16 samples, TFP's gradient": (posterior(mixed_up), 16),
}


def normal(parameters: tf.Tensor | tf.Variable) -> tfd.Distribution:
    loc = tfp.util.DeferredTensor(parameters, lambda p: p[:2], shape=[2])
    scale = tfp.util.DeferredTensor(parameters, lambda p: tf.exp(p[2:]), shape=[2])
    return tfd.Independent(tfd.Normal(loc, scale), 1)


def fit(
    target: Callable[[tf.Tensor], tf.Tensor], importance: int
) -> tuple[tfd.Distribution, ...]:
    """A surrogate posterior, and the bounds in the course of its fit."""
    parameters = tf.Variable(START)
    surrogate = normal(parameters)
    losses = tfp.vi.fit_surrogate_posterior(
        target,
        surrogate,
        optimizer=tf.keras.optimizers.Adam(0.03),
        num_steps=STEPS,
        sample_size=SAMPLES,
        importance_sample_size=importance,
        trainable_variables=[parameters],
        jit_compile=False,
        seed=[SEED, importance],
    )
    return surrogate, -losses.numpy()


# disable=None: no bar without a terminal.
fits = {name: fit(*run) for name, run in tqdm(RUNS.items(), disable=None)}

# %% [markdown]
# The gradient of the bound at the starting point of the fits, for a fixed set of random numbers,
# compared with finite differences of its value:


# %%
def bound(target: Callable[[tf.Tensor], tf.Tensor], parameters: tf.Tensor) -> tf.Tensor:
    return -tfp.vi.monte_carlo_variational_loss(
        target,
        normal(parameters),
        sample_size=100,
        importance_sample_size=16,
        seed=[SEED, 2],
    )


start, h = tf.Variable(START), 1e-4
target = RUNS["16 samples"][0]
differences = np.array(
    [
        (bound(target, START + h * e) - bound(target, START - h * e)) / (2 * h)
        for e in np.eye(4)
    ]
)
print(f"\n{'gradient of the bound in':28}{'the means':>18}{'log sds':>18}")
print(f"{'finite differences':28}", "".join(f"{d:9.3f}" for d in differences))
gradients = {}
for name in ("16 samples", "16 samples, TFP's gradient"):
    with tf.GradientTape() as tape:
        value = bound(RUNS[name][0], start)
    gradients[name] = tape.gradient(value, start).numpy()
    print(f"{name:28}", "".join(f"{g:9.3f}" for g in gradients[name]))

# %% [markdown]
# The bounds, estimated from many fresh samples, and the posterior means, from importance weights.

# %%
bounds, means = {}, {}
for name, (surrogate, _) in fits.items():
    target, importance = RUNS[name]
    draws = surrogate.sample([importance, 16_000 // importance], seed=[SEED, 99])
    log_weight = (target(draws) - surrogate.log_prob(draws)).numpy()
    bounds[name] = (special.logsumexp(log_weight, axis=0) - np.log(importance)).mean()
    relative = np.exp(log_weight - log_weight.max())
    means[name] = np.average(
        draws.numpy().reshape(-1, 2), axis=0, weights=relative.ravel()
    )

print(f"\n{'':28}{'bound':>10}{'log noise':>11}{'log drift':>11}")
print(f"{'exact':28}{evidence:10.3f}{exact_mean[0]:11.3f}{exact_mean[1]:11.3f}")
for name in RUNS:
    print(f"{name:28}{bounds[name]:10.3f}{means[name][0]:11.3f}{means[name][1]:11.3f}")

# %% [markdown]
# ## Figure: the flow and its level, the posteriors, and the bounds

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
# Distinct to colour-blind eyes.
BLUE, ORANGE, VERMILLION = "#0072B2", "#E69F00", "#D55E00"
COLORS = dict(zip(RUNS, [ORANGE, BLUE, VERMILLION], strict=True))
ABOVE = {"frameon": False, "loc": "lower center", "bbox_to_anchor": (0.5, 1)}
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})
figure, axes = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")

noise, drift = np.exp(2 * means["16 samples"])
level = START_VARIANCE + drift * DRIFTED
gain = np.linalg.solve(level + noise * np.eye(len(t)), level).T
center, sd = gain @ FLOW, np.sqrt(np.diag(level - gain @ level))
axes[0].fill_between(
    YEARS, center - 1.645 * sd, center + 1.645 * sd, color=BLUE, alpha=0.3, lw=0
)
axes[0].plot(YEARS, center, color=BLUE, label="level at the posterior mean, 90 %")
axes[0].plot(YEARS, FLOW, "o", color="black", ms=3, label="flow")
axes[0].set(xlabel="Year", ylabel="Flow ($10^8$ m$^3$ a year)")
axes[0].legend(**ABOVE)

density = weight.reshape(NOISE.shape)
order = np.sort(density.ravel())[::-1]
inside = np.cumsum(order) / order.sum()
levels = [order[np.searchsorted(inside, mass)] for mass in (0.9, 0.5)]
axes[1].contourf(NOISE, DRIFT, density, [*levels, order[0]], colors=["0.88", "0.75"])
circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
for name, (surrogate, _) in fits.items():
    (x, y), (dx, dy) = surrogate.mean().numpy(), surrogate.stddev().numpy()
    for mass in (0.5, 0.9):
        radius = np.sqrt(stats.chi2(2).ppf(mass))
        style = {"color": COLORS[name], "ls": "--" if "TFP" in name else "-"}
        axes[1].plot(
            x + radius * dx * circle.real, y + radius * dy * circle.imag, **style
        )
    axes[1].plot([], **style, label=name)
axes[1].fill_between([], [], color="0.8", label="exact, 50 and 90 %")
axes[1].set(xlabel="log sd of the noise", ylabel="log sd of the drift")
axes[1].set(xlim=(4.45, 5.15), ylim=(2.4, 4.8))
axes[1].legend(**ABOVE)

width = 20
for name, (_, path) in fits.items():
    smooth = np.convolve(path, np.ones(width) / width, "valid")
    style = {"color": COLORS[name], "ls": "--" if "TFP" in name else "-"}
    axes[2].plot(np.arange(width, STEPS + 1), smooth, **style, label=name)
axes[2].axhline(evidence, color="black", lw=1, label="log evidence, exact")
axes[2].set(
    xlabel="Step",
    ylabel=f"Bound, mean of {width} steps",
    ylim=(evidence - 1, evidence + 0.2),
)
axes[2].legend(**ABOVE)
figure.savefig(FIGURES / "variational.png", dpi=150)
print(f"\nFigure: {FIGURES / 'variational.png'}")

# %% [markdown]
# ## Verdict

# %%
print(f"{time.perf_counter() - BEGIN:.0f} s, {log_likelihood.calls} engine calls")
ours, theirs = gradients.values()
off_by = np.abs((means["16 samples"] - exact_mean) / exact_sd).max()
checks = {
    "estimates over published ones": (
        np.max(np.abs(estimates / published - 1)),
        0,
        2e-3,
    ),
    "gradient of the bound, error": (np.abs(ours - differences).max(), 0, 1e-4),
    "TFP's gradient of the bound, error": (
        np.abs(theirs - differences).max(),
        1,
        np.inf,
    ),
    "1 sample's bound under the evidence": (evidence - bounds["1 sample"], 0, 0.5),
    "16 samples' bound under the evidence": (evidence - bounds["16 samples"], 0, 0.05),
    "posterior mean, off by sds": (off_by, 0, 0.05),
}
off = [
    f"  {what}: {x:.3g} is not between {low} and {high}"
    for what, (x, low, high) in checks.items()
    if not low <= x <= high  # true for NaN
]
if off:
    sys.exit("The posterior is off:\n" + "\n".join(off))
print("The posterior agrees with the exact one.")
