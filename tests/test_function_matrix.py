"""The function forms in every cell of the transformation matrix."""

import pytest

from matrix import CELLS, complaint
from matrix.function_cases import (
    custom_jvp_cases,
    from_value_and_gradient_cases,
    with_gradient_cases,
)

CASES = with_gradient_cases() + from_value_and_gradient_cases() + custom_jvp_cases()

# What first-order forms do beyond that is in test_functions.py.
PAIRS = [(case, cell) for case in CASES for cell in CELLS.values() if cell.order <= case.order]


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_form(case, cell):
    problem = cell.problem(case)
    assert complaint(cell.run(case.form, problem), problem.expected, cell.rtol) is None
