"""Host engines drawn at random.

Those of NumPy stand against a loop over the members of the batch, those of JAX and PyTorch against
TensorFlow's own derivatives of the same function.
"""

import pytest
from hypothesis import given, settings

from fuzz.drawing import SETTINGS
from fuzz.strategies import check_engine, engines, foreigns


@given(engines())
@settings(SETTINGS, max_examples=40, derandomize=True)
def test_engines(host):
    check_engine(host)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_frameworks(framework):
    pytest.importorskip(framework)
    run = given(foreigns(framework))(check_engine)
    settings(SETTINGS, max_examples=12, derandomize=True)(run)()
