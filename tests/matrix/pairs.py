"""Which cases run in which cells, and which combinations of other things are tried."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Set
from typing import Any

import pytest

from matrix.cells import CELLS
from matrix.problem import Case

# One for each thing that TensorFlow does to a function: eager and compiled execution, shapes known
# late, mapped backward and forward passes, accumulation in loops, forward mode, second derivatives
# by itself and of what is made of first ones, and gradients found again in a stored graph.
TELLING = {
    "eager tape",
    "tape in XLA",
    "unknown ranks",
    "`tape.jacobian`",
    "`tape.batch_jacobian`",
    "tape around `vectorized_map`, all in `tf.function`",
    "`tf.while_loop`",
    "`ForwardAccumulator` in `tf.function`",
    "nested tapes",
    "nested tapes over a square in `tf.function`",
    "SavedModel without custom gradients",
}
# They take some seconds for each case.
SLOW = {
    "`tape.batch_jacobian`",
    "nested tapes around `vectorized_map`",
    "nested tapes around a `tf.function`",
    "nested tapes over a square around a `tf.function`",
    "forward over reverse",
    "forward over reverse in `tf.function`",
    "tape around `vectorized_map` in XLA",
    "TFLite, the value",
    "nested tapes through `tf.while_loop`",
    "forward over forward",
    "forward over forward in `tf.function`",
    "`ForwardAccumulator` around `vectorized_map`",
    "`ForwardAccumulator` around `vectorized_map` of unknown size",
    "`MirroredStrategy` in eager",
    "`MirroredStrategy` in `tf.function`",
}
assert CELLS.keys() >= TELLING | SLOW


def pairs(
    cases: Iterable[Case], everywhere: Set[str], twice: Set[str] = frozenset()
) -> list[Any]:  # a case and a cell each
    """The cases named in `everywhere` with every cell, the others with the telling ones.

    The others take the same way through the code as one of the former, with other shapes. Those in
    `twice` do so for first derivatives, and have every cell of second ones.
    """
    cases = list(cases)
    assert everywhere | twice <= {case.name for case in cases}
    return [
        pytest.param(case, cell, marks=[pytest.mark.long] * (cell.name in SLOW))
        for case in cases
        for cell in CELLS.values()
        if case.name in everywhere
        or cell.name in TELLING
        or (case.name in twice and cell.order == 2)
    ]


def spread(
    *factors: Iterable[Any],
    together: int = 2,
    valid: Callable[..., bool] = lambda *case: True,
) -> list[tuple[Any, ...]]:
    """Some of all combinations, in which any values of so many factors come together at least once."""
    cases = [case for case in itertools.product(*factors) if valid(*case)]
    groups = {case: set(itertools.combinations(enumerate(case), together)) for case in cases}
    missing, chosen = set().union(*groups.values()), set()
    uses = Counter[tuple[int, Any]]()  # of each value, so that none of them takes most places

    def gain(case: tuple[Any, ...]) -> tuple[int, int]:
        return len(groups[case] & missing), -sum(uses[value] for value in enumerate(case))

    while missing:
        best = max(cases, key=gain)
        missing -= groups[best]
        uses.update(enumerate(best))
        chosen.add(best)
    return [case for case in cases if case in chosen]
