import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # tests/matrix, for xdist's workers too

import matrix
from sgtrick import _trick

matrix.configure()


@pytest.fixture
def formula_in_eager(monkeypatch):
    """Eager code takes a pullback in the formula's place; here it takes the formula too."""
    monkeypatch.setattr(_trick, "eager", lambda: False)
