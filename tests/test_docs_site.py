"""The site: built without a warning, whole, and without anything from elsewhere."""

from __future__ import annotations

from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .documents import DOCS, build_site

pytestmark = [pytest.mark.pages, pytest.mark.timeout(300)]


class Page(HTMLParser):
    """What a page of the site has and what it asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.text: list[str] = []
        self._silent = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
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


class Site:
    def __init__(self, folder: Path, said: str) -> None:
        self.folder, self.said = folder, said

    @cached_property
    def pages(self) -> dict[Path, Page]:
        return {path: Page(path) for path in sorted(self.folder.rglob("*.html")) if path.name != "404.html"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    return Site(folder, build_site(folder))


def test_the_site_is_built_without_a_warning(site: Site):
    assert "WARNING" not in site.said and "ERROR" not in site.said, site.said
    built = {path.relative_to(site.folder).with_suffix(".md").as_posix() for path in site.pages}
    assert built >= {page.relative_to(DOCS).as_posix() for page in DOCS.glob("*.md")}
    assert not list(site.folder.rglob("*.py")), "what makes the site is no part of it"


def test_links_and_anchors_of_the_site_resolve(site: Site):
    broken = []
    for path, page in site.pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            there = goal.exists() and (
                not parts.fragment or goal not in site.pages or unquote(parts.fragment) in site.pages[goal].ids
            )
            if not there:
                broken.append((path.relative_to(site.folder).as_posix(), link))
    assert broken == []


def test_the_site_asks_nobody_else_for_anything(site: Site):
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
