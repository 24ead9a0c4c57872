"""Sphinx configuration. Generates the comparison table and checks that no name is undocumented."""

import subprocess
import sys
from pathlib import Path

import sgtrick

HERE = Path(__file__).parent

project = "sgtrick"
author = "The sgtrick developers"
copyright = f"2026, {author}"
release = version = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 2
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = "sgtrick"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(tf|collections)\..*")]  # of no page here
autodoc_typehints = "none"  # the docstrings say more than Any
default_role = "code"
autodoc_default_options = {"members": True}


def _generate_comparison() -> None:
    """Runs the transformation matrix; about a minute."""
    generated = HERE / "_generated" / "comparison.md"
    generated.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "matrix.table"]
    done = subprocess.run(command, cwd=HERE.parent / "tests", capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the comparison table failed:\n{done.stderr}")
    generated.write_text(done.stdout)


def _check_documented() -> None:
    documented = (HERE / "api.md").read_text()
    missing = [
        name for name in sgtrick.__all__ if f"autofunction:: sgtrick.{name}\n" not in documented
    ]
    if missing:
        raise RuntimeError(f"docs/api.md lacks the public names {missing}")


def setup(_app: object) -> None:
    _check_documented()
    _generate_comparison()
