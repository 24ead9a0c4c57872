"""docs/comparison.md has the tables of the facts, and the facts hold in every cell."""

import pytest

from matrix import CELLS, judge
from matrix.facts import FACTS
from matrix.table import ABOVE, PAGE, tables
from matrix.values import comparison_cases

CASES = comparison_cases()


def test_the_page_has_the_tables():
    _, _, shown = PAGE.read_text().partition(ABOVE)
    assert shown.strip() == tables().strip(), "in tests/: python -m matrix.table"


@pytest.mark.long
@pytest.mark.parametrize("problem", CASES)
@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
def test_the_facts(cell, problem):
    found = {library: judge(cell, case) for library, case in CASES[problem].items()}
    assert found == {library: fact(cell, problem) for library, fact in FACTS.items()}
