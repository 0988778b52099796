"""The pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Block(NamedTuple):
    """A fenced block: the line of the page where it begins, counted from 1; its language and its
    text."""

    page: str
    line: int
    language: str
    source: str  # the file that it is an excerpt of, or ""
    text: str
    needs: str  # what the block needs besides a CPU, from the comment above it; "" if nothing


def pages() -> list[str]:
    """Paths of the pages from the root; scripts/site_pages.py gives the same list to the site."""
    patterns = ("*.md", "docs/**/*.md", "examples/*/README.md")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, also those in quotations and lists."""
    found = []
    needs = ""
    for token in MARKDOWN.parse(text(page)):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            title = re.fullmatch(r'title="(.*)"', rest)
            source = title[1] if title else ""
            line = token.map[0] + 2 if token.map else 0
            found.append(Block(page, line, language, source, token.content, needs))
        comment = re.match(r"\s*<!-- needs: (.+) -->", token.content)
        needs = comment[1] if comment and token.type == "html_block" else ""
    return found
