"""The comparison tables of the docs: runs every cell, compares with the facts, and prints Markdown.

Run it in tests/: python -m matrix.table
"""

import importlib.metadata
import itertools
import platform
import sys
import warnings

import tensorflow as tf

from matrix import CELLS, configure, judge
from matrix.facts import FACTS
from matrix.values import comparison_cases

# Told apart by shape and word, not by colour.
SHOWN = {
    "right": "✓ right",
    "raises": "! raises",
    "NaN": "? NaN",
    "None": "∅ none",
    "wrong": "✗ wrong",
}
MEANINGS = {
    "right": "✓ right",
    "raises": "! raises an error",
    "NaN": "? not finite, for all to see",
    "None": "∅ no gradient: None",
    "wrong": "✗ silently wrong",
}
VERSIONS = ["tensorflow", "tensorflow-probability", "keras"]


def line(*texts: str) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(texts)} |"


def header(libraries: list[str]) -> str:
    """The two lines above the rows."""
    return f"{line('', *libraries)}\n{line(*['---'] * (1 + len(libraries)))}"


def row(name: str, verdicts: dict[str, dict[str, str]]) -> str:
    """The row of a cell of the matrix, from the verdict by library and problem."""
    return line(name, *map(_shown, verdicts.values()))


def _shown(by_problem: dict[str, str]) -> str:
    """One verdict, or, where the problems differ, the mark of each."""
    if len(set(by_problem.values())) == 1:
        return SHOWN[next(iter(by_problem.values()))]
    return "<br>".join(f"{SHOWN[verdict][0]} {problem}" for problem, verdict in by_problem.items())


def main() -> None:
    warnings.simplefilter("ignore")  # the tests have them as errors
    configure()
    tf.get_logger().setLevel("ERROR")
    problems = comparison_cases()
    libraries = list(problems["one"])
    verdicts = {
        name: {
            library: {problem: judge(cell, cases[library]) for problem, cases in problems.items()}
            for library in libraries
        }
        for name, cell in CELLS.items()
    }

    changed = [
        f"{library}, {problem}, {name}: {verdict}, expected {FACTS[library](CELLS[name], problem)}"
        for name, of in verdicts.items()
        for library, by_problem in of.items()
        for problem, verdict in by_problem.items()
        if verdict != FACTS[library](CELLS[name], problem)
    ]
    if changed:
        sys.exit("\n".join(["matrix/facts.py no longer tells what the libraries do:", *changed]))

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    print(f"Run on {versions}, Python {platform.python_version()}.\n")
    print(
        f"## At a glance\n\nThe number of ways, out of {len(CELLS)}, for {' / '.join(problems)}:\n"
    )
    print(header(libraries))
    for verdict, meaning in MEANINGS.items():
        counts = [
            " / ".join(
                str(sum(of[library][problem] == verdict for of in verdicts.values()))
                for problem in problems
            )
            for library in libraries
        ]
        print(line(meaning, *counts))
    for group, cells in itertools.groupby(CELLS.values(), lambda cell: cell.group):
        print(f"\n## {group[0].upper()}{group[1:]}\n")
        print(header(libraries))
        for cell in cells:
            print(row(cell.name, verdicts[cell.name]))


if __name__ == "__main__":
    main()
