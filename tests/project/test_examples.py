"""Examples run as a user would run them; building the docs runs all, in notebooks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import is_installed

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def run(name, folder):
    """Runs a copy in a folder of its own, and returns what it prints."""
    script = shutil.copy(ROOT / "examples" / f"{name}.py", folder)
    shutil.copytree(ROOT / "examples" / "data", folder / "data")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search("tensorflow|cuda|onednn", done.stderr, re.IGNORECASE)
    assert (folder / "figures" / f"{name}.png").stat().st_size > 10_000
    return done.stdout


def test_newton_laplace(tmp_path):
    printed = run("newton_laplace", tmp_path)
    assert "72 entries: 72 ok." in printed
    assert "LookupError: first_order was asked for a second derivative" in printed
    assert "The approximation agrees with the reference draws" in printed


def test_stan_program(tmp_path):
    if not (is_installed("stan") and is_installed("arviz")):
        pytest.skip('PyStan and ArviZ are not installed: pip install ".[stan]"')
    printed = run("stan_program", tmp_path).replace(f"{tmp_path}/", "examples/")
    assert "10 entries: 10 ok." in printed
    assert "agrees with Stan's sampler and with the reference" in printed
    recorded = (ROOT / "docs" / "recorded" / "stan_program.txt").read_text()
    recorded = recorded.replace("# %%\n", "")
    assert form(printed) == form(recorded), "as the gallery shows it: nox -s stan"


def form(printed):
    """What is printed, but for numbers and the blanks that align them."""
    return re.sub(r"-?\d+(\.\d+)?", "0", printed).split()
