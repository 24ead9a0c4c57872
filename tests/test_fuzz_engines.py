"""Host engines drawn at random, against a loop of NumPy over the members of the batch."""

from hypothesis import given, settings

from fuzz.strategies import SETTINGS, check_engine, engines


@given(engines())
@settings(SETTINGS, max_examples=50, derandomize=True)
def test_engines(host):
    check_engine(host)
