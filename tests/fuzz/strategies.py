"""How programs are drawn, and what is asked of them."""

from hypothesis import strategies as st

from fuzz import pieces
from fuzz.checks import SMOOTH, Check
from fuzz.program import TOLERANCES, Program


@st.composite
def programs(draw, longest=4):
    dtype = draw(st.sampled_from(["float64", "float64", *TOLERANCES]))
    functions, rules, forms = pieces.FUNCTIONS, pieces.RULES, pieces.FORMS
    if dtype == "float16":  # for which TensorFlow has no linear algebra
        functions = (pieces.Asinh, pieces.Sum, pieces.LogSoftmax)
    if dtype.startswith("complex"):
        functions = (pieces.Asinh, pieces.Sum)
        forms = [f for f in forms if f not in pieces.OF_REAL]
    function = draw(st.sampled_from(functions))
    if not hasattr(function, "engine"):
        forms = [f for f in forms if f not in pieces.ENGINES]
    rank = draw(st.sampled_from(function.ranks))
    runs = [(step,) for step in pieces.STEPS + pieces.OVER_MEMBERS]
    some = draw(st.lists(st.sampled_from([*pieces.OFTEN, *runs]), min_size=1, max_size=4))
    steps = sum(some, ())[:longest]
    form = draw(st.sampled_from(forms))
    if form in pieces.CONNECTED:
        rules = [rule for rule in rules if rule is not pieces.stopped]
    if form in pieces.GIVEN_A_JACOBIAN:
        rules = [rule for rule in rules if rule not in pieces.LOSING]
    if steps.count(pieces.accumulator) > 2:  # which takes minutes to store
        steps = tuple(step for step in steps if step is not pieces.saved_model)
    sizes = st.sampled_from([2, 3, 1, 2, 3, 0])
    return Program(
        function,
        draw(st.sampled_from(rules)),
        form,
        steps,
        tuple(draw(st.lists(sizes, min_size=rank, max_size=rank))),
        draw(st.sampled_from([2, 3, 1])),
        dtype,
    )


def check(program):
    came = program.verdict()
    assert came in ("right", "loud", "skipped"), f"{program}: {came}"


@st.composite
def checks(draw):
    size_x = draw(st.sampled_from([1.0, 1e-3, 1e4]))
    # A leaf of zeros does not say what is small there.
    entries = st.integers(-20, 20).filter(lambda i: i != 0 or size_x >= 1)
    point = draw(st.lists(entries, min_size=1, max_size=3))
    term = st.tuples(
        st.sampled_from(list(SMOOTH)),
        st.sampled_from([0.3, 1.0, 5.0]),
        st.sampled_from([1.0, -0.4]),
    )
    place = st.one_of(st.none(), st.integers(0, 24))
    wrong, kink = draw(st.one_of(st.tuples(place, st.none()), st.tuples(st.none(), place)))
    return Check(
        tuple(i / 10 for i in point),
        tuple(draw(st.lists(term, min_size=1, max_size=2))),
        draw(st.sampled_from(["number", "entries"])),
        draw(st.integers(1, min(2, len(point)))),
        size_x,
        draw(st.sampled_from([1.0, 1e-5, 1e3])),
        draw(st.sampled_from([0.0, 0.0, 1e3])) if wrong is None and kink is None else 0.0,
        draw(st.sampled_from(["float64", "float64", "float32", "narrow"])),
        wrong,
        None if kink is None else kink % len(point),
        draw(st.sampled_from(["full", "random"])),
        draw(st.integers(1, 2)) if wrong is None and kink is None else 1,
    )


def check_checker(drawn):
    came = drawn.verdict()
    assert came == "right", f"{drawn}: {came}"


KINDS = {
    "programs": (programs, check),
    "checks": (checks, check_checker),
}
