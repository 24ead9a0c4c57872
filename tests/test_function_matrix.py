"""The function forms in every cell of the transformation matrix."""

import pytest

from matrix import CELLS, complaint
from matrix.function_cases import (
    custom_jvp_cases,
    from_value_and_gradient_cases,
    with_gradient_cases,
)

CASES = with_gradient_cases() + from_value_and_gradient_cases() + custom_jvp_cases()


@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_form(case, cell):
    if cell.order > case.order:
        pytest.skip("of first order: see test_functions.py")
    problem = cell.problem(case)
    assert complaint(cell.run(case.form, problem), problem.expected, cell.rtol) is None
