"""Examples that take less than a minute run as a user would run them; building the docs runs all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_newton_laplace(tmp_path):
    script = shutil.copy(ROOT / "examples" / "newton_laplace.py", tmp_path)
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "data")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search("tensorflow|cuda|onednn", done.stderr, re.IGNORECASE)
    assert "72 entries: 72 ok." in done.stdout
    assert "LookupError: A second derivative of first_order was asked for" in done.stdout
    assert "The approximation agrees with the reference draws" in done.stdout
    assert (tmp_path / "figures" / "newton_laplace.png").stat().st_size > 10_000
