"""Every Python block of README and docs runs, and prints what the text says; broken links are found."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return [block for block, _ in blocks_and_lines(page, language)]


def blocks_and_lines(page, language):
    """Each block, and how many lines are before it."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(m[1], text.count("\n", 0, m.start(1))) for m in found]


def test_the_pages_were_found():
    assert len(PAGES) >= 9
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 22


def is_installed(module):
    return importlib.util.find_spec(module) is not None


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # model.save
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_in_order(page, capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {}
    for block, before in blocks_and_lines(page, "python"):
        if module := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / module[1]).write_text(block)
        elif is_installed("torch") or "import torch" not in block:
            # AutoGraph reads the source of a function at its line of the page.
            exec(compile("\n" * before + block, str(page), "exec"), namespace)
    printed = capsys.readouterr().out
    for output in blocks(page, "text"):
        assert output in printed


def test_readme_example_comes_first():
    assert (ROOT / "README.md").read_text().partition("\n```\n")[0].count("\n") < 30


def test_broken_links_are_found(tmp_path):
    site, readme = tmp_path / "site", tmp_path / "README.md"
    site.mkdir()
    (site / "two.html").write_text('<p id="there">', encoding="utf-8")
    (site / "plot.png").write_bytes(b"a picture")
    (site / "empty.png").touch()
    right = ["#top", "two.html", "two.html#there", "two.html?q#there", "https://elsewhere.org/no"]
    wrong = ["#gone", "two.html#gone", "three.html"]
    links = "".join(f'<a href="{link}"></a>' for link in [*right, *wrong])
    images = '<img src="plot.png"><img src="empty.png"><img src="gone.png">'
    (site / "index.html").write_text(links + images, encoding="utf-8")
    readme.write_text("[a](site/two.html) ![b](site/gone.png) [c](https://elsewhere.org)")
    complaints = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["complaints"]
    assert [line.removeprefix(f"{tmp_path}/") for line in complaints(site, readme)] == [
        "site/index.html: #gone: no such anchor",
        "site/index.html: two.html#gone: no such anchor",
        "site/index.html: three.html: no such file",
        "site/index.html: empty.png: an empty file",
        "site/index.html: gone.png: no such file",
        "README.md: site/gone.png: no such file",
    ]
