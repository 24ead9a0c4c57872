# %% [markdown]
# # First steps: from a NumPy function to draws
#
# Wrap a log density written in NumPy, find the mistake in its gradient, sample with NUTS and plot
# the result. Then replace the log density with your own.
#
# The example: before the shuttle Challenger was lost, 7 of 23 flights had come back with damaged
# seals. How likely was damage at the temperature of the next launch?

# %%
"""A NumPy log density, checked, sampled and plotted."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np


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

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()

# %% [markdown]
# ## A function of your own
#
# The function takes one point, an array of parameters, and returns the log density up to a
# constant, and the gradient of the log density. Here it is a logistic regression on temperature,
# with a normal prior.

# %%
FAHRENHEIT = [66, 70, 69, 68, 67, 72, 73, 70, 57, 63, 70, 78, 67, 53, 67, 75, 70, 81]
FAHRENHEIT = np.array([*FAHRENHEIT, 76, 79, 75, 76, 58])
DAMAGED = np.isin(np.arange(23), [1, 8, 9, 10, 13, 20, 22])  # flights
PRIOR_SD = 5.0


def design(fahrenheit: np.ndarray) -> np.ndarray:
    """Columns for level and slope: `[n, 2]`."""
    return np.stack([np.ones_like(fahrenheit), (fahrenheit - 70) / 10], axis=-1)


X = design(FAHRENHEIT.astype(float))


def log_posterior(x: np.ndarray) -> tuple[float, np.ndarray]:
    logits = X @ x
    value = np.sum(DAMAGED * logits - np.logaddexp(0, logits))
    value -= np.sum(x**2) / (2 * PRIOR_SD**2)
    gradient = X.T @ (DAMAGED - 1 / (1 + np.exp(-logits)))  # and the prior?
    return value, gradient


# %% [markdown]
# ## Into TensorFlow
#
# `from_numpy` returns a function of tensors. Leading dimensions are a batch, here the starting
# points of four chains, and the function is called for each chain. If your function takes many
# points in one call, pass `vectorized=True`.

# %%
log_prob = sgtrick.from_numpy(log_posterior)
chains = tf.constant([[0.0, 0.0], [-1.0, -1.0], [-1.0, -3.0], [0.0, -2.0]], tf.float64)
print(log_prob(chains).numpy().round(2))

# %% [markdown]
# ## Is its gradient right?
#
# `check_gradient` compares the gradient with finite differences of the value, at any point where
# the value is finite.

# %%
try:
    sgtrick.check_gradient(log_prob, np.array([1.0, -2.0]))
except sgtrick.GradientCheckError as error:
    print(error)

# %% [markdown]
# Both entries are off by $x_i / 25$: the gradient of the prior is missing. After it is added, the
# check passes. Without the check, the mistake would have gone unnoticed: NUTS would have wasted
# steps, and an optimiser would have stopped in the wrong place.


# %%
@sgtrick.from_numpy
def log_prob(x: np.ndarray) -> tuple[float, np.ndarray]:
    value, gradient = log_posterior(x)
    return value, gradient - x / PRIOR_SD**2


print(sgtrick.check_gradient(log_prob, np.array([1.0, -2.0])))

# %% [markdown]
# ## Sample
#
# Put the sampler inside a `tf.function`: it takes minutes if it is called eagerly. Do not compile
# it with XLA (`jit_compile=True`), which cannot call NumPy.

# %%
WARM_UP, DRAWS = 200, 500


@tf.function(autograph=False)
def sample() -> tf.Tensor:
    nuts = tfp.mcmc.NoUTurnSampler(log_prob, step_size=tf.constant(0.5, tf.float64))
    return tfp.mcmc.sample_chain(
        DRAWS,
        chains,
        kernel=tfp.mcmc.DualAveragingStepSizeAdaptation(nuts, WARM_UP),
        num_burnin_steps=WARM_UP,
        trace_fn=None,
        seed=[1, 2],
    )


draws = sample().numpy()  # [draw, chain, parameter]
r_hat = tfp.mcmc.potential_scale_reduction(draws, split_chains=True).numpy()
print(f"{log_prob.calls} calls in {log_prob.seconds:.1f} s, R-hat {r_hat.round(3)}")

# %% [markdown]
# ## Figure: the risk of damage against temperature

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
BLUE = "#0072B2"
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})

grid = np.linspace(30, 85, 111)
risk = 100 / (1 + np.exp(-draws.reshape(-1, 2) @ design(grid).T))
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for low, high, alpha in [(5, 95, 0.25), (25, 75, 0.45)]:
    band = np.percentile(risk, [low, high], axis=0)
    axis.fill_between(
        grid, *band, color=BLUE, alpha=alpha, lw=0, label=f"{high - low} %"
    )
axis.plot(grid, np.median(risk, axis=0), color=BLUE, lw=2, label="median")
axis.plot(
    FAHRENHEIT, 100 * DAMAGED, "o", color="black", ms=5, alpha=0.5, label="flights"
)
axis.axvline(31, color="black", lw=1, ls="--")
axis.annotate("the launch", (31, 12), (6, 0), textcoords="offset points")
axis.set(xlabel="temperature (°F)", ylabel="probability of damage (%)", xlim=(30, 85))
axis.legend(frameon=False)
figure.savefig(FIGURES / "first_steps.png", dpi=150)
print(f"Figure: {FIGURES / 'first_steps.png'}")

# %% [markdown]
# ## Verdict
#
# With two parameters, the posterior can also be computed by summing over a grid:

# %%
axes = np.linspace(-5, 3, 161), np.linspace(-8, 2, 201)
level, slope = np.meshgrid(*axes, indexing="ij")
points = np.stack([level.ravel(), slope.ravel()], axis=-1)
log_density = log_prob(points).numpy()
weights = np.exp(log_density - log_density.max())
exact = np.average(points, axis=0, weights=weights)
exact_sd = np.sqrt(np.average((points - exact) ** 2, axis=0, weights=weights))
mean, sd = draws.mean((0, 1)), draws.std((0, 1))
for i, name in enumerate(["level at 70 °F", "slope per 10 °F"]):
    ours = f"mean {mean[i]:6.2f}  sd {sd[i]:5.2f}"
    print(f"{name:16} {ours}  exact {exact[i]:6.2f} {exact_sd[i]:5.2f}")
if not np.all(np.abs(mean - exact) < 0.2 * exact_sd) or not np.all(r_hat < 1.05):
    sys.exit("The posterior is off.")
print("The posterior agrees with the exact one.")
