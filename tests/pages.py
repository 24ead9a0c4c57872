"""The code of README and docs, for the tests that run it."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return [block for block, _ in blocks_and_lines(page, language)]


def blocks_and_lines(page, language):
    """Each block, and how many lines are before it."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(m[1], text.count("\n", 0, m.start(1))) for m in found]


def section(package):
    """The block of docs/engines.md that imports an optional package."""
    (block,) = [b for b in blocks(ROOT / "docs" / "engines.md", "python") if is_for(b, package)]
    return block


def is_for(block, package):
    return re.search(rf"^try:(\n    .*)*\n    import {package}\b", block) is not None


def is_installed(package):
    return importlib.util.find_spec(package) is not None
