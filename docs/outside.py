"""Adds pages from outside docs/ to the site: README, changelog, contributing, an example's README.

    on_files           each of them becomes a separate page, with the text as it is
    on_page_markdown   links between files of the repository become links between pages of the site

So no text is written twice, and every page reads the same on GitHub. A link to a file that is not a page, such as a
script, becomes plain text. MkDocs calls these two functions by their names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

OUTSIDE = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "examples/gsm8k/README.md": "project/gsm8k.md",
}
"""File of the repository → page of the site."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)\s*$", re.MULTILINE | re.DOTALL)


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    there = {file.src_uri for file in files}
    return relinked(markdown, page.file.src_uri, there)


def relinked(markdown: str, page: str, there: set[str]) -> str:
    """Return the text with links as the site needs them. `page` and `there` are paths within the site."""
    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_links(markdown[at : fence.start()], page, there), fence.group()]
        at = fence.end()
    return "".join([*parts, _links(markdown[at:], page, there)])


def _links(text: str, page: str, there: set[str]) -> str:
    source = next((file for file, name in OUTSIDE.items() if name == page), posixpath.join("docs", page))

    def follow(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        path, hash_mark, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found.group()
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        goal = OUTSIDE.get(named) or (named.removeprefix("docs/") if named.startswith("docs/") else None)
        if goal is None or goal not in there:
            return found.group() if named.startswith("docs/") else words
        return f"{image}[{words}]({posixpath.relpath(goal, posixpath.dirname(page))}{hash_mark}{anchor})"

    return LINK.sub(follow, text)
