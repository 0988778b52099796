"""The site builds without a warning and without a network, and its pages show what their files
contain."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.pages import MARKDOWN, ROOT, pages, text

TAG = re.compile(r"<(h[1-4]|[uo]l|li|table|tr|pre|blockquote|img|strong|em|a)\b")


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["build", "--strict", "--config-file", str(root / "mkdocs.yml"), "--site-dir"]
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *words, str(folder)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site of a copy of the repository, with a new page that has mistakes."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("docs", "examples", "lightseq_fairseq", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "_lib", "out", "data", "raw")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in (ROOT / "mkdocs.yml", *ROOT.glob("*.md")):
        shutil.copy(path, copy)
    links = "[one](nothing.md), [two](train.md#nothing), [three](../README.md)"
    (copy / "docs/new.md").write_text(f"# New\n\n{links}\n")
    return copy / "site", build(copy, copy / "site")


@pytest.fixture(scope="module")
def site(built: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    return built[0]


def test_mistakes_stop_the_build(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Those of the new page, and there are no others."""
    _, done = built
    assert done.returncode == 1
    assert "contains a link 'nothing.md', but the target 'docs/nothing.md' is not" in done.stderr
    assert "a link 'train.md#nothing', but the doc 'docs/train.md' does not contain" in done.stderr
    assert re.search(r'not included in the "nav" configuration:\n +- docs/new.md', done.stderr)
    assert done.stderr.count("WARNING -") == 3


def html(site: Path, page: str) -> str:
    """The page's own part of its HTML file, without the links that the site adds to headings."""
    name = page.removesuffix(".md").removesuffix("README")
    found = (site / name / "index.html").read_text(encoding="utf-8")
    found = found.partition("<article")[2].partition("</article>")[0]
    return re.sub(r'<a class="headerlink".*?</a>', "", found)


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    files = list(site.rglob("*.html"))
    assert len(files) > len(pages())
    for file in files:
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", file.read_text(encoding="utf-8"))
        assert tags and not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)]


def test_no_line_breaks_within_a_flag(site: Path) -> None:
    """A browser breaks a line after a hyphen, as in --max-tokens, unless white-space forbids it."""
    sheet = (site / "docs/site.css").read_text(encoding="utf-8")
    block, word = (
        re.search(rf"(?m)^\.md-typeset {name} {{(.*?)}}", sheet)
        for name in ("pre > code", r"\.word")
    )
    assert block is not None and "white-space: pre;" in block[1] and "overflow-x: auto;" in block[1]
    assert word is not None and "white-space: nowrap;" in word[1]
    page = html(site, "docs/train.md")
    assert '<code><span class="word">--max-tokens</span> 4096</code>' in page
    assert not re.search(r"(?<!</span>)<code>[^<]*-", page)  # but for blocks


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/api.md"])
def test_a_page_reads_as_on_a_repositorys_web_page(site: Path, page: str) -> None:
    """Pages there are CommonMark, which has other rules for lists and tables than the site."""
    on_the_page, on_the_site = MARKDOWN.render(text(page)), html(site, page)
    assert Counter(TAG.findall(on_the_page)) == Counter(TAG.findall(on_the_site))


# Pages of users: not those of developers, and not the list of changes.
FOR_USERS = [
    page
    for page in pages()
    if re.fullmatch(r"README.md|docs/[a-z-]+.md|examples/.*", page) and page != "docs/style.md"
]


@pytest.mark.parametrize("page", FOR_USERS)
def test_a_page_begins_with_what_to_do(page: str) -> None:
    """Its first paragraph, or the code behind it, has the first command to type."""
    parsed = [token for token in MARKDOWN.parse(text(page)) if token.type != "html_block"]
    assert [token.type for token in parsed[2:4]] == ["heading_close", "paragraph_open"]
    opening = parsed[4].content + parsed[6].content
    assert re.search(r"\b(lightseq-[a-z]+|bash|python -m|import) ?", opening), opening
