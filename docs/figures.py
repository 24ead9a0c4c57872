"""The figures of the page on the idea, drawn from its formulas; the build of the docs runs this.

python docs/figures.py docs/_generated
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

# Okabe and Ito's colours, which are distinct to colour-blind eyes.
STOPPED, MIDPOINT, NAIVE, TRUTH = "#0072B2", "#009E73", "#D55E00", "0.7"
POINT = 0.4  # where the tape is: s
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.wspace": 0.06,
}
# The node of each rule: where along the way from s to x the gradient is taken.
RULES = {
    "order 1": (0, STOPPED, "one triangle short"),
    "naive": (1, NAIVE, "one too many"),
    "order 2": (0.5, MIDPOINT, "they cancel"),
}


def f(x):
    return np.exp(x) * np.sin(x)


def g(x):
    return np.exp(x) * (np.sin(x) + np.cos(x))


def linear(z, node):
    """`L(z)` of the rule with one node."""
    return g(POINT + node * z) * z


def embedded(path):
    """What is differentiated, for each rule: all share value and slope, but not the bend."""
    figure, axis = plt.subplots(figsize=(4.8, 3.5))
    z = np.linspace(-0.9, 0.75, 200)
    axis.plot(z, f(POINT + z), color=TRUTH, lw=7, solid_capstyle="butt")
    labels = {
        "naive": "naive, $g(s+z)\\,z$:\nbends twice as much",
        "order 2": "order 2, $g(s+\\frac{z}{2})\\,z$:\nbends as $f$ does (grey)",
        "order 1": "order 1, $g(s)\\,z$:\nthe tangent",
    }
    for rule, label in labels.items():
        node, color, _ = RULES[rule]
        h = f(POINT) + linear(z, node)
        axis.plot(z, h, color=color, lw=2)
        axis.text(z[-1] + 0.04, h[-1], label, color=color, va="center")
    axis.plot(0, f(POINT), "o", color="black", ms=7, zorder=3)
    axis.annotate("value $f(s)$", (0, f(POINT)), (6, -12), textcoords="offset points")
    axis.set(xlabel="$z = x - s$, with $s$ held", ylabel="$f(s) + L(z)$", xlim=(z[0], z[-1]))
    figure.savefig(path)
    plt.close(figure)


def nodes(path):
    """Each rule takes a rectangle for the area under `g`, which is `f(x) - f(s)`."""
    figure, axes = plt.subplots(1, 3, figsize=(4.8, 2.6), sharey=True)
    x = POINT + np.linspace(0, 0.75, 100)
    for axis, (rule, (node, color, balance)) in zip(axes, RULES.items(), strict=True):
        at = x[0] + node * (x[-1] - x[0])
        axis.fill_between(x, g(at), color=color, alpha=0.25, lw=0)
        axis.fill_between(x, g(at), g(x), color=color, hatch="////", facecolor="none", lw=0)
        axis.plot(x, g(x), color="black", lw=2)
        axis.plot(at, g(at), "o", color=color, ms=9, clip_on=False, zorder=3)
        axis.set_title(f"{rule}: $c={node:g}$\n{balance}", color=color, fontsize=10)
        axis.set(xlim=(x[0], x[-1]), ylim=(0, None))
        ticks = {x[0]: "$s$", x[-1]: "$x$"} | ({} if at in x else {at: r"$s+\frac{z}{2}$"})
        axis.set_xticks(list(ticks), ticks.values())
    axes[0].set_ylabel("gradient $g$")
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with plt.rc_context(STYLE):
        embedded(folder / "idea_value.svg")
        nodes(folder / "idea_nodes.svg")
