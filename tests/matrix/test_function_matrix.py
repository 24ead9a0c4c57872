"""The function forms in every cell of the transformation matrix."""

import pytest

from matrix import judge, pairs, promised
from matrix.function_cases import (
    custom_jvp_cases,
    from_value_and_gradient_cases,
    with_gradient_cases,
)

IN_PART = "gradient by one, autodiff by the other"
PAIRS = [
    pair
    for pair in pairs(
        with_gradient_cases() + from_value_and_gradient_cases() + custom_jvp_cases(),
        everywhere={IN_PART, "value and gradients by two", "JVP of two"},
    )
    # Second derivatives by both, in one order alone, are in test_mixed_derivatives.py.
    if (pair.values[0].name, pair.values[1].order) != (IN_PART, 2)
]


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_form(case, cell):
    assert judge(cell, case) in promised(cell, case)
