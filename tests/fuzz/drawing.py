"""What is checked of what Hypothesis draws.

Hypothesis begins with what is simple, and repeats it with small changes. That suits checks which
cost nothing; these take seconds. So many are drawn, and checked are a few that differ.
"""

import collections
import random
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

Check = Callable[[Any], None]

SETTINGS = settings(
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    print_blob=False,
    report_multiple_bugs=False,
)
MANY = settings(SETTINGS, max_examples=1000, phases=[Phase.generate])


def check_some(strategy: SearchStrategy, seed: int, count: int, check: Check) -> None:
    """Checks some of what a seed draws.

    Args:
        strategy: Draws.
        seed: Of the draws.
        count: How many are checked.
        check: Raises an AssertionError.

    Raises:
        AssertionError: For the first that is wrong.
    """
    for drawn in _some(strategy, seed, count):
        check(drawn)


def _some(strategy: SearchStrategy, seed: int, count: int) -> list[Any]:
    drawn: list[Any] = []
    draw = MANY(hypothesis.given(strategy)(lambda d: drawn.append(d)))
    hypothesis.seed(seed)(draw)()
    chosen = list(_in_turn({repr(d): d for d in drawn}.values(), random.Random(seed)))
    return chosen[:count]


def _in_turn(drawn: Iterable[Any], order: random.Random) -> Iterable[Any]:
    """One of each form, if there are forms, then another of each, in a random order."""
    by_form = collections.defaultdict(list)
    for d in drawn:
        by_form[vars(d).get("form")].append(d)
    for of_one in by_form.values():
        order.shuffle(of_one)
    while by_form:
        forms = list(by_form)
        order.shuffle(forms)
        for form in forms:
            yield by_form[form].pop()
            if not by_form[form]:
                del by_form[form]
