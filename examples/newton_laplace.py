# %% [markdown]
# # Newton's method and Laplace's approximation with a solver in NumPy
#
# The posterior of *lynx_hare* again, from 21 years of pelts and the Lotka-Volterra equations.
# There, NUTS calls the solver thousands of times. Newton's method, which needs the Hessian, finds
# the mode in eight steps, and the Hessian at the mode gives Laplace's approximation: around the
# mode $\hat x$ the posterior is approximately normal,
#
# $$x \mid \text{data} \;\sim\; N\left(\hat x,\; \left(-\nabla^2\log p(\hat x)\right)^{-1}\right).$$
#
# The solver is outside TensorFlow. `sgtrick.from_numpy` takes its gradient and, as `hessp`, its
# second derivatives; TensorFlow computes those of the prior. Without `hessp`, a Hessian that
# lacks the solver's part would look plausible, so sgtrick raises instead.

# %%
"""Newton's method and a Laplace approximation, with second derivatives of a solver in NumPy."""

import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import lognorm

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
tfb, tfd = tfp.bijectors, tfp.distributions

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()

# %% [markdown]
# ## Data and reference

# %%
DATA = json.loads((HERE / "data" / "hudson_lynx_hare.json").read_text())
LOG_PELTS = np.log(DATA["pelts"])  # [year, species]
REFERENCE = DATA["reference_posterior"]["parameters"]
NAMES = {
    "theta[1]": ("hare birth", "per year"),
    "theta[2]": ("hare eaten", "per year, per thousand lynxes"),
    "theta[3]": ("lynx death", "per year"),
    "theta[4]": ("lynx fed", "per year, per thousand hares"),
    "z_init[1]": ("hares 1900", "thousand pelts"),
    "z_init[2]": ("lynxes 1900", "thousand pelts"),
    "sigma[1]": ("hare noise", "of log pelts"),
    "sigma[2]": ("lynx noise", "of log pelts"),
}

# %% [markdown]
# ## The solver, and its derivatives of first and second order
#
# All parameters are positive, and $x$ holds their logs. With $y_k$ the logs of the two
# populations, the equations are $\dot y_k = a_k + b_k e^{y_{1-k}}$. Column 0 of the state is $y$;
# columns 1 to 6 are its derivatives with respect to the logs of $\theta$ and of the populations
# in 1900, which satisfy the differentiated equations. So Runge-Kutta returns the exact
# derivatives of what it computes.
#
# For the second derivatives, the same code runs once more, with complex numbers. For a gradient
# $g$ that consists of analytic functions,
#
# $$\nabla^2 f(x)\,v = \operatorname{Im}\, g(x + i h v) / h + O(h^2),$$
#
# and since nothing is subtracted, $h$ can be $10^{-30}$, so that only rounding errors remain.

# %%
# Columns that take b e^y itself: y, and its derivative with respect to the log of
# the factor in b.
SELF = np.zeros([2, 7])
SELF[:, 0] = SELF[0, 2] = SELF[1, 4] = 1
TANGENT = np.arange(7) > 0
STEPS = 4  # a year


def solve(x: np.ndarray) -> np.ndarray:
    """Runge-Kutta 4: `[year, species, column]`."""
    hare_birth, hare_eaten, lynx_death, lynx_fed = np.exp(x[:4])
    a = np.zeros([2, 7], x.dtype)
    a[0, :2] = hare_birth
    a[1, [0, 3]] = -lynx_death
    b = np.array([[-hare_eaten], [lynx_fed]])

    def slope(y: np.ndarray) -> np.ndarray:
        other = y[::-1]
        return a + b * np.exp(other[:, :1]) * (SELF + TANGENT * other)

    y = np.zeros_like(a)
    y[:, 0] = x[4:6]
    y[0, 5] = y[1, 6] = 1
    path, h = [y], 1 / STEPS
    for _ in range(STEPS * (len(LOG_PELTS) - 1)):
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + h / 2 * k2)
        k4 = slope(y + h * k3)
        y = y + h / 6 * (k1 + 2 * (k2 + k3) + k4)
        path.append(y)
    return np.stack(path[::STEPS])


def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
    """The log likelihood and its gradient."""
    path, sigma = solve(x), np.exp(x[6:])
    residual = (LOG_PELTS - path[:, :, 0]) / sigma
    value = -np.sum(residual**2 / 2 + np.log(sigma))
    by_path = np.einsum("tk,tkj->j", residual / sigma, path[:, :, 1:])
    return value, np.concatenate([by_path, np.sum(residual**2 - 1, axis=0)])


def hessian_times(x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The Hessian of the log likelihood times `v`."""
    return value_and_gradient(x + 1e-30j * v)[1].imag / 1e-30


log_likelihood = sgtrick.from_numpy(value_and_gradient, hessp=hessian_times)

# %% [markdown]
# ## Check it
#
# `check_gradient(order=2)` compares both derivatives of the engine with finite differences: 8
# entries of the gradient and 64 of the Hessian. The point is a guess of the parameters: averages
# over a cycle are the equilibrium, and the peaks are ten years apart.

# %%
hares, lynxes = np.mean(DATA["pelts"], axis=0)
rate = 2 * np.pi / 10
guess = np.log([rate, rate / lynxes, rate, rate / hares, *DATA["pelts"][0], 0.4, 0.4])

report = sgtrick.check_gradient(log_likelihood, guess, order=2)
print("The engine against differences:", str(report).partition("\n")[0])

# %% [markdown]
# ## The posterior, differentiated twice
#
# The prior of the logs is written in TensorFlow Probability: $\theta$ is normal, truncated to be
# positive, and the rest is lognormal. The Hessian of the posterior is the Jacobian of its
# gradient. Each of its 8 rows takes one product with the Hessian of the engine.

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


def derivatives(x: tf.Tensor, likelihood=log_likelihood) -> tuple[np.ndarray, ...]:
    """The log density of the posterior, its gradient and its Hessian."""
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = likelihood(x) + prior.log_prob(x)
        gradient = inner.gradient(value, x)
    hessian = outer.jacobian(gradient, x, experimental_use_pfor=False)  # row by row
    return value.numpy(), gradient.numpy(), hessian.numpy()


# %% [markdown]
# ## Without the Hessian of the engine
#
# The same engine with its gradient alone. A tape that silently left out the engine's part would
# return the Hessian of the prior, with standard deviations many times too large.

# %%
first_order = sgtrick.from_numpy(value_and_gradient, name="first_order")
refused = False
try:
    derivatives(tf.constant(guess), first_order)
except LookupError as error:
    refused = True
    print(f"\nWithout hessp:\n{textwrap.fill(f'LookupError: {error}', 88)}")

# %% [markdown]
# ## The mode, by Newton's method
#
# Far from the mode the Hessian has eigenvalues of both signs. Their absolute values make each
# step point uphill, and it is halved until the density increases. Near the mode the number of
# correct digits doubles with each step.

# %%
x, calls, products = guess, log_likelihood.calls, log_likelihood.hess_calls
value, gradient, hessian = derivatives(tf.constant(x))
print(f"\n{'step':>4}{'log density':>14}{'|gradient|':>12}{'smallest eigenvalue':>21}")
for step in range(50):
    curvature, axes = np.linalg.eigh(-hessian)
    print(f"{step:4}{value:14.6f}{np.linalg.norm(gradient):12.1e}{curvature[0]:21.3g}")
    if np.linalg.norm(gradient) < 1e-8:
        break
    move = axes @ (axes.T @ gradient / np.abs(curvature))
    while not (log_likelihood(x + move) + prior.log_prob(x + move) > value - 1e-9):
        move = move / 2
    x = x + move
    value, gradient, hessian = derivatives(tf.constant(x))
print(
    f"The solver ran {log_likelihood.calls - calls} times for values and gradients, "
    f"and {log_likelihood.hess_calls - products} times for rows of the Hessian."
)

# %% [markdown]
# ## Laplace's approximation against the reference
#
# The logs are approximately normal, so the parameters are approximately lognormal. The parameters
# of the equations are right to a tenth of a standard deviation. The noise is not: at the mode it
# is too small, because six parameters were fitted to 42 counts, and so all standard deviations
# are too small. That is an error of Laplace's approximation, which only draws can reveal, not of
# the derivatives.

# %%
covariance = np.linalg.inv(-hessian)
laplace = lognorm(np.sqrt(np.diag(covariance)), scale=np.exp(x))
mean, sd = laplace.mean(), laplace.std()
reference = {
    key: np.array([r[key] for r in REFERENCE.values()]) for key in REFERENCE["theta[1]"]
}
shift = (mean - reference["mean"]) / reference["sd"]
ratio = sd / reference["sd"]

print(f"\n{'':24}{'Laplace':>19}{'reference':>19}")
statistics = f"{'mean':>10}{'sd':>9}" * 2
print(f"{'':24}{statistics}{'shift/sd':>10}{'sd ratio':>10}")
for i, (name, (meaning, _)) in enumerate(NAMES.items()):
    ours = f"{mean[i]:10.4f}{sd[i]:9.4f}"
    theirs = f"{reference['mean'][i]:10.4f}{reference['sd'][i]:9.4f}"
    print(f"{name:11}{meaning:13}{ours}{theirs}{shift[i]:10.2f}{ratio[i]:10.3f}")

# %% [markdown]
# ## Figure: the approximation and the reference

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
BLUE, ORANGE = "#0072B2", "#E69F00"  # distinct to colour-blind eyes
plt.rcParams.update({"font.size": 11, "figure.constrained_layout.hspace": 0.06})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

figure, axes = plt.subplots(2, 4, figsize=(12, 6.5), layout="constrained")
grid = np.linspace(laplace.ppf(0.001), laplace.ppf(0.999), 200)  # [point, parameter]
density = laplace.pdf(grid)
for i, (axis, (name, (meaning, unit))) in enumerate(
    zip(axes.flat, NAMES.items(), strict=True)
):
    top = density[:, i].max()
    curve = axis.fill_between(grid[:, i], density[:, i], color=BLUE, alpha=0.3, lw=0)
    bars = [
        axis.errorbar(
            m[i], -height * top, xerr=s[i], fmt=marker, color=color, capsize=5, lw=2
        )
        for m, s, height, marker, color in [
            (mean, sd, 0.08, "o", BLUE),
            (reference["mean"], reference["sd"], 0.18, "^", ORANGE),
        ]
    ]
    for q in (5, 50, 95):
        ours = axis.axvline(laplace.ppf(q / 100)[i], ymin=0.2, color=BLUE, lw=2)
        theirs = axis.axvline(
            reference[f"q{q:02}"][i], ymin=0.2, color=ORANGE, lw=2, ls=(0, (4, 4))
        )
    axis.set_title(f"{name}  {meaning}", fontsize=11)
    axis.set(xlabel=unit, yticks=[])
    axis.locator_params("x", nbins=4)
    axis.spines["left"].set_visible(False)
labels = ["Laplace", "its quantiles 5, 50, 95 %", "its mean and sd"]
labels += ["reference quantiles", "reference mean and sd"]
handles = [curve, ours, bars[0], theirs, bars[1]]
figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
figure.savefig(FIGURES / "newton_laplace.png", dpi=150)
print(f"\nFigure: {FIGURES / 'newton_laplace.png'}")

# %% [markdown]
# ## Verdict

# %%
print(f"{time.perf_counter() - BEGIN:.0f} s")
is_noise = np.array(["sigma" in name for name in NAMES])
# Not where there is NaN.
agrees = np.abs(shift) < 0.1 + 0.6 * is_noise
agrees &= np.abs(ratio - 1) < 0.15 + 0.1 * is_noise
if not agrees.all():
    sys.exit(f"The approximation of {', '.join(np.array([*NAMES])[~agrees])} is off.")
if not refused:
    sys.exit("The engine without a Hessian was differentiated twice.")
print("The approximation agrees with the reference draws, as far as it can.")
