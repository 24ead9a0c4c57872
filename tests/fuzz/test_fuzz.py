"""Programs drawn at random: right or loud, as native code is right in the same composition.

The short profile runs with the tests, `nox -s fuzz` for as long as it is told.
"""

import pytest

from fuzz import pieces as p
from fuzz.drawing import check_some
from fuzz.program import Program
from fuzz.strategies import check, programs


@pytest.mark.long
def test_programs():
    # More transformations than two take minutes.
    check_some(programs(longest=2), seed=0, count=12, check=check)


# Each was wrong once, or an error without a reason.
FOUND = [
    Program(p.Asinh, p.on_host, p.custom_jvp, (p.function, p.accumulator, p.accumulator), (3,)),
    Program(p.Asinh, p.closed_form, p.custom_vjp, (p.loop, p.accumulator, p.function), (3,)),
    Program(p.Asinh, p.closed_form, p.from_numpy, (p.branch, p.function, p.tape), (3,)),
    Program(p.Asinh, p.stopped, p.with_gradient, (p.tape, p.jacobian), (3,)),
    Program(p.Asinh, p.closed_form, p.custom_vjp_in_a_function, (p.vectorized_map, p.tape), (3,)),
    Program(p.Asinh, p.by_a_tape, p.from_value_and_gradient, (p.recompute, p.vectorized_map, p.tape), (3,)),
    Program(p.Asinh, p.closed_form, p.custom_gradient_with_hx_stopped_by_hand, (p.tape, p.tape), (3,)),
    Program(p.Asinh, p.closed_form, p.custom_vjp_on_host, (p.square, p.tape, p.tape), (3,)),
    Program(p.Sum, p.in_part_on_host, p.custom_vjp, (p.twice_in_reverse, p.tape), ()),
    Program(p.Sum, p.in_part_on_host, p.custom_vjp, (p.accumulator, p.tape), ()),
    Program(p.Sum, p.on_host, p.custom_vjp_of_a_variable, (p.accumulator, p.accumulator), ()),
    Program(p.Sum, p.in_part_on_host, p.with_gradient, (p.twice_in_reverse, p.function, p.tape), ()),
    Program(p.Asinh, p.closed_form, p.custom_vjp_on_host, (p.vectorized_map, p.twice_in_reverse), (3,)),
    Program(p.Asinh, p.closed_form, p.custom_vjp_in_a_function, 2 * (p.vectorized_map, p.tape), (2,)),
    Program(p.Sum, p.on_host, p.with_gradient_in_part, (p.tape, p.tape, p.function), (3,)),
    Program(p.Sum, p.closed_form, p.custom_gradient_with_hx_stopped_by_hand, (p.vectorized_map, p.tape, p.function), (1,), 1),
    Program(p.Sum, p.closed_form, p.from_numpy, (*2 * (p.tape,), p.batch_jacobian, p.function), (3,)),
    Program(p.Asinh, p.closed_form, p.custom_vjp_on_host, (p.twice_in_reverse, p.batch_jacobian, p.function), (3,)),
    Program(p.Asinh, p.closed_form, p.with_gradient_in_a_branch, (p.tape, p.twice_in_reverse), (3,)),
    Program(p.Sum, p.closed_form, p.with_gradient_in_a_branch, (p.twice_in_reverse, p.tape), ()),
    Program(p.Sum, p.closed_form, p.with_gradient_in_a_branch, 2 * (p.twice_in_reverse,), ()),
    Program(p.LogSoftmax, p.closed_form, p.from_value_and_gradient_with_aux, (p.vectorized_map, p.tape, p.function_of_unknown_rank), (2,)),
    *(Program(p.Asinh, p.closed_form, p.with_gradient_only_in_eager, (p.pullback_by_accumulator, step), (3,)) for step in (p.tape, p.pullback_by_accumulator)),
    Program(p.Asinh, p.in_part_on_host, p.clip_gradient, (p.pullback_by_accumulator, p.tape), ()),
    Program(p.Sum, p.in_part_on_host, p.clip_gradient, 2 * (p.pullback_by_accumulator,), (2,)),
    Program(p.Sum, p.in_part_on_host, p.magic_box, (p.pullback_by_accumulator, p.accumulator, p.vectorized_map), (2,)),
    Program(p.Sum, p.by_members_on_host, p.custom_vjp_of_a_variable, (p.pullback_by_accumulator, p.accumulator), (2,)),
    *(Program(p.Asinh, p.closed_form, p.custom_jvp_on_host, steps, (2,)) for steps in ((p.tangent_by_tape,), (p.tangent_by_accumulator, p.function))),
    Program(p.Asinh, p.closed_form, p.custom_gradient_stopped_by_hand,
            (p.accumulator, p.pullback_by_accumulator), (), 1, "float32"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_what_was_found(program):
    check(program)


# Lest a piece be skipped, or loud, wherever it stands.
RIGHT_BY_A_TAPE = [
    form
    for form in p.FORMS
    if form not in (p.custom_jvp_on_host, p.custom_vjp_closing_over_a_scale)
]
EACH = [
    Program(p.Asinh, p.closed_form, p.custom_jvp_on_host, (p.accumulator,), (3,)),
    *(Program(p.Asinh, p.closed_form, form, (p.tape,), (3,)) for form in RIGHT_BY_A_TAPE),
    *(Program(p.Asinh, rule, p.custom_vjp, (p.tape,), (3,)) for rule in p.RULES),
    *(Program(p.Asinh, p.closed_form, p.custom_vjp, (step,), (3,)) for step in p.BY_TAPES),
    *(Program(f, p.closed_form, p.custom_vjp, (p.tape,), (3,) * f.ranks[-1]) for f in p.FUNCTIONS),
]


@pytest.mark.parametrize("program", EACH, ids=repr)
def test_each_piece_is_right(program):
    assert program.verdict() == "right"


def test_a_scale_that_a_rule_leaves_out_is_loud():
    form = p.custom_vjp_closing_over_a_scale
    assert Program(p.Asinh, p.closed_form, form, (p.tape,), (3,)).verdict() == "loud"
