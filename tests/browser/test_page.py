"""The page in a browser: every view, by pointer and keyboard, wide and narrow, dark and light, and during a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from freewheel.trainer.checkpoint import RunLock

from ..dashboard.made_run import (
    BEGAN_S,
    Writer,
    line,
    make_run,
    pulse_row,
    sample_row,
    statistics_row,
    trace_lines,
    write_journal,
    write_lines,
)
from .conftest import PHONE

pytestmark = [pytest.mark.pages, pytest.mark.timeout(300)]

LOST = ("Failed to load resource", "ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY")
"""Console errors of a page whose server is gone."""
VIEWS = ["overview", "judge", "weights", "timeline", "samples", "ledger", "compare"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (1, 2):
        make_run(tmp_path / f"run-{seed}", steps=60, seed=seed)
        write_journal(tmp_path / f"run-{seed}")
    return tmp_path


@pytest.fixture
def page(runs: Path, serve: Any, open_page: Any) -> Any:
    return open_page(serve(runs))


def view(page: Any, name: str) -> None:
    page.click(f"nav [data-view={name}]")
    page.wait_for_selector(f"nav [data-view={name}][aria-current=page]")


def until(page: Any, true: str, *given: Any, wait_s: float = 30.0) -> None:
    """Wait until a JavaScript expression is true. The page's own policy forbids that it evaluates text itself."""
    ends = time.monotonic() + wait_s
    while not page.evaluate(true, *given):
        assert time.monotonic() < ends, f"still false: {true}"
        page.wait_for_timeout(50)


def painted(page: Any, selector: str = "canvas") -> int:
    """Return how many of the visible canvases under a selector are not empty."""
    return page.eval_on_selector_all(
        selector,
        """all => all.filter(one => one.width && one.getContext('2d')
            .getImageData(0, 0, one.width, one.height).data.some(value => value)).length""",
    )


# -- the views --------------------------------------------------------------------------------------------------------


def test_the_first_view_shows_the_state_the_trend_and_the_curves(page):
    page.wait_for_selector(".hero .says")
    assert "can be resumed. It was judge-bound: 62%" in page.inner_text(".hero .says")
    assert "freewheel train resume=" in page.inner_text(".hero code")
    assert page.inner_text(".hero .learns").startswith("It learns: held-out reward")
    assert page.inner_text("#progress-words").startswith("60 / 60 steps")
    assert painted(page) >= 12
    assert page.locator(".histogram .bin").count() == 5
    assert page.locator(".shares .track").count() == 2
    assert "slow judge" in page.inner_text(".log")


def test_every_view_opens_with_a_click_and_shows_its_content(page):
    wanted = {
        "judge": ["Limit", "429s", "Calls saved", "judge-large", "timeout"],
        "weights": ["Sync log", "v60", "2 attempts"],
        "timeline": ["groups"],
        "samples": ["Mia has", "version", "Show in ledger"],
        "ledger": ["Every prompt is accounted for", "trained"],
        "compare": ["run-1", "run-2", "Settings that differ", "seed"],
    }
    for name, words in wanted.items():
        view(page, name)
        for word in words:
            page.wait_for_selector(f"#content :text({json.dumps(word)})")
        assert page.title().lower().startswith(name)


def test_a_chart_of_any_metric_can_be_read_by_pointer_and_keyboard(page):
    chart = page.locator("figure canvas").first
    chart.hover(position={"x": 300, "y": 100})
    page.wait_for_selector(".tip.on")
    assert "training reward" in page.locator(".tip.on").first.inner_text()
    chart.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = page.locator("figure [aria-live]").first
    assert said.inner_text().startswith("step 2: training reward")
    assert "Reward: training reward from" in chart.get_attribute("aria-label")
    page.locator(".legend button").first.click()
    assert page.locator(".legend button").first.get_attribute("aria-pressed") == "false"
    with page.expect_response(re.compile("mine%2Fof_a_hook")) as reply:
        page.select_option("select[aria-label=Metric]", label="mine/of_a_hook")
    assert len(reply.value.json()["y"]) == 60


@pytest.mark.parametrize("title", ["Reward", "Age of samples", "Entropy"])
def test_a_chart_over_steps_fetches_what_is_zoomed_into(page, title):
    chart = page.locator(f"canvas[aria-label^='{title}:']")
    chart.scroll_into_view_if_needed()
    before, box = chart.get_attribute("aria-label"), chart.bounding_box()
    with page.expect_response(re.compile("/series")):
        page.mouse.move(box["x"] + 110, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 190, box["y"] + 70, steps=4)
        page.mouse.up()
    label = "one => document.querySelector(`canvas[aria-label^='${one[0]}:']`).ariaLabel"
    until(page, f"one => ({label})(one) !== one[1]", [title, before])
    chart.dblclick()
    until(page, f"one => ({label})(one) === one[1]", [title, before])


def test_the_timeline_zooms_moves_and_leads_to_a_group(page):
    view(page, "timeline")
    page.wait_for_selector(".gantt canvas")
    until(page, "document.querySelector('.toolbar .num').textContent.includes('groups')")
    before = page.inner_text(".toolbar .num")
    with page.expect_response(re.compile("/timeline")):
        page.click("[aria-label='Zoom in']")
    until(page, "before => document.querySelector('.toolbar .num').textContent !== before", before)
    with page.expect_response(re.compile("/timeline")):
        page.keyboard.press("0")
    assert painted(page, ".gantt canvas") == 1
    assert "trainer train" in page.get_attribute(".gantt canvas", "aria-label")
    with page.expect_response(re.compile("/timeline")):
        page.keyboard.press("ArrowRight")


def test_the_timeline_shows_how_much_is_left_out(page):
    page.route(re.compile("/timeline"), lambda one: one.fulfill(json={**one.fetch().json(), "whole_from_s": 70.0}))
    view(page, "timeline")
    page.wait_for_selector(".toolbar :text('spans before 1:10 are not shown')")


def test_samples_are_searched_filtered_and_walked_through(page):
    view(page, "samples")
    page.wait_for_selector(".card[aria-current=true]")
    page.wait_for_selector(".token-run")
    assert page.locator(".token-run").count() >= 8
    first = page.inner_text(".card[aria-current=true]")
    page.keyboard.press("j")
    until(page, "first => document.querySelector('.card[aria-current=true]').innerText !== first", first)
    page.keyboard.press("/")
    page.keyboard.type("#7")
    until(page, "document.querySelectorAll('.card').length === 1")
    assert "#7" in page.inner_text(".card")
    page.fill("input[type=search]", "")
    page.click("button:text('Failed')")
    page.wait_for_selector(".chip.bad")
    assert "timeout" in page.inner_text(".chip.bad")
    page.fill("input[type=search]", "no such words")
    page.wait_for_selector(".cards :text('Nothing matches')")


def test_model_output_is_shown_as_text_and_never_as_markup(tmp_path, serve, open_page):
    folder = make_run(tmp_path / "run", steps=5)
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    row = sample_row(99, text=attack)
    row["responses"][0]["segments"] = [[1, attack], [2, "\u202e\u0000"]]
    write_lines(folder / "samples/rollouter-0-12.jsonl", [row], "ab")
    Writer(folder, steps=5).add({"kind": "event", "step": 5, "time": BEGAN_S + 99, "text": attack})
    page = open_page(serve(folder))
    assert attack in page.inner_text(".log")
    view(page, "samples")
    page.wait_for_selector(f".prompt:text({json.dumps(attack)})")
    assert page.locator("#content img, #content script").count() == 0


def test_the_ledger_follows_one_prompt(page):
    view(page, "ledger")
    page.wait_for_selector(".verdict.good")
    page.fill("input[aria-label='Prompt number']", "3")
    page.keyboard.press("Enter")
    page.wait_for_selector("#content :text('Prompt #3: trained')")
    assert "trained on in step 2" in page.inner_text(".life")
    page.fill("input[aria-label='Prompt number']", "9999")
    page.keyboard.press("Enter")
    page.wait_for_selector("#content :text('No record of this prompt')")


def test_runs_are_switched_and_laid_over_one_another(page):
    page.select_option("#runs", "run-1")
    until(page, "location.hash.includes('run-1')")
    view(page, "compare")
    page.wait_for_selector(".pick")
    assert page.locator(".pick input:checked").count() == 2
    assert painted(page) == 1
    page.locator(".pick input").first.uncheck()
    page.wait_for_selector("#content :text('Select a second run')")


def test_after_quick_switches_the_last_chosen_run_is_shown(tmp_path, serve, open_page):
    for steps in (10, 20):
        make_run(tmp_path / f"run-{steps}", steps=steps)
    page = open_page(serve(tmp_path))
    held: list[Any] = []
    page.route(re.compile("/api/runs/run-10$"), lambda one: held.append(one))
    followed: list[str] = []
    page.on("request", lambda one: followed.append(one.url) if "/events" in one.url else None)
    page.select_option("#runs", "run-10")
    ends = time.monotonic() + 30
    while not held:
        assert time.monotonic() < ends
        page.wait_for_timeout(20)
    page.go_back()
    until(page, "document.querySelector('#runs').value === 'run-20'")
    page.wait_for_selector("nav [data-view=overview][href='#overview/run-20']")
    with page.expect_response(re.compile("/api/runs/run-10$")):
        held[0].continue_()
    page.evaluate("fetch('/api/runs').then((one) => one.text())")  # earlier replies have been handled
    assert page.inner_text("#progress-words").startswith("20 / 20")
    assert "run-20" in page.title() and not any("run-10" in one for one in followed)


def test_an_address_that_names_no_view_or_no_run_still_opens_something(page):
    page.evaluate("location.hash = 'constructor'")
    page.wait_for_selector("nav [data-view=overview][aria-current=page]")
    page.wait_for_selector(".hero .says")
    page.evaluate("location.hash = 'judge/doesnotexist'")
    page.wait_for_selector("#content :text('There is no run named doesnotexist')")
    assert page.locator("#state").is_hidden() and page.locator("#progress-words").is_hidden()
    assert sorted(page.locator("#content a").all_inner_texts()) == ["run-1", "run-2"]
    page.click("#content a:text('run-1')")
    page.wait_for_selector("nav [data-view=judge][aria-current=page]")
    until(page, "document.querySelector('#runs').value === 'run-1'")
    assert page.locator("#state").is_visible()


def test_long_names_of_runs_keep_their_ends(tmp_path, serve, open_page):
    names = [f"word_problems-fully_async-with-a-long-name-2026111{day}-151515" for day in (6, 7)]
    for name in names:
        make_run(tmp_path / name, steps=2)
    page = open_page(serve(tmp_path))
    shown = page.locator("#runs option").all_inner_texts()
    assert [one[:1] for one in shown] == ["…", "…"] and {one[-15:] for one in shown} == {one[-15:] for one in names}
    assert page.get_attribute("#runs", "title") == str(tmp_path / names[1])


def test_a_run_keeps_its_colour_whichever_others_are_chosen(tmp_path, serve, open_page):
    for seed in range(5):
        make_run(tmp_path / f"run-{seed}", steps=5, seed=seed)
    page = open_page(serve(tmp_path))
    dots = """Object.fromEntries([...document.querySelectorAll('.pick:has(:checked)')]
        .map(one => [one.innerText.trim(), one.querySelector('.dot').style.background]))"""

    def compared() -> dict[str, str]:
        view(page, "compare")
        page.wait_for_selector(".pick")
        return page.evaluate(dots)

    first = compared()
    assert len(first) == len(set(first.values())) == 4
    boxes = page.locator(".pick input")
    boxes.nth(0).uncheck()
    for at in range(5):
        boxes.nth(at).check()
    after = page.evaluate(dots)
    assert len(after) == len(set(after.values())) == 5 and first.items() <= after.items()
    page.select_option("#runs", "run-0")
    until(page, "location.hash.includes('run-0')")
    assert compared().items() <= after.items()


# -- keyboard, theme and screen ---------------------------------------------------------------------------------------


def test_the_keyboard_alone_is_enough(page):
    for number, name in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        page.wait_for_selector(f"nav [data-view={name}][aria-current=page]")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="hidden")
    page.keyboard.press("1")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate(
                "(document.activeElement.dataset.view || document.activeElement.id || document.activeElement.tagName)"
            )
        )
    assert {*VIEWS, "theme", "help", "runs", "CANVAS"} <= seen
    page.keyboard.press("2")
    page.wait_for_selector("nav [data-view=judge][aria-current=page]")
    page.focus(".skip")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'content'")
    assert page.evaluate("location.hash").startswith("#judge/")


def test_every_focusable_element_has_a_name_and_shows_the_focus(page):
    for name in VIEWS:
        view(page, name)
        page.wait_for_selector("#content .panel")
        nameless = page.eval_on_selector_all(
            "a, button, input, select, canvas, [tabindex='0']",
            """all => all.filter(one => one.offsetParent)
                .filter(one => !(one.ariaLabel || one.innerText?.trim() || one.labels?.length))
                .map(one => one.outerHTML.slice(0, 120))""",
        )
        assert nameless == [], name
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_theme_is_the_systems_until_it_is_chosen(runs, serve, open_page, scheme):
    page = open_page(serve(runs), color_scheme=scheme)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == scheme
    page.click("#theme")
    other = "light" if scheme == "dark" else "dark"
    assert page.evaluate(theme) == other
    page.reload()
    page.wait_for_selector(".hero .says")
    assert page.evaluate(theme) == other
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (other == "dark")


def test_on_a_phone_every_view_fits_its_width(runs, serve, open_page):
    page = open_page(serve(runs), size=PHONE, has_touch=True, is_mobile=True, reduced_motion="reduce")
    assert page.evaluate("document.getAnimations().length") == 0
    for name in VIEWS:
        view(page, name)
        page.wait_for_selector("#content .panel")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
        links = page.eval_on_selector_all("nav a", "all => all.map(one => one.getBoundingClientRect().height)")
        assert min(links) >= 40, "too small for a thumb"


def test_a_view_says_what_was_not_recorded(tmp_path, serve, open_page):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_bytes(line({"kind": "event", "step": 0, "time": BEGAN_S, "text": "begun"}))
    page = open_page(serve(tmp_path / "run"))
    for name, words in {
        "overview": "Not recorded", "judge": "Nothing scored yet", "weights": "No weights sent yet",
        "timeline": "Not recorded", "samples": "Not recorded", "ledger": "Cannot audit this run",
        "compare": "Only one run to show",
    }.items():  # fmt: skip
        view(page, name)
        page.wait_for_selector(f"#content :text({json.dumps(words)})")


def test_a_run_without_metrics_shows_what_else_is_known(tmp_path, serve, open_page):
    folder = make_run(tmp_path / "run", steps=12, total=20)
    write_journal(folder, steps=12)
    (folder / "final").mkdir()
    (folder / "metrics.jsonl").unlink()
    page = open_page(serve(folder))
    page.wait_for_selector(".hero :text('metrics.jsonl is missing')")
    assert page.inner_text(".hero .says") == "Finished at step 12 of 20"
    assert "is unknown" in page.inner_text(".hero .learns")


def test_a_judge_that_is_down_and_an_engine_that_is_behind_are_shown(tmp_path, serve, open_page):
    folder = make_run(tmp_path / "run", steps=10)
    row = statistics_row(40, 10)
    judge = row["rollouter"]["rewards"]["judge"]
    judge |= {"failed": {}, "endpoints": [{**judge["endpoints"][0], "breaker": "open"}]}
    row["sync"]["versions"] = {"rollouter-0": 9, "rollouter-1": 2}
    Writer(folder, steps=10).add(row, pulse_row(45, 16))
    with RunLock(folder):
        page = open_page(serve(folder))
        view(page, "judge")
        page.wait_for_selector(".notice:text('unreachable, next try within 1 s. 72 requests wait')")
        assert page.inner_text("td .chip.bad") == "unreachable, next try within 1 s"
        assert page.locator("#content :text('Every request got a verdict')").count() == 0
        page.wait_for_selector("#content :text('72 requests still waiting for a verdict')")
        assert "failed calls" in page.get_attribute("canvas[aria-label^='429s']", "aria-label")
        view(page, "weights")
        page.wait_for_selector(".chip.good:text('rollouter-0 v9')")
        page.wait_for_selector(".chip.warn:text('rollouter-1 v2, 8 versions behind')")


# -- during a run -----------------------------------------------------------------------------------------------------


def test_new_rows_appear_without_a_click(tmp_path, serve, open_page):
    folder = make_run(tmp_path / "run", steps=10, total=100)
    page = open_page(serve(folder))
    assert page.inner_text("#progress-words").startswith("10 / 100 steps")
    writer = Writer(folder, steps=10)
    writer.go_on(5)
    until(page, "document.querySelector('#progress-words').textContent.startsWith('15 / 100')")
    assert page.locator(".hero :text('could not be read')").is_hidden()
    writer.tear(b"no row\n")
    page.wait_for_selector(".hero :text('1 line of metrics.jsonl could not be read')")
    view(page, "weights")
    page.wait_for_selector("#content :text('v15')")
    writer.go_on(1)
    page.wait_for_selector("#content :text('v16')")
    (folder / "metrics.jsonl").unlink()
    make_run(folder, steps=3, total=100)
    until(page, "document.querySelector('#progress-words').textContent.startsWith('3 / 100')")


def test_a_view_that_was_opened_too_early_fills_when_there_is_something(tmp_path, serve, open_page):
    folder = tmp_path / "run"
    write_lines(folder / "metrics.jsonl", [{"kind": "event", "step": 0, "time": BEGAN_S, "text": "begun"}])
    page = open_page(serve(folder))
    view(page, "timeline")
    page.wait_for_selector("#content :text('Not recorded')")
    write_lines(folder / "trace/trainer-1.jsonl", trace_lines(3)[0])
    page.wait_for_selector(".toolbar .num:text('groups')")
    assert painted(page, ".gantt canvas") == 1
    view(page, "samples")
    page.wait_for_selector("#content :text('Not recorded')")
    write_lines(folder / "samples/rollouter-0-1.jsonl", [sample_row(3)])
    page.wait_for_selector(".card :text('#3')")
    assert page.locator("#content :text('Not recorded')").count() == 0


def test_a_failed_request_is_retried(tmp_path, serve, open_page):
    folder = make_run(tmp_path / "run", steps=10, total=100)
    page = open_page(serve(folder), allowed=("Failed to load resource",))
    refused: list[str] = []

    def refuse_once(route: Any) -> None:
        kind = route.request.url.partition("?")[0]
        if kind in refused:
            route.continue_()
        else:
            refused.append(kind)
            route.fulfill(status=503, json={"error": "too many pages are open: close one"})

    page.route(re.compile("/api/runs/run$"), refuse_once)
    (folder / "metrics.jsonl").unlink()
    make_run(folder, steps=3, total=100)
    page.wait_for_selector("#content :text('too many pages')")
    page.wait_for_selector(".hero .says")
    until(page, "document.querySelector('#progress-words').textContent.startsWith('3 / 100')")
    page.route(re.compile("/events"), refuse_once)
    page.reload()
    until(page, "document.querySelector('#state').textContent === 'no connection'")
    Writer(folder, steps=3).go_on(5)
    until(page, "document.querySelector('#progress-words').textContent.startsWith('8 / 100')")
    assert len(refused) == 2


def test_a_page_without_its_server_says_so_and_its_clock_continues(tmp_path, serve, open_page):
    folder = make_run(tmp_path / "run", steps=10, total=100)
    page = open_page(serve(folder), allowed=LOST)
    assert page.locator("#lost").is_hidden()
    serve.stop()
    page.wait_for_selector("#lost:text('No message from the server for')")
    assert page.inner_text("#state") == "no connection"
    said = page.inner_text("#lost")
    assert f"freewheel dashboard {folder}" in said
    until(page, "said => document.querySelector('#lost').textContent !== said", said)
    assert page.inner_text(".hero .says").startswith("Not running")


def test_a_real_run_is_seen_learning_at_the_address_that_it_prints(tmp_path, open_page):
    small = ["trainer.total_steps=30", "trainer.groups_per_step=8", "rollout.n=4", "eval.prompts=32"]
    command = [sys.executable, "-m", "freewheel", "train", "--plain", f"run_dir={tmp_path / 'live'}", *small]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            url = next(line.split()[1] for line in run.stdout if line.startswith("Dashboard: "))
            page = open_page(url, allowed=LOST)
            steps = "Number(document.querySelector('#progress-words').textContent.split(' ')[0])"
            until(page, f"{steps} >= 1", wait_s=120)
            seen = page.evaluate(steps)
            until(page, f"{steps} > {seen}", wait_s=120)
            assert page.inner_text("#state") == "running"
            for name, content in (("timeline", ".gantt canvas"), ("samples", ".card"), ("weights", "table")):
                view(page, name)
                page.wait_for_selector(content, timeout=60_000)
            assert run.wait(timeout=240) == 0
            until(page, "document.querySelector('#state').textContent === 'no connection'")
        finally:
            run.terminate()
