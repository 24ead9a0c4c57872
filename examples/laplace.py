# %% [markdown]
# # A Laplace approximation, differentiated twice
#
# Ten pumps of a power plant failed $s_i$ times in $t_i$ thousand hours (Gaver and
# O'Muircheartaigh 1987). Each has its own failure rate, $e^{x_i}$ with $x_i \sim N(\mu,
# \sigma^2)$, and $s_i \sim \text{Poisson}(t_i e^{x_i})$. The likelihood of $\theta = (\mu,
# \log\sigma)$ is an integral over every $x_i$. Laplace's approximation replaces the integrand by
# a Gaussian at its mode $\hat x_i(\theta)$:
#
# $$\log p(s_i \mid \theta) \approx \ell_i(\hat x_i, \theta) + \tfrac12\log 2\pi
#   - \tfrac12 \log\left(-\partial_x^2 \ell_i(\hat x_i, \theta)\right).$$
#
# The last term depends on the mode, so the gradient needs $\hat x'(\theta)$, and the Hessian,
# from which the standard errors follow, needs $\hat x''(\theta)$. The modes are found in NumPy.
# `sgtrick.implicit_root` computes their derivatives.

# %%
"""The likelihood of a model with random effects, by Laplace's approximation."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq, minimize

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

    import sgtrick

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()
# In thousands.
HOURS = np.array([94.3, 15.7, 62.9, 126, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5])
FAILURES = np.array([5, 1, 5, 14, 3, 19, 1, 1, 4, 22.0])

# %% [markdown]
# ## The model
#
# The log density of one pump's data and rate, up to constants, and its derivative with respect to
# $x$, whose root is the mode.


# %%
def log_joint(x: tf.Tensor, theta: tf.Tensor) -> tf.Tensor:
    mu, log_sigma = theta[0], theta[1]
    z = (x - mu) * tf.exp(-log_sigma)
    return FAILURES * (x + np.log(HOURS)) - HOURS * tf.exp(x) - z**2 / 2 - log_sigma


def slope(x: tf.Tensor, theta: tf.Tensor) -> tf.Tensor:
    return FAILURES - HOURS * tf.exp(x) - (x - theta[0]) * tf.exp(-2 * theta[1])


def modes(theta: np.ndarray) -> np.ndarray:
    """By Newton, in NumPy. The slope is concave: starting right of the root is safe."""
    mu, precision = theta[0], np.exp(-2 * theta[1])
    x = np.maximum(np.log(FAILURES / HOURS), mu)
    for _ in range(50):
        rate = HOURS * np.exp(x)
        x = x + (FAILURES - rate - (x - mu) * precision) / (rate + precision)
    return x


def moving_modes(theta: tf.Tensor) -> tf.Tensor:
    return sgtrick.implicit_root(slope, modes(theta.numpy()), theta, batch_ndims=1)


def laplace(theta: tf.Tensor, moving=moving_modes) -> tf.Tensor:
    """The approximate log likelihood, without the constants of the data."""
    x = moving(theta)
    curvature = HOURS * tf.exp(x) + tf.exp(-2 * theta[1])
    return tf.reduce_sum(log_joint(x, theta) - tf.math.log(curvature) / 2)


def derivatives(
    theta: np.ndarray, moving=moving_modes
) -> tuple[float, np.ndarray, np.ndarray]:
    """Value, gradient and Hessian of the approximation."""
    theta = tf.constant(theta)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(theta)
        with tf.GradientTape() as inner:
            inner.watch(theta)
            value = laplace(theta, moving)
        gradient = inner.gradient(value, theta)
    hessian = outer.jacobian(gradient, theta, experimental_use_pfor=False)
    return float(value), gradient.numpy(), hessian.numpy()


# %% [markdown]
# ## The best parameters, by Newton's method

# %%
theta = np.array([0.0, 0.0])
print(f"{'':6}{'log likelihood':>15}{'mu':>10}{'log sigma':>11}{'gradient':>11}")
for i in range(10):
    value, gradient, hessian = derivatives(theta)
    print(
        f"{i:<6}{value:15.6f}{theta[0]:10.5f}{theta[1]:11.5f}"
        f"{np.abs(gradient).max():11.1e}"
    )
    if np.abs(gradient).max() < 1e-9:
        break
    theta = theta - np.linalg.solve(hessian, gradient)
errors = np.sqrt(np.diag(np.linalg.inv(-hessian)))

# %% [markdown]
# ## Independent answers
#
# First, the same approximation in SciPy, with modes by bisection and derivatives by finite
# differences. Second, the likelihood itself, by adaptive quadrature, with its own maximum.


# %%
def density(x: float, i: int, theta: np.ndarray) -> float:
    z = (x - theta[0]) / np.exp(theta[1])
    log_poisson = FAILURES[i] * (x + np.log(HOURS[i])) - HOURS[i] * np.exp(x)
    return log_poisson - z**2 / 2 - theta[1]


def by_bisection(theta: np.ndarray) -> float:
    total, precision = 0.0, np.exp(-2 * theta[1])
    for i, (s, t) in enumerate(zip(FAILURES, HOURS, strict=True)):

        def slope_i(x, s=s, t=t):
            return s - t * np.exp(x) - (x - theta[0]) * precision

        x = brentq(slope_i, -20, 20, xtol=1e-14)
        total += density(x, i, theta) - np.log(t * np.exp(x) + precision) / 2
    return total


def by_quadrature(theta: np.ndarray) -> float:
    """Without `log(2 pi) / 2` a pump, which Laplace's approximation leaves out."""
    total = 0.0
    for i, peak in enumerate(modes(theta)):
        top = density(peak, i, theta)

        def relative(x, i=i, top=top):
            return np.exp(density(x, i, theta) - top)

        area = quad(relative, peak - 8, peak + 8, points=[peak])[0]
        total += top + np.log(area) - np.log(2 * np.pi) / 2
    return total


def differences(f, theta: np.ndarray, h: float = 1e-3) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian by central differences, extrapolated to step 0."""

    def at_step(h: float) -> tuple[np.ndarray, np.ndarray]:
        e = h * np.eye(2)
        gradient = np.array([f(theta + d) - f(theta - d) for d in e]) / (2 * h)
        corners = [
            [
                f(theta + a + b)
                - f(theta + a - b)
                - f(theta - a + b)
                + f(theta - a - b)
                for b in e
            ]
            for a in e
        ]
        return gradient, np.array(corners) / (4 * h**2)

    pairs = zip(at_step(h), at_step(2 * h), strict=True)
    return tuple((4 * fine - coarse) / 3 for fine, coarse in pairs)


def straight_modes(theta: tf.Tensor) -> tf.Tensor:
    """Modes that move along the tangent: their second derivative is taken for zero."""
    at = tf.stop_gradient(theta)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(at)
        x = moving_modes(at)
    jacobian = tape.jacobian(x, at, experimental_use_pfor=False)
    return sgtrick.custom_gradient(x, jacobian, theta, hx=0)


away = theta + np.array([0.3, -0.2])  # where the gradient is not zero
_, gradient, hessian = derivatives(away)
_, _, incomplete = derivatives(away, straight_modes)
fd_gradient, fd_hessian = differences(by_bisection, away)
exact = minimize(lambda theta: -by_quadrature(theta), theta, method="BFGS").x
exact_errors = np.sqrt(np.diag(np.linalg.inv(-differences(by_quadrature, exact)[1])))

print(f"\nAt mu {away[0]:.3f}, log sigma {away[1]:.3f}")
print(f"{'':32}{'d/d mu':>12}{'d/d log sigma':>15}")
print(f"{'gradient':32}{gradient[0]:12.7f}{gradient[1]:15.7f}")
print(f"{'  finite differences':32}{fd_gradient[0]:12.7f}{fd_gradient[1]:15.7f}")
for name, h in [
    ("Hessian", hessian),
    ("  finite differences", fd_hessian),
    ("  without the bend of the modes", incomplete),
]:
    print(
        f"{name:32}{h[0, 0]:12.7f}{h[0, 1]:15.7f}\n"
        f"{'':32}{h[1, 0]:12.7f}{h[1, 1]:15.7f}"
    )
print(f"\n{'':14}{'Laplace':>9}{'+-':>8}{'exact':>10}{'+-':>8}")
for name, *numbers in zip(
    ["mu", "log sigma"], theta, errors, exact, exact_errors, strict=True
):
    print("{:14}{:9.3f}{:8.3f}{:10.3f}{:8.3f}".format(name, *numbers))

# %% [markdown]
# ## Figure: the likelihood, its approximation, and the standard errors

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
BLUE, ORANGE = "#0072B2", "#E69F00"  # distinct to colour-blind eyes
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})

mus, log_sigmas = np.linspace(-2.5, 0.1, 27), np.linspace(-0.5, 1, 26)
levels = np.log([0.1, 0.5])  # of the likelihood, relative to its maximum
figure, axis = plt.subplots(figsize=(8, 5.5), layout="constrained")
handles = []
for f, color, style in [
    (by_quadrature, ORANGE, "solid"),
    (by_bisection, BLUE, "dashed"),
]:
    surface = np.array([[f(np.array([m, s])) for m in mus] for s in log_sigmas])
    surface -= f(exact if f is by_quadrature else theta)
    lines = axis.contour(
        mus, log_sigmas, surface, levels, colors=color, linestyles=style
    )
    if f is by_quadrature:
        axis.clabel(lines, fmt=lambda v: f"{100 * np.exp(v):.0f} %", fontsize=9)
    handles.append(plt.Line2D([], [], color=color, ls=style))
angle = np.linspace(0, 2 * np.pi, 200)
axes = np.linalg.cholesky(np.linalg.inv(-derivatives(theta)[2]))
axes *= np.sqrt(2 * np.log(2))
(ellipse,) = axis.plot(
    *(theta[:, None] + axes @ [np.cos(angle), np.sin(angle)]), ":", color="black"
)
(mode,) = axis.plot(*theta, "o", color="black", ms=6)
axis.set(
    xlabel="mean of log failure rates, per thousand hours", ylabel="log of their spread"
)
labels = ["likelihood, % of maximum", "Laplace", "50 % by the Hessian", "maximum"]
figure.legend(
    [*handles, ellipse, mode],
    labels,
    loc="outside upper center",
    ncols=4,
    frameon=False,
)
figure.savefig(FIGURES / "laplace.png", dpi=150)
print(f"\nFigure: {FIGURES / 'laplace.png'}")

# %% [markdown]
# ## Verdict

# %%
print(f"{time.perf_counter() - BEGIN:.0f} s")
checks = [
    ("gradient against finite differences", np.abs(gradient - fd_gradient).max(), 1e-6),
    ("Hessian against finite differences", np.abs(hessian - fd_hessian).max(), 1e-4),
    (
        "maximum against the exact one, in standard errors",
        np.abs((theta - exact) / exact_errors).max(),
        0.1,
    ),
    (
        "standard errors against the exact ones, relative",
        np.abs(errors / exact_errors - 1).max(),
        0.05,
    ),
]
off = [
    f"  {what}: off by {by:.2g}, allowed {at_most}"
    for what, by, at_most in checks
    if not by < at_most
]
if off:
    sys.exit("The approximation is off:\n" + "\n".join(off))
print(
    "Gradient and Hessian agree with finite differences, the maximum with quadrature."
)
