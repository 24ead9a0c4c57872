"""What `import sgtrick` brings along. Which module imports which: `lint-imports`, by pyproject.toml."""

import subprocess
import sys

import pytest

CODE = """
import sys, tensorflow
before = set(sys.modules)
import sgtrick
print(*sorted(set(sys.modules) - before))
"""
ON_DEMAND = {
    "jax",
    "keras",
    "matplotlib",
    "scipy",
    "sgtrick.keras",
    "sgtrick.tfp",
    "tensorflow_probability",
    "torch",
}


@pytest.mark.long
def test_no_more_than_tensorflow_does():
    command = [sys.executable, "-c", CODE]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "sgtrick" in imported
    assert ON_DEMAND.isdisjoint(imported)
