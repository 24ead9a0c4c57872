"""The value form in every cell of the transformation matrix, by both of its kernels."""

import pytest

import sgtrick
from matrix import CELLS, judge, pairs, promised, spread
from matrix.pairs import SLOW, TELLING
from matrix.values import value_cases

CASES = value_cases(sgtrick.custom_gradient)
# Chains run in every cell, the slow ones where the docs' table is tested, in test_comparison.py.
AS_IT_IS = [
    pair
    for pair in pairs(CASES, everywhere={"Hessian blocks"}, twice={"Hessian product"})
    if pair.values[0].name != "Hessian blocks" or pair.values[1].name not in SLOW
]
# A function for the Hessian has no part in the formula, and the kernels read shapes alike.
OF_THE_FORMULA = {"Jacobian per member", "structure", "stopped by hand", "Hessian of a vector"}
BY_NAME = {case.name: case for case in CASES if case.name in OF_THE_FORMULA}


@pytest.mark.parametrize(("case", "cell"), AS_IT_IS, ids=lambda of: of.name)
def test_value_form(case, cell):
    assert judge(cell, case) in promised(cell, case)


@pytest.mark.long
@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize(("case", "cell"), spread(BY_NAME, sorted(TELLING), together=1))
def test_formula_alone(case, cell):
    case, cell = BY_NAME[case], CELLS[cell]
    assert judge(cell, case) in promised(cell, case)
