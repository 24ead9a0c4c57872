"""Every Python block of README and docs runs, and prints what the text says it prints."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_pages_were_found():
    assert len(PAGES) >= 9
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 22


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_in_order(page, capsys):
    namespace = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    printed = capsys.readouterr().out
    for output in blocks(page, "text"):
        assert output in printed
