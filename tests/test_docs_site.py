"""The site builds without a warning, is complete, and loads nothing from other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .documents import DOCS, build_site

pytestmark = [pytest.mark.pages, pytest.mark.timeout(300)]


class Page(HTMLParser):
    """The text of a page and the files it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.assets: list[str] = []
        self.text: list[str] = []
        self._silent = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.assets.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.assets.append(given.get("href", ""))
        self._silent += tag in ("script", "style", "code", "pre")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style", "code", "pre")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text.append(data)


@dataclass
class Site:
    folder: Path
    output: str
    """Of the build."""
    pages: dict[Path, Page]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    output = build_site(folder)
    return Site(folder, output, {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"})


def test_the_site_is_built_without_a_warning(site: Site):
    """With `--strict`, MkDocs fails for a broken link or anchor."""
    assert "WARNING" not in site.output and "ERROR" not in site.output, site.output
    built = {path.relative_to(site.folder).with_suffix(".md").as_posix() for path in site.pages}
    assert built >= {page.relative_to(DOCS).as_posix() for page in DOCS.glob("*.md")}
    assert not list(site.folder.rglob("*.py")), "the build scripts are not part of the site"


def test_the_site_loads_nothing_from_other_hosts(site: Site):
    for path, page in site.pages.items():
        foreign = [asset for asset in page.assets if urlsplit(asset).netloc]
        assert foreign == [], path
    for sheet in site.folder.rglob("*.css"):
        assert "url(http" not in sheet.read_text().replace('"', "").replace("'", ""), sheet


def test_tables_are_tables_on_the_site(site: Site):
    for path, page in site.pages.items():
        text = "".join(page.text)
        assert "|---" not in text and "\n| " not in text, path


def test_a_page_can_be_searched_for_without_a_server(site: Site):
    index = site.folder / "search" / "search_index.js"
    assert index.exists() and "staleness_threshold" in index.read_text()
