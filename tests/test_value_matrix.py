"""The value form in every cell of the transformation matrix, by both of its kernels."""

import pytest

import sgtrick
from matrix import complaint, pairs
from matrix.values import value_cases

CASES = value_cases(sgtrick.custom_gradient)
AS_IT_IS = pairs(
    CASES,
    everywhere={
        "chains",
        "stopped by hand",
        "Jacobian per member",
        "structure",
        "Hessian blocks",
        "Hessian product",
    },
)
# With a Hessian it is the formula alone anyway.
FORMULA_ALONE = pairs(
    [case for case in CASES if case.order == 1],
    everywhere={"Jacobian per member", "structure"},
)


def check(case, cell):
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


@pytest.mark.parametrize(("case", "cell"), AS_IT_IS, ids=lambda of: of.name)
def test_value_form(case, cell):
    check(case, cell)


@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize(("case", "cell"), FORMULA_ALONE, ids=lambda of: of.name)
def test_formula_alone(case, cell):
    check(case, cell)
