"""Host engines drawn at random, against a loop over the members of the batch."""

from hypothesis import given, settings

from fuzz.drawing import SETTINGS
from fuzz.strategies import check_engine, engines


@given(engines())
@settings(SETTINGS, max_examples=40, derandomize=True)
def test_engines(host):
    check_engine(host)
