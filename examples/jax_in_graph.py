# %% [markdown]
# # A JAX model under XLA: sampled by NUTS, stored, and served without JAX
#
# The ODE of lynxes and hares again, whose solver is written in JAX. With `native=True`, it becomes
# operations of TensorFlow's graph: NUTS is compiled by XLA as a whole, and the model is stored in a
# SavedModel, which a process without JAX and without sgtrick loads.

# %%
"""The posterior of an ODE that is solved in JAX, as operations of TensorFlow."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
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
    import jax
    import jax.numpy as jnp
    import tensorflow as tf
    import tensorflow_probability as tfp

    import sgtrick
tfb, tfd = tfp.bijectors, tfp.distributions
tf.get_logger().setLevel("ERROR")  # effective_sample_size warns of a cast of its own

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()
DATA = json.loads((HERE / "data" / "hudson_lynx_hare.json").read_text())
YEARS = np.array(DATA["year"])
LOG_PELTS = np.log(DATA["pelts"])  # [year, species]
REFERENCE = DATA["reference_posterior"]["parameters"]

# %% [markdown]
# ## The model in JAX
#
# It takes one point and returns the log populations in every year. JAX derives everything else.

# %%
STEPS = 4  # a year, of the Runge-Kutta method


def solve(log_params: jax.Array) -> jax.Array:
    """From `[parameter]` to `[year, species]`."""
    hare_birth, hare_eaten, lynx_death, lynx_fed = jnp.exp(log_params[:4])
    a, b = jnp.stack([hare_birth, -lynx_death]), jnp.stack([-hare_eaten, lynx_fed])

    def slope(y: jax.Array) -> jax.Array:
        return a + b * jnp.exp(y[::-1])

    def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        h = 1 / STEPS
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + h / 2 * k2)
        k4 = slope(y + h * k3)
        y = y + h / 6 * (k1 + 2 * (k2 + k3) + k4)
        return y, y

    start = log_params[4:]
    _, path = jax.lax.scan(step, start, None, length=STEPS * (len(YEARS) - 1))
    return jnp.concatenate([start[None], path[STEPS - 1 :: STEPS]])


trajectory = sgtrick.from_jax(solve, native=True)

# %% [markdown]
# ## Prior and likelihood in TensorFlow
#
# They are those of the example with NumPy. The data determine the averages over a cycle and its
# frequency far better than each parameter, so these are the coordinates of the sampler.

# %%
theta = tfd.TruncatedNormal(
    np.array([1, 0.05, 1, 0.05]), [0.5, 0.05, 0.5, 0.05], 0, np.inf
)
prior = tfd.Blockwise(
    [
        tfd.Independent(tfb.Log()(theta), reinterpreted_batch_ndims=1),
        tfd.MultivariateNormalDiag(np.log([10, 10, np.exp(-1), np.exp(-1)])),
    ]
)
TO_COORDINATES = np.diag([0, 0, 0, 0, 2.0, 2, 1, 1])
TO_COORDINATES[:4, :4] = [[2, -2, 0, 0], [0, 0, 2, -2], [5, 0, 5, 0], [0.7, 0, -0.7, 0]]
TO_LOG_PARAMS = np.linalg.inv(TO_COORDINATES)


def log_density(coordinates: tf.Tensor) -> tf.Tensor:
    log_params = tf.linalg.matvec(TO_LOG_PARAMS, coordinates)
    sigma = tf.exp(log_params[..., tf.newaxis, 6:])
    counts = tfd.Independent(tfd.Normal(trajectory(log_params[..., :6]), sigma), 2)
    return counts.log_prob(LOG_PELTS) + prior.log_prob(log_params)


# %% [markdown]
# ## NUTS under XLA

# %%
CHAINS, WARM_UP, DRAWS, SEED = 16, 150, 250, 1

hares, lynxes = np.mean(DATA["pelts"], axis=0)
rate = 2 * np.pi / 10
guess = np.log([rate, rate / lynxes, rate, rate / hares, *DATA["pelts"][0], 0.4, 0.4])
spread = 0.1 * np.random.default_rng(SEED).standard_normal([CHAINS, len(guess)])
start = tf.constant((guess + spread) @ TO_COORDINATES.T)


@tf.function(autograph=False, jit_compile=True)
def sample(start: tf.Tensor) -> tf.Tensor:
    nuts = tfp.mcmc.DualAveragingStepSizeAdaptation(
        tfp.mcmc.NoUTurnSampler(
            log_density, tf.constant(0.1, start.dtype), max_tree_depth=8
        ),
        num_adaptation_steps=WARM_UP,
        target_accept_prob=tf.constant(0.8, start.dtype),
    )
    return tfp.mcmc.sample_chain(
        DRAWS, start, kernel=nuts, num_burnin_steps=WARM_UP, trace_fn=None, seed=[1, 2]
    )


begin = time.perf_counter()
log_draws = sample(start).numpy() @ TO_LOG_PARAMS.T
compiled = time.perf_counter()
sample(start)
print(
    f"NUTS: {CHAINS} chains, {WARM_UP} steps of warm-up, {DRAWS} draws each, in "
    f"{time.perf_counter() - compiled:.0f} s; with compiling, {compiled - begin:.0f} s"
)

draws = np.exp(log_draws)
ess = tfp.mcmc.effective_sample_size(
    draws, cross_chain_dims=1, filter_beyond_positive_pairs=True
).numpy()
r_hat = tfp.mcmc.potential_scale_reduction(draws, split_chains=True).numpy()
mean, sd = draws.mean(axis=(0, 1)), draws.std(axis=(0, 1))
reference = {
    key: np.array([r[key] for r in REFERENCE.values()]) for key in REFERENCE["theta[1]"]
}
z = (mean - reference["mean"]) / np.hypot(sd / np.sqrt(ess), reference["mcse_mean"])
ratio = sd / reference["sd"]
print(f"\n{'':12}{'mean':>9}{'sd':>8}{'z':>7}{'sd ratio':>10}{'R-hat':>7}{'ESS':>6}")
for i, name in enumerate(REFERENCE):
    quality = f"{z[i]:7.2f}{ratio[i]:10.3f}{r_hat[i]:7.3f}{ess[i]:6.0f}"
    print(f"{name:12}{mean[i]:9.4f}{sd[i]:8.4f}{quality}")

# %% [markdown]
# ## Stored, and served without JAX
#
# The SavedModel has the trajectory and, since custom gradients are stored, its derivatives.

# %%
SERVER = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.modules["jax"] = sys.modules["sgtrick"] = None  # importing them would raise
import tensorflow as tf

model = tf.saved_model.load(sys.argv[1])
x = tf.constant(json.load(sys.stdin), tf.float64)
with tf.GradientTape() as tape:
    tape.watch(x)
    y = model.trajectory(x)
print(json.dumps([y.numpy().tolist(), tape.gradient(y, x).numpy().tolist()]))
"""

some = log_draws[::50, 0, :6]
module = tf.Module()
module.trajectory = tf.function(
    trajectory, input_signature=[tf.TensorSpec([None, 6], tf.float64)]
)
with tempfile.TemporaryDirectory() as folder:
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, folder, options=options)
    served = subprocess.run(
        [sys.executable, "-c", SERVER, folder],
        input=json.dumps(some.tolist()),
        capture_output=True,
        text=True,
        check=True,
    )
values, gradients = json.loads(served.stdout.splitlines()[-1])
x = tf.constant(some)
with tf.GradientTape() as tape:
    tape.watch(x)
    y = trajectory(x)
np.testing.assert_allclose(values, y, rtol=1e-9)
np.testing.assert_allclose(gradients, tape.gradient(y, x), rtol=1e-9)
print("\nThe served model agrees, and so do its gradients.")

# %% [markdown]
# ## Figure: trajectories of some draws, by the served model

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
for k, (axis, color) in enumerate(zip(axes, ["#0072B2", "#D55E00"], strict=True)):
    axis.plot(YEARS, np.exp(np.array(values)[..., k]).T, color=color, alpha=0.5)
    axis.plot(YEARS, np.exp(LOG_PELTS[:, k]), "ko", ms=5)
    axis.set(ylabel=["Hares", "Lynxes"][k] + " (thousand pelts)", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
axes[-1].set(xlabel="Year", xticks=YEARS[::2])
figure.savefig(FIGURES / "jax_in_graph.png", dpi=150)
print(f"Figure: {FIGURES / 'jax_in_graph.png'}")

# %% [markdown]
# ## Verdict

# %%
agrees = (np.abs(z) < 4) & (np.abs(ratio - 1) < 0.2) & (r_hat < 1.05)
if not agrees.all():
    sys.exit(f"The posterior of {', '.join(np.array([*REFERENCE])[~agrees])} is off.")
print("The posterior agrees with the reference.")
