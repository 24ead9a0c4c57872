"""The tables and the figure of docs/performance.md, from what the benchmarks measured.

    nox -s bench

runs the benchmarks with `--benchmark-json=FILE` and then this with FILE.
"""

import itertools
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

DOCS = Path(__file__).parents[2] / "docs"
UNITS = [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")]
PERCENTILES = [10, 50, 90]
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]  # Okabe and Ito's
MARKS = list(zip(COLORS, "os^vD", strict=True))


def groups(benchmarks):
    """`(file, rivals, cases)` of benchmarks that stand together, each with the same rivals."""

    def file_and_rivals(benchmark):
        file = Path(benchmark["fullname"].partition("::")[0]).stem
        return file, tuple(benchmark["extra_info"]["seconds"])

    for (file, rivals), cases in itertools.groupby(benchmarks, file_and_rivals):
        yield file, rivals, [case["extra_info"] for case in cases]


def ratios(case, rival):
    """Low, median and high of the ratio to the first rival, turn by turn."""
    first = next(iter(case["seconds"].values()))
    return np.percentile(np.divide(case["seconds"][rival], first), PERCENTILES)


def digits(ratio):
    """Two or three significant ones, and never an exponent."""
    return np.format_float_positional(ratio, 2 if ratio < 1 else 3, fractional=False, trim="-")


def duration(seconds):
    unit, name = next((u, n) for u, n in UNITS if seconds >= u)
    return f"{seconds / unit:.3g} {name}"


def table(rivals, cases):
    """Markdown: the time of the first rival, and the ratios of the others to it.

    A row for each case, or for each rival where there are more of them. Long names may break after
    a dot, so that the columns of numbers fit the page.
    """
    first, *others = rivals
    lines = [["", *(rival.replace(".", ".<wbr>") for rival in rivals)]]
    for case in cases:
        row = [case["what"], duration(np.median(case["seconds"][first]))]
        for rival in others:
            row.append("{1} ({0}&nbsp;to&nbsp;{2})".format(*map(digits, ratios(case, rival))))
        lines.append(row)
    if len(cases) < len(rivals):
        lines = list(zip(*lines, strict=True))
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(panels):
    """Ratios on a common logarithmic axis, a panel for each set of rivals."""
    heights = [len(cases) * max(1, len(rivals) / 3) + 1.5 for _, rivals, cases in panels]
    fig, axes = plt.subplots(
        len(panels),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        figsize=(6.6, 0.27 * sum(heights)),
        layout="constrained",
    )
    for axis, (_, (first, *others), cases) in zip(axes[:, 0], panels, strict=True):
        axis.axvline(1, color="black", lw=1)
        for i, (rival, (color, marker)) in enumerate(zip(others, MARKS, strict=False)):
            low, median, high = np.transpose([ratios(case, rival) for case in cases])
            y = np.arange(len(cases)) + 0.6 / len(others) * (i - (len(others) - 1) / 2)
            spread = [median - low, high - median]
            axis.errorbar(median, y, xerr=spread, fmt=marker, color=color, ms=5, label=rival)
        axis.set_yticks(range(len(cases)), [case["what"] for case in cases])
        axis.set_ylim(len(cases) - 0.4, -0.6)
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(f"{first} = 1", loc="left", fontsize="medium")
        axis.legend(fontsize="small", loc="best")
    axes[-1, 0].set_xscale("log")
    axes[-1, 0].xaxis.set_major_formatter("{x:g}")
    axes[-1, 0].set_xlabel("time, less is faster")
    return fig


def main(path):
    results = json.loads(Path(path).read_text())
    machine, panels = results["machine_info"], list(groups(results["benchmarks"]))
    turns = len(next(iter(panels[0][2][0]["seconds"].values())))
    conditions = (
        f"{turns} turns; in brackets, the middle 80 % of them. TensorFlow {machine['tensorflow']}, "
        f"Python {machine['python_version']}, {machine['cpu']['count']} cores."
    )
    for file, of_file in itertools.groupby(panels, lambda panel: panel[0]):
        tables = [table(rivals, cases) for _, rivals, cases in of_file]
        (DOCS / f"{file}.inc").write_text("\n\n".join([*tables, conditions]) + "\n")
    image = DOCS / "_static" / "performance.png"
    # Where there are more rivals than cases, the table says as much.
    of_many = [(file, rivals, cases) for file, rivals, cases in panels if len(cases) >= len(rivals)]
    figure(of_many).savefig(image, dpi=160)


if __name__ == "__main__":
    main(sys.argv[1])
