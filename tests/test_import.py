"""What `import sgtrick` brings along."""

import subprocess
import sys

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


def test_no_more_than_tensorflow_does():
    command = [sys.executable, "-c", CODE]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "sgtrick" in imported
    assert ON_DEMAND.isdisjoint(imported)
