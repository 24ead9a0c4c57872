"""The figures that the build of the docs draws: of the idea, of a report, and of a growth curve.

python docs/figures.py docs/_generated
"""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

import sgtrick

# Okabe and Ito's colours, which are distinct to colour-blind eyes.
TANGENT, PARABOLA, NAIVE, TRUTH = "#0072B2", "#009E73", "#D55E00", "0.7"
POINT = 0.4  # where the tape is: s
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def f(x):
    return np.exp(x) * np.sin(x)


def g(x):
    return np.exp(x) * (np.sin(x) + np.cos(x))


def hessian(x):
    return 2 * np.exp(x) * np.cos(x)


def embedded(path):
    """What is differentiated, for three choices of `L`: all share value and slope, not the bend."""
    figure, axis = plt.subplots(figsize=(4.8, 3.5))
    z = np.linspace(-0.9, 0.75, 200)
    axis.plot(z, f(POINT + z), color=TRUTH, lw=7, solid_capstyle="butt")
    choices = [
        ("naive, $g(x)\\,z$:\nbends twice as much", NAIVE, g(POINT + z) * z),
        (
            "$(g(s)+\\frac{1}{2}Hz)\\,z$:\nbends as $f$ does (grey)",
            PARABOLA,
            (g(POINT) + hessian(POINT) * z / 2) * z,
        ),
        ("$g(s)\\,z$:\nthe tangent", TANGENT, g(POINT) * z),
    ]
    for label, color, linear in choices:
        h = f(POINT) + linear
        axis.plot(z, h, color=color, lw=2)
        axis.text(z[-1] + 0.04, h[-1], label, color=color, va="center")
    axis.plot(0, f(POINT), "o", color="black", ms=7, zorder=3)
    axis.annotate("value $f(s)$", (0, f(POINT)), (6, -12), textcoords="offset points")
    axis.set(
        xlabel="$z = x - s$, with $s$ held", ylabel="$f(s) + L(z)$", xlim=(z[0], z[-1])
    )
    figure.savefig(path)
    plt.close(figure)


def differences(path):
    """Of the wrong gradient of the page on checking, and of the right one."""

    def energy(x):
        return tf.reduce_sum(x**4) / 4 + x[0] * x[1]

    def gradient(factor):
        return lambda x: x**3 + tf.stack([x[1], factor * x[0], 0.0])

    x = tf.constant([0.5, 2.0, -1.0])
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True)
    for axis, factor in zip(axes, (2, 1), strict=True):
        h = sgtrick.with_gradient(energy, gradient(factor))
        report = sgtrick.check_gradient(h, x, raise_exception=False)
        (entry,) = (entry for entry in report.entries if entry.name == "x[1]")
        error = np.maximum(
            abs(entry.differences - entry.embedded), 1e-16
        )  # not zero, for the axis
        axis.loglog(entry.steps, error, color=TANGENT, marker="o")
        axis.set(xlabel="step", title=f"x[1]: {entry.verdict}")
    axes[0].set_ylabel("|difference - embedded|")
    figure.savefig(path)
    plt.close(figure)


def growth(path):
    """What the program of the page on solvers samples."""
    page = Path(__file__).with_name("solvers.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec("".join(program), names)
    hours = np.linspace(0, 18, 100)
    start, rate, capacity, _ = names["draws"][::8, :, None].swapaxes(0, 1)
    curves = capacity / (1 + (capacity / start - 1) * np.exp(-rate * hours))
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), width_ratios=[1.4, 1])
    axes[0].plot(hours, curves.T, color=TANGENT, lw=0.5, alpha=0.3)
    axes[0].plot(names["HOURS"], names["YEAST"], "o", color="black", ms=4)
    axes[0].set(xlabel="hours", ylabel="amount of yeast")
    axes[0].annotate("data, and curves of draws", (9, 441), (10.5, 380))
    axes[1].plot(*names["draws"][:, :2].T, ".", color=TANGENT, ms=5, alpha=0.5)
    axes[1].set(xlabel="start", ylabel="rate per hour", title="draws")
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with plt.rc_context(STYLE):
        embedded(folder / "idea_value.svg")
        differences(folder / "differences.svg")
        growth(folder / "solvers.svg")
