"""The function forms in every cell of the transformation matrix."""

import pytest

from matrix import complaint, pairs
from matrix.function_cases import (
    custom_jvp_cases,
    from_value_and_gradient_cases,
    with_gradient_cases,
)

PAIRS = pairs(
    with_gradient_cases() + from_value_and_gradient_cases() + custom_jvp_cases(),
    everywhere={
        "gradient of chains",
        "Jacobian function per member",
        "gradient by one, autodiff by the other",
        "gradient of order 2, autodiff by the other",
        "value and gradients by two",
        "JVP of two",
        "JVP of order 2",
    },
)
# What first-order forms do beyond that is in test_functions.py.
PAIRS = [(case, cell) for case, cell in PAIRS if cell.order <= case.order]


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_form(case, cell):
    problem = cell.problem(case)
    assert complaint(cell.run(case.form, problem), problem.expected, cell.rtol) is None
