"""sgtrick beside its rivals, in what the README tells of them; and sgtrick without the Hessian.

What the rivals do in the other cells is in matrix/facts.py, and tested where the table of the docs is
made.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow_probability as tfp

import sgtrick
from matrix import CELLS, judge
from matrix.facts import FACTS
from matrix.pairs import TELLING
from matrix.table import header, row
from matrix.values import comparison_cases

CASES = comparison_cases()
TITLE, RULE, *ROWS = re.findall(
    r"^\|.*\|$", (Path(__file__).parents[2] / "README.md").read_text(), re.M
)[:6]
LIBRARIES = ["sgtrick", "tfp", "tf"]  # of README, whose table is of many functions in one call
# README has a short name, for narrow screens.
ROWS = [row.replace("forward mode, eager", "`ForwardAccumulator` in eager") for row in ROWS]
NAMES = [row.split(" | ")[0].removeprefix("| ") for row in ROWS]


def is_tested(library, problem, cell):
    """All that the README shows, and one function without the Hessian in every second derivative.

    sgtrick's many are the Hessian blocks of test_value_matrix.py, in every cell.
    """
    if cell.name in NAMES and library in LIBRARIES:
        return True
    if problem == "many" and (library == "sgtrick" or cell.takes_members):
        return False  # a cell that maps takes one function either way
    if library == "no hx" and problem == "one" and cell.order == 2:
        return True
    return library in ("sgtrick", "no hx") and cell.name in TELLING


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "problem", "cell"),
    [
        pytest.param(library, problem, cell, id=f"{library}-{problem}-{cell.name}")
        for library, problem, cell in itertools.product(FACTS, CASES, CELLS.values())
        if is_tested(library, problem, cell)
    ],
)
def test_what_a_library_does(library, problem, cell):
    assert judge(cell, CASES[problem][library]) == FACTS[library](cell, problem)


def test_readme_shows_rows_of_the_comparison():
    assert f"{TITLE}\n{RULE}" == header(LIBRARIES)
    for name, shown in zip(NAMES, ROWS, strict=True):
        verdicts = {library: {"many": FACTS[library](CELLS[name], "many")} for library in LIBRARIES}
        assert shown == row(name, verdicts)


def test_infinite_gradients_beside_tfp():
    assert np.isnan(tfp.math.custom_gradient(0.0, np.inf, 0.0))
    assert sgtrick.custom_gradient(0.0, np.inf, 0.0) == 0
