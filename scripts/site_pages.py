"""MkDocs hook, see mkdocs.yml: a page of the site has the path that its file has in the repository.

So pages outside docs/ belong to the site without a copy, and a relative link between two pages is
right in both places. Other files that a page links or shows, such as plots, belong to it too.
Code in a line breaks between its words alone: a browser would also break --max-tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "examples/*/README.md")
_TARGET = re.compile(r"\]\(([^)#:]+)")
_CODE = re.compile(r"(?<=<code>)[^<]*-[^<]*(?=</code>)")  # in a line: that of a block has tags


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by the pages, with paths from the root, and the linked files."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    linked = {
        path
        for page in pages
        for target in _TARGET.findall(page.read_text(encoding="utf-8"))
        if (path := (page.parent / target).resolve()).is_file() and path.suffix != ".md"
    }
    for path in (*pages, *sorted(linked), ROOT / "docs/site.css"):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_content(html: str, **others: object) -> str:
    """Marks the words with a hyphen within code in a line; site.css keeps each in one line."""

    def marked(code: re.Match[str]) -> str:
        return re.sub(r"\S*-\S*", r'<span class="word">\g<0></span>', code[0])

    return _CODE.sub(marked, html)
