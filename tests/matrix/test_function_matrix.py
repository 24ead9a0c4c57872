"""The function forms in every cell of the transformation matrix."""

import pytest

from matrix import judge, pairs, promised
from matrix.function_cases import (
    custom_jvp_cases,
    from_value_and_gradient_cases,
    with_gradient_cases,
)

PAIRS = pairs(
    with_gradient_cases() + from_value_and_gradient_cases() + custom_jvp_cases(),
    everywhere={
        "gradient by one, autodiff by the other",
        "value and gradients by two",
        "JVP of two",
    },
)


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_form(case, cell):
    assert judge(cell, case) in promised(cell, case)
