"""How programs are drawn, and what is asked of them."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fuzz import pieces
from fuzz.program import Program

SETTINGS = settings(
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    print_blob=False,
)


@st.composite
def programs(draw):
    function = draw(st.sampled_from(pieces.FUNCTIONS))
    rank = draw(st.sampled_from(function.ranks))
    forms = [f for f in pieces.FORMS if (function, f) != (pieces.Softmax, pieces.from_numpy)]
    steps = draw(st.lists(st.sampled_from(pieces.STEPS + pieces.OVER_MEMBERS), max_size=4))
    return Program(
        function,
        draw(st.sampled_from(pieces.RULES)),
        draw(st.sampled_from(forms)),
        tuple(steps),
        tuple(draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["float64", "float32"])),
    )


def check(program):
    came = program.verdict()
    assert came in ("right", "loud", "skipped"), f"{program}: {came}\n\n{program.script()}"
