"""Follows every internal link, anchor and image of the built site, and those of README, offline.

python docs/check_links.py docs/_build/html
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """What a page of HTML refers to, and what can be referred to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids = {"", "top"}  # of every page
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            elif name in ("href", "src") or (tag, name) == ("object", "data"):
                self.links.append(value or "")
            elif name == "srcset":
                self.links += [
                    candidate.split()[0] for candidate in (value or "").split(",")
                ]


page = cache(Page)


def complaint(link: str, source: Path, site: Path) -> str | None:
    """What is wrong with a link of a file, None if nothing is or if it leads elsewhere."""
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return None
    path = unquote(url.path)
    base = site if path.startswith("/") else source.parent
    target = base / path.lstrip("/") if path else source
    if target.is_dir() and source.suffix == ".html":
        target /= "index.html"
    if not target.exists():
        return "no such file"
    if target.is_file() and not target.stat().st_size:
        return "an empty file"
    if target.suffix == ".html" and unquote(url.fragment) not in page(target).ids:
        return "no such anchor"
    return None


def complaints(site: Path, readme: Path) -> Iterator[str]:
    """A line for every link that leads nowhere."""
    links = [
        (path, link)
        for path in sorted(site.rglob("*.html"))
        for link in page(path).links
    ]
    links += [
        (readme, link) for link in re.findall(r"\]\(([^)\s]+)\)", readme.read_text())
    ]
    for source, link in dict.fromkeys(links):
        if what := complaint(link, source, site):
            yield f"{source}: {link}: {what}"


if __name__ == "__main__":
    sys.exit("\n".join(complaints(Path(sys.argv[1]), ROOT / "README.md")) or None)
