"""Programs drawn at random: right or loud, as native code is right in the same composition.

The short profile runs with the tests, `nox -s fuzz` for as long as it is told.
"""

import linecache

import numpy as np
import pytest

from fuzz import pieces
from fuzz.drawing import check_some
from fuzz.pieces import (
    Asinh,
    LogSoftmax,
    Sum,
    accumulator,
    batch_jacobian,
    branch,
    by_a_tape,
    by_another_form,
    closed_form,
    custom_gradient_with_hx_stopped_by_hand,
    custom_jvp,
    custom_vjp,
    custom_vjp_in_a_function,
    custom_vjp_of_a_variable,
    custom_vjp_on_host,
    from_numpy,
    from_value_and_gradient,
    from_value_and_gradient_with_aux,
    in_part_on_host,
    jacobian,
    lite,
    loop,
    map_fn,
    on_host,
    pullback_by_accumulator,
    recompute,
    square,
    stopped,
    tape,
    twice_in_reverse,
    vectorized_map,
    with_gradient,
    with_gradient_in_a_branch,
    with_gradient_in_part,
    with_gradient_only_in_eager,
)
from fuzz.program import LIBRARY, Program
from fuzz.strategies import check, programs


@pytest.mark.long
def test_programs():
    # More transformations than two take minutes.
    check_some(programs(longest=2), seed=0, count=12, check=check, shrink=True)


@pytest.mark.long
def test_what_is_wrong_is_made_smaller():
    def check_steps(program):
        assert tape not in program.steps or program.form is not custom_vjp, repr(program)

    with pytest.raises(AssertionError) as found:
        check_some(programs(), seed=1, count=1000, check=check_steps, shrink=False)
    with pytest.raises(AssertionError) as smaller:
        check_some(programs(), seed=1, count=1000, check=check_steps, shrink=True)
    assert "custom_vjp, " in str(smaller.value)
    assert len(str(smaller.value)) < len(str(found.value))


# Each was wrong once, or an error without a reason.
FOUND = [
    Program(Asinh, on_host, custom_jvp, (pieces.function, accumulator, accumulator), (3,)),
    Program(Asinh, closed_form, custom_vjp, (loop, accumulator, pieces.function), (3,)),
    Program(Asinh, closed_form, from_numpy, (branch, pieces.function, tape), (3,)),
    Program(Asinh, stopped, with_gradient, (tape, jacobian), (3,)),
    Program(Asinh, closed_form, custom_vjp_in_a_function, (vectorized_map, tape), (3,)),
    Program(Asinh, by_a_tape, from_value_and_gradient, (recompute, vectorized_map, tape), (3,)),
    Program(Asinh, closed_form, custom_gradient_with_hx_stopped_by_hand, (tape, tape), (3,)),
    Program(Asinh, closed_form, custom_vjp_on_host, (square, tape, tape), (3,)),
    Program(Sum, in_part_on_host, custom_vjp, (twice_in_reverse, tape), ()),
    Program(Sum, in_part_on_host, custom_vjp, (accumulator, tape), ()),
    Program(Sum, on_host, custom_vjp_of_a_variable, (accumulator, accumulator), ()),
    Program(Sum, in_part_on_host, with_gradient, (twice_in_reverse, pieces.function, tape), ()),
    Program(Asinh, closed_form, custom_vjp_on_host, (vectorized_map, twice_in_reverse), (3,)),
    Program(Asinh, closed_form, custom_vjp_in_a_function, 2 * (vectorized_map, tape), (2,)),
    Program(Sum, on_host, with_gradient_in_part, (tape, tape, pieces.function), (3,)),
    Program(
        Sum,
        closed_form,
        custom_gradient_with_hx_stopped_by_hand,
        (vectorized_map, tape, pieces.function),
        (1,),
        1,
    ),
    Program(Sum, closed_form, from_numpy, (*2 * (tape,), batch_jacobian, pieces.function), (3,)),
    Program(
        Asinh,
        closed_form,
        custom_vjp_on_host,
        (twice_in_reverse, batch_jacobian, pieces.function),
        (3,),
    ),
    Program(Asinh, closed_form, with_gradient_in_a_branch, (tape, twice_in_reverse), (3,)),
    Program(Sum, closed_form, with_gradient_in_a_branch, (twice_in_reverse, tape), ()),
    Program(Sum, closed_form, with_gradient_in_a_branch, 2 * (twice_in_reverse,), ()),
    Program(
        LogSoftmax,
        closed_form,
        from_value_and_gradient_with_aux,
        (vectorized_map, tape, pieces.function_of_unknown_rank),
        (2,),
    ),
    *(
        Program(
            Asinh,
            closed_form,
            with_gradient_only_in_eager,
            (pullback_by_accumulator, step),
            (3,),
        )
        for step in (tape, pullback_by_accumulator)
    ),
    Program(Asinh, in_part_on_host, pieces.clip_gradient, (pullback_by_accumulator, tape), ()),
    Program(Sum, in_part_on_host, pieces.clip_gradient, 2 * (pullback_by_accumulator,), (2,)),
    Program(
        Sum,
        in_part_on_host,
        pieces.magic_box,
        (pullback_by_accumulator, accumulator, vectorized_map),
        (2,),
    ),
    Program(
        Sum,
        pieces.by_members_on_host,
        custom_vjp_of_a_variable,
        (pullback_by_accumulator, accumulator),
        (2,),
    ),
    *(
        Program(Asinh, closed_form, pieces.custom_jvp_on_host, steps, (2,))
        for steps in ((pieces.tangent_by_tape,), (pieces.tangent_by_accumulator, pieces.function))
    ),
]


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_what_was_found(program):
    check(program)


# Lest a piece be skipped, or loud, wherever it stands.


@pytest.mark.parametrize("form", pieces.FORMS)
def test_each_form_is_right(form):
    expected = "loud" if form is pieces.custom_vjp_closing_over_a_scale else "right"
    step = accumulator if form is pieces.custom_jvp_on_host else tape
    assert Program(Asinh, closed_form, form, (step,), (3,)).verdict() == expected


@pytest.mark.parametrize("rule", pieces.RULES)
def test_each_rule_is_right(rule):
    assert Program(Asinh, rule, custom_vjp, (tape,), (3,)).verdict() == "right"


@pytest.mark.parametrize("step", pieces.STEPS + pieces.OVER_MEMBERS)
def test_each_step_is_right(step):
    program = Program(Asinh, closed_form, custom_vjp, (step,), (3,))
    if step is lite:  # which has no asinh, and is not for 64 bits
        program = Program(Sum, closed_form, custom_vjp, (step,), (3,), dtype="float32")
    assert program.verdict() == "right"


@pytest.mark.parametrize("steps", [(vectorized_map, tape), (vectorized_map, tape, tape)])
def test_a_mapped_array_is_right(steps):
    form = pieces.custom_vjp_closing_over_an_array
    assert Program(Asinh, closed_form, form, steps, (2,)).verdict() == "right"


@pytest.mark.parametrize("steps", [(pieces.saved_model, tape), (pieces.saved_model, loop, tape)])
def test_a_stored_variable_is_right(steps):
    assert Program(Asinh, pieces.with_a_variable, custom_vjp, steps, (3,)).verdict() == "right"


@pytest.mark.parametrize("steps", [(tape,), (tape, pieces.function)])
def test_a_slip_of_the_library_is_not_loud(steps, monkeypatch):
    names = {}
    text = "def slip(*_, **__): raise AttributeError('a slip')"
    exec(compile(text, LIBRARY / "_tensorflow" / "slip.py", "exec"), names)
    monkeypatch.setattr("sgtrick._core.override._pull", names["slip"])
    came = Program(Asinh, closed_form, custom_vjp, steps, (3,)).verdict()
    assert came.startswith("AttributeError")


@pytest.mark.parametrize("function", pieces.FUNCTIONS)
def test_each_function_is_right(function):
    shape = (3,) * function.ranks[-1]
    assert Program(function, closed_form, custom_vjp, (tape,), shape).verdict() == "right"


def test_what_is_printed_runs_by_itself(capsys):
    steps = (batch_jacobian, map_fn, pieces.function)
    program = Program(Asinh, by_another_form, with_gradient_in_part, steps, (2,))
    namespace = {"__name__": "__main__"}
    path = "printed.py"
    linecache.cache[path] = (0, None, program.script().splitlines(keepends=True), path)
    exec(compile(program.script(), path, "exec"), namespace)
    np.testing.assert_allclose(namespace["came"], namespace["expected"], rtol=1e-7)
    assert "expected" in capsys.readouterr().out
