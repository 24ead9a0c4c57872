"""What `tfp.math.custom_gradient` and `tf.custom_gradient` do in each cell, as a fact to be noticed.

The comparison table of the docs is generated from the same cells. Where one of these fails after an
upgrade of TensorFlow or TFP, the rival has changed, not sgtrick.
"""

import pytest

from matrix import CELLS, judge
from matrix.values import comparison_cases

DROPPED = [
    "tape around `vectorized_map`",
    "tape around `vectorized_map`, all in `tf.function`",
    "tape around `vectorized_map` in XLA",
    "`ForwardAccumulator` in eager",
    "`ForwardAccumulator` in `tf.function`",
    "`ForwardAccumulator` in XLA",
]
ONE_AT_A_TIME = {name for name, cell in CELLS.items() if cell.takes_members}
VALUE_ONLY = {"TFLite, the value"}


def of_tf(cell, problem):
    if cell.name in DROPPED:
        return "wrong"
    return "raises" if cell.name == "SavedModel without custom gradients" else "right"


def of_tfp(cell, problem):
    if cell.order == 2:
        return "wrong" if "over a square" in cell.name else "None"
    if problem == "chains" and cell.name not in ONE_AT_A_TIME | VALUE_ONLY:
        return "wrong"
    return "right"


CASES = comparison_cases()


@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
@pytest.mark.parametrize("problem", CASES)
@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("sgtrick", lambda cell, problem: "right"),
        ("tfp.math.custom_gradient", of_tfp),
        ("tf.custom_gradient", of_tf),
    ],
    ids=["sgtrick", "tfp", "tf"],
)
def test_what_a_library_does(library, expected, problem, cell):
    assert judge(cell, CASES[problem][library]) == expected(cell, problem)
