# %% [markdown]
# # Eight schools: a program in Stan, sampled by TensorFlow Probability
#
# Eight schools coached their pupils for a test. For each school we know how much better the
# pupils did, $y_j$, and its standard error, $\sigma_j$ (Rubin, 1981). The effects differ by an
# unknown amount $\tau$:
#
# $$y_j \sim N(\theta_j, \sigma_j), \qquad \theta_j \sim N(\mu, \tau).$$
#
# The model is a Stan program, which Stan compiles and differentiates. `sgtrick.from_numpy` makes
# it a log density of the unconstrained parameters, TensorFlow Probability's NUTS samples it, and
# Stan's own transforms constrain the draws. They are compared with Stan's own sampler and with
# published draws.
#
# This needs PyStan, which runs on Linux and macOS, and ArviZ for the summaries: `pip install
# ".[stan]"` in a clone. The first time, Stan compiles the program for about a minute.

# %%
"""A program that Stan compiles and differentiates, sampled by TensorFlow Probability's NUTS."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

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
    import arviz as az
    import httpstan.models
    import pandas as pd
    import stan
    import tensorflow as tf
    import tensorflow_probability as tfp
    import xarray as xr

    import sgtrick
    from sgtrick.tfp import LogDensity
tfd = tfp.distributions
# Of aiohttp, by which PyStan calls its compiler.
warnings.filterwarnings("ignore", module="httpstan")

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()

# %% [markdown]
# ## The program, and Stan's own sampler
#
# Stan keeps $\tau$ positive by sampling its logarithm. The effects are scaled and shifted normal
# variables, so that the posterior has no funnel.

# %%
PROGRAM = """
data {
  int<lower=0> J;
  vector[J] y;
  vector<lower=0>[J] sigma;
}
parameters {
  vector[J] z;
  real mu;
  real<lower=0> tau;
}
transformed parameters {
  vector[J] theta = mu + tau * z;
}
model {
  mu ~ normal(0, 5);
  tau ~ cauchy(0, 5);
  z ~ normal(0, 1);
  y ~ normal(theta, sigma);
}
"""
SCHOOLS = [*"ABCDEFGH"]
Y, SIGMA = [28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18]
DATA = {"J": len(Y), "y": Y, "sigma": SIGMA}

program = stan.build(PROGRAM, data=DATA, random_seed=1)
fit = program.sample(num_chains=4, num_warmup=500, num_samples=1000)

# %% [markdown]
# ## The engine
#
# PyStan compiles the program to a Python module, which has the log density of the unconstrained
# parameters, including the Jacobian of the transforms, and its gradient. Stan's automatic
# differentiation belongs to the thread that loaded it, whereas TensorFlow calls from any of its
# own threads. `MainThreadExecutor` moves the calls to the main thread, which waits for the
# sampler meanwhile.

# %%
compiled = httpstan.models.import_services_extension_module(program.model_name)
executor = sgtrick.MainThreadExecutor()
DIMENSIONS = len(Y) + 2


@sgtrick.from_numpy(executor=executor)
def log_prob(x: np.ndarray) -> tuple[float, np.ndarray]:
    x = x.tolist()
    gradient = compiled.log_prob_grad(DATA, x, True)
    return compiled.log_prob(DATA, x, True), np.array(gradient)


report = sgtrick.check_gradient(log_prob, tf.linspace(np.float64(-1), 1, DIMENSIONS))
print("The gradient beside differences:", str(report).partition("\n")[0])

# %% [markdown]
# ## NUTS of TensorFlow Probability
#
# The log density belongs to a variable in a joint distribution. Step size and scales adapt during
# the warm-up. The sampler is called through the executor's `run`.

# %%
CHAINS, WARM_UP, DRAWS = 8, 200, 500
model = tfd.JointDistributionSequential(
    [LogDensity(log_prob, [DIMENSIONS], tf.float64, name="x")]
)


@tf.function(autograph=False)
def sample() -> tf.Tensor:
    draws, _ = tfp.experimental.mcmc.windowed_adaptive_nuts(
        DRAWS, model, n_chains=CHAINS, num_adaptation_steps=WARM_UP, seed=[1, 2]
    )
    return draws[0]


x = executor.run(sample).numpy()  # [draw, chain, unconstrained parameter]
print(f"NUTS: {CHAINS} chains, {WARM_UP} steps of warm-up, {DRAWS} draws each.")
print(f"Stan took {log_prob.seconds:.0f} s for {log_prob.calls} calls.")

# %% [markdown]
# ## Stan's transforms
#
# `write_array` computes the parameters of the program and its transformed parameters.

# %%
rows = [
    compiled.write_array(DATA, row.tolist(), True, False)
    for row in x.reshape(-1, DIMENSIONS)
]
# ArviZ expects chains first.
constrained = np.reshape(rows, (DRAWS, CHAINS, -1)).swapaxes(0, 1)
names = program.constrained_param_names
of_tfp = {name: constrained[..., i] for i, name in enumerate(names)}
of_stan = {
    name: draws.to_numpy().reshape(-1, 4).T for name, draws in fit.to_frame().items()
}

# %% [markdown]
# ## The posterior against Stan's own sampler, and against the reference
#
# The reference is posterior eight_schools of posteriordb (BSD-3-Clause): means with their
# standard errors, and standard deviations from the means of the squares. `z` is the difference of
# two means, divided by its standard error.

# %%
SHOWN = [*(f"theta.{j + 1}" for j in range(len(Y))), "mu", "tau"]
REFERENCE = pd.DataFrame(
    {
        "mean": [
            6.1505,
            4.9396,
            3.9059,
            4.7960,
            3.6144,
            4.0511,
            6.3172,
            4.8840,
            4.4105,
            3.6021,
        ],
        "mcse_mean": [
            *[0.0557, 0.0462, 0.0542, 0.0475, 0.0461, 0.0485, 0.0499, 0.0543],
            *[0.0330, 0.0319],
        ],
        "square": [
            *[69.3635, 45.9787, 43.1392, 45.7614, 34.3576, 39.4135, 64.9327, 52.1285],
            *[30.4030, 23.2041],
        ],
    },
    index=SHOWN,
)
REFERENCE["sd"] = np.sqrt(REFERENCE["square"] - REFERENCE["mean"] ** 2)


def summary(draws: dict[str, np.ndarray]) -> pd.DataFrame:
    """By ArviZ, of whatever version: they all take data sets of xarray."""
    data = {name: (["chain", "draw"], values) for name, values in draws.items()}
    return az.summary(xr.Dataset(data), round_to="none").loc[SHOWN]


ours, stans = summary(of_tfp), summary(of_stan)


def z(other: pd.DataFrame) -> pd.Series:
    return (ours["mean"] - other["mean"]) / np.hypot(
        ours["mcse_mean"], other["mcse_mean"]
    )


comparison = {
    "TFP": ours[["mean", "sd", "r_hat"]].assign(ess=ours["ess_bulk"].astype(int)),
    "Stan": stans[["mean", "sd"]].assign(z=z(stans)),
    "reference": REFERENCE[["mean", "sd"]].assign(z=z(REFERENCE)),
}
print(pd.concat(comparison, axis=1).to_string(float_format="{:.2f}".format))

# %% [markdown]
# ## Figure: the measurements, and the effects inferred from them

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
BLUE, ORANGE = "#0072B2", "#E69F00"  # distinct to colour-blind eyes
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})

figure, axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
place = np.arange(len(SHOWN), dtype=float)
axis.hlines(place[:8], np.subtract(Y, SIGMA), np.add(Y, SIGMA), color="0.85", lw=12)
axis.plot(
    Y, place[:8], "o", color="0.6", ms=9, label="measured, and its standard error"
)
for label, draws, color, shift in [
    ("TFP's NUTS: mean, 50 and 90 %", of_tfp, BLUE, -0.2),
    ("Stan's NUTS", of_stan, ORANGE, 0.2),
]:
    low, lower, upper, high = np.transpose(
        [np.quantile(draws[name], [0.05, 0.25, 0.75, 0.95]) for name in SHOWN]
    )
    axis.hlines(place + shift, low, high, color=color, lw=1.5)
    axis.hlines(place + shift, lower, upper, color=color, lw=4)
    means = [draws[name].mean() for name in SHOWN]
    axis.plot(means, place + shift, "o", color=color, ms=6, label=label)
axis.plot(
    REFERENCE["mean"], place, "d", color="black", ms=5, label="reference mean", zorder=9
)
axis.set_yticks(place, [*(f"school {name}" for name in SCHOOLS), r"$\mu$", r"$\tau$"])
axis.invert_yaxis()
axis.set(xlabel="points in the test")
axis.legend(frameon=False, loc="lower right")
figure.savefig(FIGURES / "stan_program.png", dpi=150)
print(f"\nFigure: {FIGURES / 'stan_program.png'}")

# %% [markdown]
# ## Verdict

# %%
ratio = ours["sd"] / REFERENCE["sd"]
agrees = (z(REFERENCE).abs() < 4) & (z(stans).abs() < 4) & ((ratio - 1).abs() < 0.2)
agrees &= ours["r_hat"] < 1.05  # none of these where there is NaN
if not agrees.all():
    sys.exit(f"The posterior of {', '.join(agrees.index[~agrees])} is off.")
print("The posterior agrees with Stan's sampler and with the reference.")
print(f"{time.perf_counter() - BEGIN:.0f} s, more the first time, when Stan compiles")
