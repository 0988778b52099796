"""The pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A fenced block: where its first line is in the page, counted from 1; and what it is."""

    page: str
    line: int
    language: str
    source: str  # the file that it is an excerpt of, or ""
    text: str

    @property
    def needs(self) -> str:
        """What it needs besides a CPU, by its first line; "" if nothing."""
        found = re.match(r"# needs: (.+)", self.text)
        return found[1] if found else ""


def pages() -> list[str]:
    """Their paths from the root, which scripts/site_pages.py gives to the site too."""
    patterns = ("*.md", "docs/*.md", "examples/*/README.md")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, also of its quotations and lists."""
    found = []
    for token in MARKDOWN.parse(text(page)):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            title = re.fullmatch(r'title="(.*)"', rest)
            source = title[1] if title else ""
            line = token.map[0] + 2 if token.map else 0
            found.append(Block(page, line, language, source, token.content))
    return found
