"""docs/comparison.md has the tables of the facts, and the facts hold in every cell."""

import pytest

from matrix import CELLS, judge
from matrix.facts import FACTS
from matrix.pairs import SLOW, TELLING
from matrix.table import ABOVE, PAGE, tables
from matrix.values import comparison_cases

CASES = comparison_cases()


def test_the_page_has_the_tables():
    _, _, shown = PAGE.read_text().partition(ABOVE)
    assert shown.strip() == tables().strip(), "in tests/: python -m matrix.table"


def is_judged(library, cell, problem):
    """Many in every cell, and one where that is another matter or the cell a telling one.

    sgtrick is in test_value_matrix.py, as "Hessian blocks", but for the slow cells; Keras takes the
    way of TensorFlow.
    """
    if library == "sgtrick":
        return problem == "many" and cell.name in SLOW
    if problem == "one" and FACTS[library](cell, "one") != FACTS[library](cell, "many"):
        return True
    return cell.name in TELLING or (problem == "many" and library != "keras")


PAIRS = [
    pytest.param(cell, problem, libraries, id=f"{cell.name}-{problem}")
    for cell in CELLS.values()
    for problem in CASES
    if (libraries := [name for name in FACTS if is_judged(name, cell, problem)])
]


@pytest.mark.long
@pytest.mark.parametrize(("cell", "problem", "libraries"), PAIRS)
def test_the_facts(cell, problem, libraries):
    found = {library: judge(cell, CASES[problem][library]) for library in libraries}
    assert found == {library: FACTS[library](cell, problem) for library in libraries}
