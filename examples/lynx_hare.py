# %% [markdown]
# # Lynx and hare: an ODE solved in NumPy, sampled by TensorFlow Probability
#
# For two centuries the Hudson's Bay Company counted the pelts it bought. Hares and lynxes follow
# the Lotka-Volterra equations
#
# $$\dot u = (\theta_1 - \theta_2 v)\,u, \qquad \dot v = (-\theta_3 + \theta_4 u)\,v,$$
#
# with $u$ hares and $v$ lynxes, and pelts lognormal around them. Solver and sensitivities live
# outside TensorFlow, as they would with an engine of your own. `sgtrick.custom_gradient` brings
# their value and gradient in, NUTS samples, and the posterior must agree with the reference.

# %%
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

BEGIN = time.perf_counter()


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Newer TensorFlow greets on file descriptor 2 before it has read its own log level."""
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

HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()  # no file in a notebook

# %% [markdown]
# ## Data, priors, reference

# %%
DATA = json.loads((HERE / "data" / "hudson_lynx_hare.json").read_text())
YEARS = np.array(DATA["year"])
LOG_PELTS = np.log(DATA["pelts"])[..., None]  # [year, species, 1]: the last axis is for chains
REFERENCE = DATA["reference_posterior"]["parameters"]
NAMES = {
    "theta[1]": "hare birth",
    "theta[2]": "hare eaten",
    "theta[3]": "lynx death",
    "theta[4]": "lynx fed",
    "z_init[1]": "hares 1900",
    "z_init[2]": "lynxes 1900",
    "sigma[1]": "hare noise",
    "sigma[2]": "lynx noise",
}
# theta is normal, truncated to be positive; the rest is lognormal, so that its log is normal.
THETA_MEAN, THETA_SD = np.array([1, 0.05, 1, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
LOG_MEAN, LOG_SD = np.log([10, 10, np.exp(-1), np.exp(-1)]), 1.0

# %% [markdown]
# ## The engine: NumPy only
#
# All parameters are positive, so we sample their logs. For the logs of the populations the
# equations read $\dot y_k = a_k + b_k e^{y_{1-k}}$. Column 0 of the state is $y$, columns 1 to 6
# are its derivatives by $\log\theta$ and $\log z_0$, which obey the differentiated equations. Chains
# are the last axis, so that one solve serves them all.

# %%
# Which columns take b e^y itself: y, and the derivatives by the log of the factor in b.
SELF = np.zeros([2, 7, 1])
SELF[:, 0] = SELF[0, 2] = SELF[1, 4] = 1
TANGENT = np.arange(7)[:, None] > 0


def solve(log_params: np.ndarray, steps_per_year: int = 4) -> np.ndarray:
    """Runge-Kutta 4 from `[chain, parameter]` to `[step, species, column, chain]`.

    The derivatives are exactly those of the discrete solution. Against `solve_ivp` at tolerance
    1e-12, over parameters as spread as the posterior, log populations are off by at most 3e-4
    (4 steps a year) or 2e-5 (8), where the noise is 0.25.
    """
    hare_birth, hare_eaten, lynx_death, lynx_fed = np.exp(log_params[:, :4].T)
    a = np.zeros([2, 7, len(log_params)])
    a[0, :2] = hare_birth
    a[1, [0, 3]] = -lynx_death
    b = np.stack([-hare_eaten, lynx_fed])[:, None]

    def slope(y: np.ndarray) -> np.ndarray:
        other = y[::-1]
        return a + b * np.exp(other[:, :1]) * (SELF + TANGENT * other)

    y = np.zeros_like(a)
    y[:, 0] = log_params[:, 4:6].T
    y[0, 5] = y[1, 6] = 1
    path, h = [y], 1 / steps_per_year
    for _ in range(steps_per_year * (len(YEARS) - 1)):
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + h / 2 * k2)
        k4 = slope(y + h * k3)
        y = y + h / 6 * (k1 + 2 * (k2 + k3) + k4)
        path.append(y)
    return np.stack(path)


def log_density_and_gradient(log_params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log posterior of the log parameters, `[chain]`, and its gradient, `[chain, parameter]`."""
    log_density_and_gradient.calls += 1
    with np.errstate(all="ignore"):  # what overflows is rejected below
        path = solve(log_params)[::4]
        log_z, sensitivity = path[:, :, 0], path[:, :, 1:]
        sigma = np.exp(log_params[:, 6:].T)
        residual = (LOG_PELTS - log_z) / sigma
        theta, rest = np.exp(log_params[:, :4]), log_params[:, 4:]
        theta_z, rest_z = (theta - THETA_MEAN) / THETA_SD, (rest - LOG_MEAN) / LOG_SD
        value = (
            -np.sum(residual**2 / 2 + np.log(sigma), axis=(0, 1))
            - np.sum(theta_z**2 / 2 - log_params[:, :4], axis=1)  # the log is the Jacobian's
            - np.sum(rest_z**2 / 2, axis=1)
        )
        gradient = np.concatenate(
            [1 - theta_z * theta / THETA_SD, -rest_z / LOG_SD], axis=1
        )
        gradient[:, :6] += np.einsum("tkc,tkjc->cj", residual / sigma, sensitivity)
        gradient[:, 6:] += np.sum(residual**2 - 1, axis=0).T
    valid = np.isfinite(value) & np.isfinite(gradient).all(axis=1)
    return np.where(valid, value, -np.inf), np.where(valid[:, None], gradient, 0)


log_density_and_gradient.calls = 0

# %% [markdown]
# ## Into TensorFlow
#
# This is all that sgtrick needs: `x` is `[chain, parameter]`, `fx` is `[chain]`, `gx` is like `x`.
# What is TensorFlow's own stays differentiable. Here that is a change of coordinates: the data tell
# the averages over a cycle, $\theta_1/\theta_2$ and $\theta_3/\theta_4$, and the frequency,
# $\sqrt{\theta_1\theta_3}$, far better than each $\theta$, so NUTS needs a third of the steps there. The
# change is linear in the logs, thus its Jacobian is constant.

# %%
TO_COORDINATES = np.eye(8)
TO_COORDINATES[:4, :4] = [[1, -1, 0, 0], [0, 0, 1, -1], [0.5, 0, 0.5, 0], [1, 0, -1, 0]]
TO_LOG_PARAMS = np.linalg.inv(TO_COORDINATES)


def log_density(coordinates: tf.Tensor) -> tf.Tensor:
    x = tf.linalg.matvec(TO_LOG_PARAMS, coordinates)
    fx, gx = tf.numpy_function(log_density_and_gradient, [x], [x.dtype, x.dtype])
    fx.set_shape(x.shape[:1])  # what comes from the host has lost its shape
    gx.set_shape(x.shape)
    return sgtrick.custom_gradient(fx, gx, x)


# %% [markdown]
# ## NUTS
#
# The mass matrix is estimated once, half-way through the warm-up (without `num_estimation_steps`
# it would change for ever, and the draws would not be from the posterior). The step size adapts
# to it in the other half and is then fixed.

# %%
CHAINS, WARM_UP, DRAWS, SEED = 8, 200, 400, 1
rng = np.random.default_rng(SEED)
hares, lynxes = np.mean(DATA["pelts"], axis=0)
rate = 2 * np.pi / 10  # the peaks are ten years apart
start = np.log([rate, rate / lynxes, rate, rate / hares, *DATA["pelts"][0], 0.4, 0.4])
start = start + 0.1 * rng.standard_normal([CHAINS, len(start)])
start = tf.constant(start @ TO_COORDINATES.T)

kernel = tfp.experimental.mcmc.PreconditionedNoUTurnSampler(
    log_density, step_size=tf.constant(0.1, tf.float64), max_tree_depth=8
)
kernel = tfp.mcmc.DualAveragingStepSizeAdaptation(
    kernel, WARM_UP, target_accept_prob=tf.constant(0.8, tf.float64)
)
kernel = tfp.experimental.mcmc.DiagonalMassMatrixAdaptation(
    kernel,
    tfp.experimental.stats.RunningVariance.from_shape(start.shape[1:], start.dtype),
    num_estimation_steps=WARM_UP // 2,
)
bootstrap = tf.function(kernel.bootstrap_results, autograph=False)
transition = tf.function(kernel.one_step, autograph=False)

state, results, draws = start, bootstrap(start), []
seeds = tf.random.experimental.stateless_split([SEED, 0], WARM_UP + DRAWS)
for seed in tqdm(seeds, desc="NUTS", disable=None):  # None: no bar where there is no terminal
    state, results = transition(state, results, seed=seed)
    if os.environ.get('DBG'):
        u = tfp.experimental.mcmc if 0 else None
        from tensorflow_probability.python.internal import unnest
        i=len(draws)
        print(i, unnest.get_innermost(results,'step_size').numpy(), unnest.get_innermost(results,'leapfrogs_taken').numpy(), unnest.get_innermost(results,'target_log_prob').numpy().round(1), time.perf_counter()-BEGIN, unnest.get_innermost(results,'has_divergence').numpy().sum())
    draws.append(state)
log_draws = np.array(draws[WARM_UP:]) @ TO_LOG_PARAMS.T  # [draw, chain, parameter]
print(log_density_and_gradient.calls, np.exp(log_draws).mean((0,1)))
