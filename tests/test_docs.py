"""The docs pages: generated text is current, links resolve, navigation is complete, and every named thing exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from freewheel.runtime.config_files import all_keys

from .documents import DOCS, LINK, PAGES, ROOT, anchors, inline_code, load_script, prose

SVG = "{http://www.w3.org/2000/svg}"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def site() -> dict[str, Any]:
    """Return mkdocs.yml without the Python tags that only MkDocs resolves."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Loader)
    return loaded


def nav_pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [page for one in inner for page in nav_pages(one)]


# -- generated ---------------------------------------------------------------------------------------------------------


def test_generated_text_is_up_to_date():
    for path, text in load_script(DOCS / "generate.py").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run `make docs`"


@pytest.mark.parametrize("name", ["configuration.md", "cli.md", "metrics.md"])
def test_every_key_flag_and_metric_has_a_description(name: str):
    rows = [line for line in (DOCS / name).read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for row in rows:
        assert row.rstrip("| ").rpartition(" | ")[2].strip(" `|"), f"no description: {row}"


def test_the_reference_page_lists_every_key():
    settings = (DOCS / "configuration.md").read_text()
    assert [key for key in all_keys() if f"| `{key}` |" not in settings] == []


# -- links -------------------------------------------------------------------------------------------------------------


@every_page
def test_links_resolve(page: Path):
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            there = anchors(linked)
            assert there.count(anchor) == 1, f"{page.name} links to {target}; {linked.name} has {sorted(there)}"


@every_page
def test_a_page_has_one_title_on_its_first_line(page: Path):
    text = prose(page)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1


@every_page
def test_a_blank_line_precedes_lists_and_tables(page: Path):
    """GitHub renders them without one; MkDocs does not."""
    before = ""
    for line in prose(page).splitlines():
        for mark in ("- ", "* ", "1. ", "| "):
            if line.startswith(mark) and before.strip() and not before.startswith((mark, "  ", "<!--")):
                assert before.startswith(("- ", "|")) or re.match(r"\d+\. ", before), (
                    f"{page.name}: {before!r}, {line!r}"
                )
        before = line


@every_page
def test_every_picture_exists_and_has_a_text_alternative(page: Path):
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose(page)):
        assert words.strip(), f"{page.name}: {target} has no text alternative"
        assert (page.parent / target).exists()


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_works_on_light_and_dark_pages_and_fetches_nothing(path: Path):
    root = ElementTree.parse(path).getroot()
    assert root.get("role") == "img" and root.get("aria-labelledby")
    assert all(root.find(f"{SVG}{name}") is not None for name in ("title", "desc"))
    text = path.read_text(encoding="utf-8")
    assert re.search(r'<rect class="paper"[^>]*width="\d+"', text), "it has no background"
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


# -- navigation --------------------------------------------------------------------------------------------------------


def test_navigation_lists_every_page_once():
    outside = load_script(DOCS / "outside.py").OUTSIDE
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md")} | set(outside.values())
    listed = nav_pages(site()["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == there
    assert {ROOT / source for source in outside} == {page for page in PAGES if page.parent != DOCS}


def test_links_to_files_outside_docs_become_links_between_pages():
    relinked = load_script(DOCS / "outside.py").relinked
    there = {"verl.md", "index.md", "images/a.svg", "project/readme.md", "project/gsm8k.md"}
    assert relinked("[a](docs/verl.md#x)", "project/readme.md", there) == "[a](../verl.md#x)"
    assert relinked("[`b`](../README.md#c)", "verl.md", there) == "[`b`](project/readme.md#c)"
    assert relinked("[c](../examples/gsm8k/README.md)", "index.md", there) == "[c](project/gsm8k.md)"
    assert relinked("![d](images/a.svg)", "index.md", there) == "![d](images/a.svg)"
    assert relinked("[e](../LICENSE), [f](https://a.b)", "index.md", there) == "e, [f](https://a.b)"
    assert relinked("[g](nowhere.md)", "index.md", there) == "[g](nowhere.md)", "MkDocs reports broken links"
    assert relinked("```\n[h](../README.md)\n```\n", "index.md", there) == "```\n[h](../README.md)\n```\n"


# -- names -------------------------------------------------------------------------------------------------------------


@cache
def all_tests() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


@every_page
def test_files_make_targets_and_tests_named_on_a_page_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {
        f"env-{peer}" for peer in ("verl", "trl", "vllm", "peers")
    }
    for named in re.findall(r"`make ([a-z -]+)", text):
        assert set(named.split()) <= targets, f"{page.name}: make {named}"
    folders = "benchmarks|examples|docs|tests|scripts|src"
    for name in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]+\.(?:py|md|toml|sh|yaml|svg))\b", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}, which does not exist"
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in all_tests(), f"{page.name} names {name}, which is not a test"


PACKAGES = sorted(path.parent.name for path in (ROOT / "src/freewheel").glob("*/__init__.py"))
SECTIONS = sorted({key.partition(".")[0] for key in all_keys() if "." in key})
KNOWN = {*all_keys(), *(key.rpartition(".")[0] for key in all_keys() if "." in key)}
FILE = re.compile(r"\.(?:sqlite|safetensors|py)\b")
KEY = re.compile(rf"^((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?:=.*)?$")
NO_KEYS = ("ray.util.queue",)
"""A module whose name looks like a key."""
OPEN_KEYS = ("rollout.vllm.", "observe.alerts.", "reward.judge.")
"""Keys below these are free, or belong to another schema."""
FOREIGN_KEYS = ("verl.md", "from-openrlhf.md")
"""Pages that name keys of other trainers, which tests/integrations check."""


@every_page
def test_modules_and_keys_named_on_a_page_exist(page: Path):
    for code in inline_code(page):
        if re.fullmatch(rf"(?:{'|'.join(PACKAGES)})/[\w/]+\.py", code):
            assert (ROOT / "src/freewheel" / code).exists(), f"{page.name} names {code}, which does not exist"
        found = KEY.match(code)
        if found and found[1] not in NO_KEYS and not FILE.search(code) and page.name not in FOREIGN_KEYS:
            assert found[1] in KNOWN or found[1].startswith(OPEN_KEYS), (
                f"{page.name} names {found[1]}, which is not a key"
            )


# -- troubleshooting ---------------------------------------------------------------------------------------------------

SYMPTOMS = {
    "no current event loop in a thread": ("use_async_io", "loop_lag_s", "asyncio.run"),
    "Requests time out": ("attempt_timeout_s", "latency_p99_s", "request_deadline_s"),
    "Memory grows": ("memory_cache_bytes", "freewheel_judge_queued", "shutdown_workers()"),
    "`OPENAI_API_KEY not found`": ("TRAIN_WITH_MONITOR", "OPENAI_BASE_URL", "export OPENAI_API_KEY"),
    "429s": ("requests_per_minute", "freewheel_judge_throttled_total", "concurrency"),
    "Memory at high concurrency": ("concurrency", "max_in_flight", "upper bound"),
    "A setting takes no effect": ("config.yaml", "--dry-run", "mode"),
    "A setting of the judge takes no effect": ("judge.config.to_dict()", "cache_hits", "cache=False"),
    "Slow generation": ("generation_timeout", "generation_errors", "batch_generation_interval"),
    "Many stale samples": ("staleness_threshold", "stale_samples_ratio", "sync_every_steps"),
    "The queue is full, or takes much memory": ("max_queue_size", "queue_size", "min_batch_count"),
    "Weight sync fails": ("sync_timeout", "sync_failures", "max_sync_retries"),
}
"""The symptom as users describe it → the keys, metrics and remedies that its row must name."""


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_every_known_symptom_has_a_key_a_metric_and_a_remedy(symptom: str):
    page = (DOCS / "troubleshooting.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {symptom} |")]
    assert [word for word in SYMPTOMS[symptom] if word not in row] == []


def test_every_troubleshooting_row_has_a_remedy():
    symptoms = (DOCS / "troubleshooting.md").read_text().partition("## The doctor")[0]
    rows = [line for line in symptoms.splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    for row in rows:
        assert row.strip("| ").count(" | ") == 2 and row.rstrip("| ").rpartition(" | ")[2], row


# -- benchmarks --------------------------------------------------------------------------------------------------------


def test_the_benchmarks_page_has_the_command_of_every_benchmark():
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    page = (DOCS / "benchmarks.md").read_text()
    assert len(scripts) > 10
    assert [path.name for path in scripts if f"python benchmarks/{path.name}" not in page] == []
