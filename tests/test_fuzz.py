"""Programs drawn at random: right or loud, as native code is right in the same composition.

The short profile runs with the tests, `nox -s fuzz` for as long as it is told.
"""

import pytest
from hypothesis import given, settings

from fuzz.pieces import (
    Asinh,
    accumulator,
    branch,
    by_a_tape,
    closed_form,
    custom_jvp,
    custom_vjp,
    from_numpy,
    from_value_and_gradient,
    function,
    loop,
    on_host,
    recompute,
    tape,
    vectorized_map,
)
from fuzz.program import Program
from fuzz.strategies import SETTINGS, check, programs


@given(programs())
@settings(SETTINGS, max_examples=40, derandomize=True)
def test_programs(program):
    check(program)


# Each was wrong once, or an error without a reason.
FOUND = [
    Program(Asinh, on_host, custom_jvp, (function, accumulator, accumulator), (3,)),
    Program(Asinh, closed_form, custom_vjp, (loop, accumulator, function), (3,)),
    Program(Asinh, closed_form, from_numpy, (branch, function, tape), (3,)),
    Program(Asinh, by_a_tape, from_value_and_gradient, (recompute, vectorized_map, tape), (3,)),
]


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_what_was_found(program):
    check(program)
