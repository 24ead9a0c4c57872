"""The tables of docs/comparison.md, from the facts, which tests/project/test_comparison.py tests.

Writes them, in tests/: python -m matrix.table
"""

import itertools
from pathlib import Path

import peers
from matrix import CELLS
from matrix.facts import FACTS

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
ABOVE = "<!-- What follows is written by `python -m matrix.table` in tests/. -->\n"
PROBLEMS = ["one", "many"]

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


def tables() -> str:
    """All that each library does, in Markdown."""
    verdicts = {
        name: {
            library: {problem: fact(cell, problem) for problem in PROBLEMS}
            for library, fact in FACTS.items()
        }
        for name, cell in CELLS.items()
    }
    ways = f"The number of ways, out of {len(CELLS)}, for {' / '.join(PROBLEMS)}:"
    lines = ["## At a glance", "", ways, "", header(list(FACTS))]
    for verdict, meaning in MEANINGS.items():
        counts = [
            " / ".join(
                str(sum(of[library][problem] == verdict for of in verdicts.values()))
                for problem in PROBLEMS
            )
            for library in FACTS
        ]
        lines.append(line(meaning, *counts))
    for group, cells in itertools.groupby(CELLS.values(), lambda cell: cell.group):
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", header(list(FACTS))]
        lines += [row(cell.name, verdicts[cell.name]) for cell in cells]
    return "\n".join([*lines, "", peers.section()])


def main() -> None:
    text, _, _ = PAGE.read_text().partition(ABOVE)
    PAGE.write_text(f"{text}{ABOVE}\n{tables()}")


if __name__ == "__main__":
    main()
