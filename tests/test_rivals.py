"""What the rivals do in each cell, as a fact to be noticed, and that the README tells it.

The comparison of the docs is generated from the same cells. Where one of these fails after an upgrade
of TensorFlow, TFP or Keras, the rival has changed, not sgtrick.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow_probability as tfp

import sgtrick
from matrix import CELLS, judge
from matrix.pairs import TELLING
from matrix.table import header, row
from matrix.values import comparison_cases

DROPPED = [
    "tape around `vectorized_map`",
    "tape around `vectorized_map`, all in `tf.function`",
    "tape around `vectorized_map` in XLA",
    "`ForwardAccumulator` in eager",
    "`ForwardAccumulator` in `tf.function`",
    "`ForwardAccumulator` in XLA",
    "nested tapes around `vectorized_map`",
    "reverse over forward",
    "reverse over forward in `tf.function`",
    "forward over forward",
    "forward over forward in `tf.function`",
]
SECOND_OF_TFP_IS_NONE = [  # elsewhere it is zero, or lacks the part with the Hessian
    "nested tapes",
    "nested tapes in `tf.function`",
    "nested tapes in XLA",
    "forward over reverse",
    "forward over reverse in `tf.function`",
    "inner tape inside a `tf.function`, outer around",
    "nested tapes around `vectorized_map`",
    "`vectorized_map` around nested tapes",
]
RAISE_WITHOUT_HESSIAN = [  # TensorFlow has no place for an error in the other cells: NaN
    "nested tapes",
    "nested tapes in `tf.function`",
    "nested tapes over a square",
    "nested tapes over a square in `tf.function`",
    "forward over reverse",
    "forward over reverse in `tf.function`",
    "forward over forward",
    "forward over forward in `tf.function`",
    "`vectorized_map` around nested tapes",
]
ONE_AT_A_TIME = {name for name, cell in CELLS.items() if cell.takes_members}
VALUE_ONLY = {"TFLite, the value"}


def without_hessian(cell, problem):
    if cell.order == 1:
        return "right"
    return "raises" if cell.name in RAISE_WITHOUT_HESSIAN else "NaN"


def of_tf(cell, problem):
    if cell.name in DROPPED:
        return "wrong"
    return "raises" if cell.name == "SavedModel without custom gradients" else "right"


def of_tfp(cell, problem):
    if cell.name == "`tf.gradients` twice in a TF1 graph":
        return "raises"
    if cell.order == 2:
        return "None" if cell.name in SECOND_OF_TFP_IS_NONE else "wrong"
    if problem == "many" and cell.name not in ONE_AT_A_TIME | VALUE_ONLY:
        return "wrong"
    return "right"


FACTS = {
    "sgtrick": lambda cell, problem: "right",
    "no hx": without_hessian,
    "tfp": of_tfp,
    "tf": of_tf,
    "keras": of_tf,  # on this backend it is tf.custom_gradient
}
CASES = comparison_cases()


def is_proven_elsewhere(library, problem, cell):
    """`keras.ops` has `tf`'s code; a cell that maps takes one function either way.

    sgtrick's many are the Hessian blocks of test_value_matrix.py, in every cell. Where a rival is
    right, the table of the docs says so if it changes.
    """
    telling = cell.name in TELLING
    if library in ("keras", "sgtrick") and not telling:
        return True
    if library == "tf" and not (telling or cell.name in DROPPED):
        return True
    if library in ("tfp", "no hx") and not (telling or cell.order == 2):
        return True
    return problem == "many" and (library == "sgtrick" or cell.takes_members)


@pytest.mark.parametrize(
    ("library", "problem", "cell"),
    [
        pytest.param(library, problem, cell, id=f"{library}-{problem}-{cell.name}")
        for library, problem, cell in itertools.product(FACTS, CASES, CELLS.values())
        if not is_proven_elsewhere(library, problem, cell)
    ],
)
def test_what_a_library_does(library, problem, cell):
    assert judge(cell, CASES[problem][library]) == FACTS[library](cell, problem)


def test_readme_shows_rows_of_the_comparison():
    shown = re.findall(r"^\|.*\|$", (Path(__file__).parents[1] / "README.md").read_text(), re.M)
    title, rule, *rows = shown[:8]
    assert f"{title}\n{rule}" == header(list(FACTS))
    for shown_row in rows:
        name = shown_row.split(" | ")[0].removeprefix("| ")
        verdicts = {
            library: {problem: fact(CELLS[name], problem) for problem in CASES}
            for library, fact in FACTS.items()
        }
        assert shown_row == row(name, verdicts)


def test_infinite_gradients_beside_tfp():
    assert np.isnan(tfp.math.custom_gradient(0.0, np.inf, 0.0))
    assert sgtrick.custom_gradient(0.0, np.inf, 0.0) == 0
