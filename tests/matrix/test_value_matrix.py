"""The value form in every cell of the transformation matrix, by both of its kernels."""

import pytest

import sgtrick
from matrix import judge, pairs, promised
from matrix.values import value_cases

CASES = value_cases(sgtrick.custom_gradient)
# Chains run in every cell where the docs' table is made, and matrix/facts.py says how each is unknown.
AS_IT_IS = pairs(CASES, everywhere={"Hessian blocks"}, twice={"structure", "Hessian product"})
# A function for the Hessian has no part in the formula, and the kernels read shapes alike.
OF_THE_FORMULA = {"Jacobian per member", "structure", "stopped by hand", "Hessian of a vector"}
FORMULA_ALONE = pairs([case for case in CASES if case.name in OF_THE_FORMULA], everywhere=set())


@pytest.mark.parametrize(("case", "cell"), AS_IT_IS, ids=lambda of: of.name)
def test_value_form(case, cell):
    assert judge(cell, case) in promised(cell, case)


@pytest.mark.long
@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize(("case", "cell"), FORMULA_ALONE, ids=lambda of: of.name)
def test_formula_alone(case, cell):
    assert judge(cell, case) in promised(cell, case)
