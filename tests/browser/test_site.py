"""The docs site opened as files, without a server and without a network: it can be searched, and read in the dark."""

from __future__ import annotations

import pytest

from ..documents import build_site

pytestmark = [pytest.mark.pages, pytest.mark.timeout(300)]


def test_the_site_is_searched_without_a_server_or_requests(browser, tmp_path):
    build_site(tmp_path)
    asked: list[str] = []
    errors: list[str] = []
    page = browser.new_context(color_scheme="dark").new_page()
    page.on("request", lambda one: None if one.url.startswith("file:") else asked.append(one.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "index.html").as_uri())
    assert page.get_attribute("body", "data-md-color-scheme") == "slate"
    page.fill("input.md-search__input", "staleness_threshold")
    page.wait_for_selector(".md-search-result__item a")
    page.click(".md-search-result__item a")
    page.wait_for_url("**/*.html*")
    assert "staleness_threshold" in page.content()
    assert asked == [] and errors == []
    page.context.close()
