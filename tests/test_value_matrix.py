"""The value form in every cell of the transformation matrix, by both of its kernels."""

import pytest

import sgtrick
from matrix import CELLS, complaint
from matrix.values import value_cases

CASES = value_cases(sgtrick.custom_gradient)


@pytest.fixture(params=["as it is", "formula alone"])
def kernel(request):
    if request.param == "formula alone":
        request.getfixturevalue("formula_alone")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("cell", CELLS.values(), ids=lambda cell: cell.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_form(case, cell):
    problem = cell.problem(case)
    outcome = cell.run(case.form, problem)
    expected = problem.expected
    if cell.order > case.order:
        # First order by construction: of a second derivative only the part that is made of first
        # ones is there, and where that is nothing it is unconnected.
        if "hvp" in outcome:
            assert all(g is None for g in outcome["hvp"])
            return
        expected = {"hvp_of_square": expected["first_order_part"]}
    assert complaint(outcome, expected, cell.rtol) is None
