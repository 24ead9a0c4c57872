"""sgtrick beside its rivals, in what the README tells of them: facts of matrix/facts.py.

tests/project/test_comparison.py has them in every cell.
"""

import re
from pathlib import Path

import numpy as np
import tensorflow_probability as tfp

import sgtrick
from matrix import CELLS
from matrix.facts import FACTS
from matrix.table import header, row

TITLE, RULE, *ROWS = re.findall(
    r"^\|.*\|$", (Path(__file__).parents[2] / "README.md").read_text(), re.M
)[:6]
LIBRARIES = ["sgtrick", "tfp", "tf"]  # of README, whose table is of many functions in one call
# README has a short name, for narrow screens.
ROWS = [row.replace("forward mode, eager", "`ForwardAccumulator` in eager") for row in ROWS]
NAMES = [row.split(" | ")[0].removeprefix("| ") for row in ROWS]


def test_readme_shows_rows_of_the_comparison():
    assert f"{TITLE}\n{RULE}" == header(LIBRARIES)
    for name, shown in zip(NAMES, ROWS, strict=True):
        verdicts = {library: {"many": FACTS[library](CELLS[name], "many")} for library in LIBRARIES}
        assert shown == row(name, verdicts)


def test_infinite_gradients_beside_tfp():
    assert np.isnan(tfp.math.custom_gradient(0.0, np.inf, 0.0))
    assert sgtrick.custom_gradient(0.0, np.inf, 0.0) == 0
