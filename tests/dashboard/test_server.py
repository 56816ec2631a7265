"""The page over real HTTP: who is let in, what is served and what never is, and events that go on after a break."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from freewheel.dashboard.web import server as live
from freewheel.dashboard.web import views
from freewheel.dashboard.web.runs import Runs
from freewheel.dashboard.web.server import STATIC, Door, Server, make_token
from freewheel.trainer.checkpoint import RunLock
from freewheel.utils.http import address, listen

from .made_run import DEEP, Writer, make_run

TOKEN = "a-token-that-nobody-guesses"
WAIT_S = 30.0


@dataclass
class Page:
    """A server and a client that has the token."""

    root: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> aiohttp.ClientResponse:
        headers = {"Authorization": f"Bearer {TOKEN}", **options.pop("headers", {})}
        return await self.session.get(self.root + path, headers=headers, allow_redirects=False, **options)

    async def json(self, path: str, **options: Any) -> Any:
        async with await self.get(path, **options) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., Any]]:
    servers: list[Server] = []
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def open_page(*names: Path) -> Page:
            server = Server(Runs([str(name) for name in names], clock=lambda: 0.0), token=TOKEN)
            listening = listen("127.0.0.1", 0)
            await server.start(listening)
            servers.append(server)
            return Page(address(listening, "").partition("/?")[0], session)

        yield open_page
        for server in servers:
            await server.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=20)


# -- who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/runs/run", "/api/runs/run/events", "/no"])
async def test_without_the_token_nothing_is_shown_and_the_way_in_is_said(opened: Any, folder: Path, path: str):
    page = await opened(folder)
    for given in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": "freewheel=x"},
    ):
        async with page.session.get(page.root + path, headers=given, allow_redirects=False) as reply:
            assert reply.status == 403
            assert reply.content_type == "text/plain"
            assert "freewheel dashboard RUN" in await reply.text()


async def test_the_token_in_the_address_becomes_a_cookie_of_this_port_and_leaves_the_address(opened: Any, folder: Path):
    page = await opened(folder)
    async with page.session.get(f"{page.root}/?token={TOKEN}", allow_redirects=False) as reply:
        assert (reply.status, reply.headers["Location"]) == (303, "/")
        cookie = reply.headers["Set-Cookie"]
    port = page.root.rpartition(":")[2]
    assert cookie.startswith(f"freewheel-{port}={TOKEN};")
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
    sent = {"Cookie": cookie.partition(";")[0]}
    async with page.session.get(page.root + "/", headers=sent) as reply:
        assert reply.status == 200 and "<title>freewheel</title>" in await reply.text()
    async with page.session.get(f"{page.root}/?token=wrong", allow_redirects=False) as reply:
        assert reply.status == 403
    async with page.session.get(f"{page.root}/api/runs?token={TOKEN}", allow_redirects=False) as reply:
        assert reply.status == 403


def test_tokens_are_long_and_never_the_same():
    assert len({make_token() for _ in range(100)}) == 100 and len(make_token()) >= 43
    door = Door("ünï", 1)
    assert door.knows("ünï") and not door.knows("") and not door.knows(None) and not door.knows("\udcff")


async def test_every_reply_forbids_foreign_scripts_frames_and_guesses(opened: Any, folder: Path):
    page = await opened(folder)
    for path in ("/", "/static/app.js", "/api/runs/run", "/api/no", "/api/runs/run/events"):
        async with await page.get(path) as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert reply.headers["Referrer-Policy"] == "no-referrer"
            assert "Access-Control-Allow-Origin" not in reply.headers


async def test_nothing_can_be_changed(opened: Any, folder: Path):
    page = await opened(folder)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        sent = {"Authorization": f"Bearer {TOKEN}"}
        async with page.session.request(method, page.root + "/api/runs/run", headers=sent) as reply:
            assert reply.status == 405


# -- what is served ---------------------------------------------------------------------------------------------------


async def test_the_page_is_served_whole_and_asks_nobody_else(opened: Any, folder: Path):
    page = await opened(folder)
    assets = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
    assert {"index.html", "app.js", "views/overview.js"} <= set(assets)
    for name in assets:
        async with await page.get(f"/static/{name}") as reply:
            assert reply.status == 200, name
            text = (await reply.text()).replace("http://www.w3.org/", "")
            assert "http://" not in text and "https://" not in text, f"{name} names another host"
    for page_text in (STATIC / "index.html").read_text().split("<script")[1:]:
        assert page_text.startswith(' type="module" src="/static/')


def test_what_is_timed_has_a_colour_of_its_own_in_either_theme():
    names = set(
        re.findall(r"(\w+): ", (STATIC / "format.js").read_text().partition("const SPANS = {")[2].partition("}")[0])
    )
    light, _, dark = (STATIC / "base.css").read_text().partition('[data-theme="dark"]')
    for theme in (light, dark):
        colours = dict(re.findall(r"--span-(\w+): #(\w{6});", theme))
        assert set(colours) == names >= {"train", "generate", "wait_batch", "wait_reward", "score"}
        for one, other in itertools.combinations(map(bytes.fromhex, colours.values()), 2):
            assert math.dist(one, other) > 40, "they look the same"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static//etc/passwd",
        "/api/runs/..%2f..%2fetc", "/api/runs/%2e%2e", "/api/runs/run/samples/..%2f..%2fx", "/api/runs/run/prompts/-1",
        "/api/runs/run/prompts/x", "/api/runs/no", "/api/runs/run/series?name=%00", "/no", "/api",
    ],
)  # fmt: skip
async def test_no_address_leads_out(opened: Any, folder: Path, path: str):
    import yarl

    page = await opened(folder)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with page.session.get(yarl.URL(page.root + path, encoded=True), headers=headers) as reply:
        assert reply.status == 404
        assert "error" in await reply.json()


async def test_every_view_has_its_answer(opened: Any, folder: Path):
    page = await opened(folder)
    (run,) = (await page.json("/api/runs"))["runs"]
    assert (run["id"], run["step"], run["state"]) == ("run", 20, "ended")
    assert (await page.json("/api/runs/run"))["now"]["step"] == 20
    assert (await page.json("/api/runs/run/judge"))["judge"]["limit"] > 0
    assert (await page.json("/api/runs/run/weights"))["recorded"]
    assert (await page.json("/api/runs/run/timeline"))["recorded"]
    samples = await page.json("/api/runs/run/samples?only=failed")
    assert (await page.json(f"/api/runs/run/samples/{samples['cards'][0]['key']}"))["responses"][0][
        "status"
    ] == "failed"
    ledger = await page.json("/api/runs/run/ledger")
    assert "journal.sqlite is missing" in ledger["report"]["violations"][0]
    assert "journal" in (await page.json("/api/runs/run/prompts/3"))["error"]
    assert (await page.json("/api/runs/run/series?name=mine/of_a_hook&from=5&to=9"))["x"] == [4, 5, 6, 7, 8, 9, 10]
    assert len((await page.json("/api/compare?runs=run&metric=eval/reward&kind=eval"))["runs"]) == 1


async def test_the_run_that_is_live_is_the_first(opened: Any, tmp_path: Path):
    for name, began in (("a", 10), ("b", 20), ("c", 30)):
        make_run(tmp_path / name, steps=1)
        os.utime(tmp_path / name / "config.yaml", (began, began))
    lock = RunLock(tmp_path / "b")
    lock.acquire()
    try:
        page = await opened(tmp_path)
        assert [run["id"] for run in (await page.json("/api/runs"))["runs"]] == ["b", "c", "a"]
    finally:
        lock.release()


@pytest.mark.parametrize(
    "path", ["/series?name=actor/loss&kind=x", "/timeline?from=abc", "/timeline?from=nan", "/samples?before=1e999"]
)
async def test_what_is_no_number_is_said_so(opened: Any, folder: Path, path: str):
    page = await opened(folder)
    async with await page.get(f"/api/runs/run{path}") as reply:
        assert reply.status == 400 and "give" in (await reply.json())["error"]


async def test_too_many_or_unknown_runs_are_not_compared(opened: Any, folder: Path):
    page = await opened(folder)
    for runs, status in (("", 400), (",".join(["run"] * 13), 400), ("no", 404)):
        async with await page.get(f"/api/compare?runs={runs}") as reply:
            assert reply.status == status


async def test_what_is_no_request_is_refused_without_a_traceback(
    opened: Any, folder: Path, caplog: pytest.LogCaptureFixture
):
    page = await opened(folder)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(page.root.rpartition(":")[2]))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert not caplog.records, "anybody may send anything"


async def test_a_run_that_is_removed_while_it_is_open_ends_nothing(opened: Any, folder: Path):
    page = await opened(folder)
    await page.json("/api/runs/run")
    shutil.rmtree(folder)
    assert (await page.json("/api/runs/run"))["state"] == "removed"
    for path in ("judge", "weights", "timeline", "samples", "ledger"):
        await page.json(f"/api/runs/run/{path}")


DEEP_ROW = (
    b'{"time": 1, "ordinal": 1, "ph": "X", "name": "x", "ts": 1, "level": "ERROR", "message": "", "x": %s}' % DEEP
)
"""What a reader of any of the files takes for its own, and cannot read to its end."""


async def test_garbage_in_every_file_shows_what_can_be_shown(opened: Any, folder: Path):
    for path in (*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")):
        with path.open("ab") as file:
            file.write(b'\x00\xff\n{"kind": "pulse"}\n{"ph": 1}\n[]\n"x"\n' + b"{" * 10_000 + b"\n" + DEEP + b"\n")
            file.write(DEEP_ROW + b'\n{"kind": "statistics", ' + DEEP_ROW[1:] + b"\n")
            file.writelines(b'{"ph": "%s", "id": "007", "name": "x", "ts": 1}\n' % half for half in (b"b", b"e"))
    (folder / "config.yaml").write_bytes(b"\xff: [")
    (folder / "journal.sqlite").write_bytes(b"no database")
    page = await opened(folder)
    for path in ("", "/judge", "/weights", "/timeline", "/samples", "/ledger", "/prompts/1"):
        await page.json(f"/api/runs/run{path}")
    journal, metrics = (await page.json("/api/runs/run"))["now"]["missing"]
    assert journal.startswith("journal.sqlite cannot be read") and "damaged" in journal
    assert metrics.endswith("lines of metrics.jsonl could not be read")


async def test_an_audit_that_takes_its_time_holds_up_nothing_else(
    opened: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, may_end = threading.Event(), threading.Event()

    def audit(folder: Path) -> dict[str, Any]:
        begun.set()
        may_end.wait(WAIT_S)
        return {"report": None, "error": folder.name}

    monkeypatch.setattr(views, "ledger", audit)
    page = await opened(folder)
    asked = asyncio.create_task(page.json("/api/runs/run/ledger"))
    try:
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        assert (await page.json("/api/runs/run"))["now"]["step"] == 20
        assert not asked.done()
    finally:
        may_end.set()
    assert (await asked)["error"] == "run"


# -- events -----------------------------------------------------------------------------------------------------------


class Listening:
    """One who listens to events."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply

    async def next(self) -> dict[str, str]:
        """The next event that is no comment, by its fields."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found: dict[str, str] = {}
                while (line := (await self._reply.content.readline()).decode().rstrip("\n")) and self._reply:
                    name, _, value = line.partition(": ")
                    found[name] = value
                if "event" in found:
                    return found
                if self._reply.content.at_eof():
                    raise ConnectionError("the stream ended")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.02)


async def test_what_a_run_adds_is_sent_once(opened: Any, folder: Path):
    page, writer = await opened(folder), Writer(folder, steps=20)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as reply:
        assert reply.content_type == "text/event-stream"
        listening = Listening(reply)
        first = json.loads((await listening.next())["data"])  # where it stands
        assert first["steps"] == {}
        writer.go_on(2)
        steps: list[int] = []
        while len(steps) < 2:
            steps += json.loads((await listening.next())["data"])["steps"].get("step", [])
        assert steps == [21, 22]


async def test_who_comes_back_goes_on_where_he_was(opened: Any, folder: Path):
    page, writer = await opened(folder), Writer(folder, steps=20)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    writer.go_on(1)
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as reply:
        event = await Listening(reply).next()
        assert json.loads(event["data"])["steps"]["step"] == [21]
    writer.go_on(3)
    again = {"Last-Event-ID": event["id"]}
    async with await page.get(f"/api/runs/run/events?cursor={cursor}", headers=again) as reply:
        assert json.loads((await Listening(reply).next())["data"])["steps"]["step"] == [22, 23, 24]


async def test_half_a_line_is_not_sent_before_it_is_whole(opened: Any, folder: Path):
    page, writer = await opened(folder), Writer(folder, steps=20)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as reply:
        listening = Listening(reply)
        await listening.next()
        writer.tear(b'{"kind": "step", "step": 21, "ti')
        await asyncio.sleep(0.2)
        writer.tear(b'me": 1790000100, "actor/loss": 1.5}\n')
        assert json.loads((await listening.next())["data"])["steps"]["actor/loss"] == [1.5]


async def test_who_listens_to_a_run_that_is_silent_hears_that_the_server_is_there(
    opened: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(live, "ALIVE_S", 0.05)
    page = await opened(folder)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as reply:
        listening = Listening(reply)
        assert (await listening.next())["event"] == "change"
        assert await listening.next() == {"event": "alive", "data": "{}"}


async def test_who_cannot_go_on_is_told_to_begin_anew(opened: Any, folder: Path):
    page = await opened(folder)
    for cursor in ("", "7.0.0.0.0.0.0"):
        async with await page.get(f"/api/runs/run/events?cursor={cursor}") as reply:
            assert (await Listening(reply).next())["event"] == "reload"
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as reply:
        listening = Listening(reply)
        await listening.next()
        (folder / "metrics.jsonl").unlink()
        make_run(folder, steps=3)
        while (event := await listening.next())["event"] != "reload":
            pass
        assert event["data"] == "{}"


async def test_a_stop_ends_those_who_listen(opened: Any, folder: Path):
    runs = Runs([str(folder)], clock=lambda: 0.0)
    server = Server(runs, token=TOKEN)
    listening = listen("127.0.0.1", 0)
    await server.start(listening)
    root = address(listening, "").partition("/?")[0]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.get(f"{root}/api/runs/run/events", headers=headers) as reply:
        await Listening(reply).next()
        async with asyncio.timeout(WAIT_S):
            await server.stop()
            assert not (await reply.content.read()).strip(b":\n"), "no event comes after the stop"


async def test_only_so_many_may_listen(opened: Any, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(live, "MOST_STREAMS", 1)
    page = await opened(folder)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as first:
        await Listening(first).next()
        async with await page.get("/api/runs/run/events") as second:
            assert second.status == 503 and "close one" in (await second.json())["error"]
