"""Programs drawn at random: right or loud, as native code is right in the same composition.

The short profile runs with the tests, `nox -s fuzz` for as long as it is told.
"""

import pytest
from hypothesis import given, settings

from fuzz.pieces import *  # noqa: F403 - for programs as they are printed
from fuzz.program import Program
from fuzz.strategies import SETTINGS, check, programs


@given(programs())
@settings(SETTINGS, max_examples=40, derandomize=True)
def test_programs(program):
    check(program)


# Each was wrong once.
FOUND: list[Program] = []


@pytest.mark.parametrize("program", FOUND, ids=repr)
def test_what_was_found(program):
    check(program)
