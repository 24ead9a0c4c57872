"""docs/comparison.md has the tables of the facts, and the facts hold in every cell."""

import pytest

from matrix import CELLS, judge
from matrix.facts import FACTS
from matrix.pairs import TELLING
from matrix.table import ABOVE, PAGE, tables
from matrix.values import comparison_cases

CASES = comparison_cases()


def test_the_page_has_the_tables():
    _, _, shown = PAGE.read_text().partition(ABOVE)
    assert shown.strip() == tables().strip(), "in tests/: python -m matrix.table"


def is_judged(library, cell, problem):
    """sgtrick's one is in test_value_matrix.py; Keras takes the way of TensorFlow, and does so here."""
    if library == "keras":
        return cell.name in TELLING
    return library != "sgtrick" or problem != "one"


@pytest.mark.long
@pytest.mark.parametrize("problem", CASES)
@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
def test_the_facts(cell, problem):
    cases = {name: case for name, case in CASES[problem].items() if is_judged(name, cell, problem)}
    found = {library: judge(cell, case) for library, case in cases.items()}
    assert found == {library: FACTS[library](cell, problem) for library in cases}
