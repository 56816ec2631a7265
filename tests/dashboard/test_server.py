"""The page over real HTTP: who is let in, what is served, and events that continue after a break."""

from __future__ import annotations

import asyncio
import contextlib
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

    server: Server
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
            return Page(server, address(listening, "").partition("/?")[0], session)

        yield open_page
        for server in servers:
            await server.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=20)


# -- who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/runs/run", "/api/runs/run/events", "/no"])
async def test_without_the_token_a_client_sees_only_how_to_get_in(opened, folder, path):
    page = await opened(folder)
    wrong = [{"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Cookie": "freewheel=x"}]
    for given in ({}, *wrong):
        async with page.session.get(page.root + path, headers=given, allow_redirects=False) as reply:
            assert (reply.status, reply.content_type) == (403, "text/plain")
            assert "freewheel dashboard RUN" in await reply.text()


async def test_the_token_in_the_address_becomes_a_cookie_of_this_port(opened, folder):
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
    for path in ("/?token=wrong", f"/api/runs?token={TOKEN}"):
        async with page.session.get(page.root + path, allow_redirects=False) as reply:
            assert reply.status == 403


def test_a_token_is_long_and_nothing_else_opens_the_door():
    assert len({make_token(), make_token()}) == 2 and len(make_token()) >= 43
    door = Door("ünï", 1)
    assert door.knows("ünï") and not door.knows("") and not door.knows(None) and not door.knows("\udcff")


async def test_every_reply_forbids_foreign_scripts_and_frames_and_nothing_can_be_changed(opened, folder):
    page = await opened(folder)
    for path in ("/", "/static/app.js", "/api/runs/run", "/api/no", "/api/runs/run/events"):
        async with await page.get(path) as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and "Access-Control-Allow-Origin" not in reply.headers
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert reply.headers["Referrer-Policy"] == "no-referrer"
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        sent = {"Authorization": f"Bearer {TOKEN}"}
        async with page.session.request(method, page.root + "/api/runs/run", headers=sent) as reply:
            assert reply.status == 405


# -- what is served ---------------------------------------------------------------------------------------------------


async def test_the_page_names_no_other_host(opened, folder):
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


def test_every_span_has_its_own_colour_in_both_themes():
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
async def test_no_address_reaches_a_file_outside_the_page(opened, folder, path):
    import yarl

    page = await opened(folder)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with page.session.get(yarl.URL(page.root + path, encoded=True), headers=headers) as reply:
        assert reply.status == 404
        assert "error" in await reply.json()


async def test_every_view_has_its_answer(opened, folder):
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


async def test_a_live_run_is_listed_first(opened, tmp_path):
    for name, began in (("a", 10), ("b", 20), ("c", 30)):
        make_run(tmp_path / name, steps=1)
        os.utime(tmp_path / name / "config.yaml", (began, began))
    page = await opened(tmp_path)
    with RunLock(tmp_path / "b"):
        assert [run["id"] for run in (await page.json("/api/runs"))["runs"]] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((f"runs/run{path}", 400) for path in ("/series?name=actor/loss&kind=x", "/timeline?from=abc")),
        *((f"runs/run{path}", 400) for path in ("/timeline?from=nan", "/samples?before=1e999")),
        *((f"compare?runs={runs}", 400) for runs in ("", ",".join(["run"] * 13))),
        ("compare?runs=no", 404),
    ],
)
async def test_an_invalid_query_is_refused_with_a_remedy(opened, folder, path, status):
    page = await opened(folder)
    async with await page.get(f"/api/{path}") as reply:
        assert reply.status == status and re.search("give|name|no run", (await reply.json())["error"])


async def test_an_invalid_request_is_refused_without_a_traceback(opened, folder, caplog):
    page = await opened(folder)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(page.root.rpartition(":")[2]))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert not caplog.records, "anybody may send anything"


VIEWS = ("", "/judge", "/weights", "/timeline", "/samples", "/ledger", "/prompts/1")
DEEP_ROW = (
    b'{"time": 1, "ordinal": 1, "ph": "X", "name": "x", "ts": 1, "level": "ERROR", "message": "", "x": %s}' % DEEP
)
"""What a reader of any of the files takes for its own, and cannot read to its end."""


async def test_garbage_in_every_file_shows_what_can_be_shown(opened, folder):
    for path in (*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")):
        with path.open("ab") as file:
            file.write(b'\x00\xff\n{"kind": "pulse"}\n{"ph": 1}\n[]\n"x"\n' + b"{" * 10_000 + b"\n" + DEEP + b"\n")
            file.write(DEEP_ROW + b'\n{"kind": "statistics", ' + DEEP_ROW[1:] + b"\n")
            file.writelines(b'{"ph": "%s", "id": "007", "name": "x", "ts": 1}\n' % half for half in (b"b", b"e"))
    (folder / "config.yaml").write_bytes(b"\xff: [")
    (folder / "journal.sqlite").write_bytes(b"no database")
    page = await opened(folder)
    for path in VIEWS:
        await page.json(f"/api/runs/run{path}")
    journal, metrics = (await page.json("/api/runs/run"))["now"]["missing"]
    assert journal.startswith("journal.sqlite cannot be read") and "damaged" in journal
    assert metrics.endswith("lines of metrics.jsonl could not be read")
    shutil.rmtree(folder)
    for path in VIEWS:
        await page.json(f"/api/runs/run{path}")
    assert (await page.json("/api/runs/run"))["state"] == "removed", "a removed run ends nothing"


async def test_a_slow_audit_delays_no_other_view(opened, folder, monkeypatch):
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
    """A client that reads events."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply

    async def next(self) -> dict[str, str]:
        """Return the fields of the next event, without comments."""
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


@contextlib.asynccontextmanager
async def listen_to(page: Page, cursor: str | None = None, **headers: str) -> AsyncIterator[Listening]:
    """Listen from a cursor on, or from now on; then the first event tells only where the run is."""
    since = (await page.json("/api/runs/run"))["cursor"] if cursor is None else cursor
    async with await page.get(f"/api/runs/run/events?cursor={since}", headers=headers) as reply:
        assert reply.content_type == "text/event-stream"
        listening = Listening(reply)
        if cursor is None:
            assert json.loads((await listening.next())["data"])["steps"] == {}
        yield listening


async def test_added_rows_are_sent_once_and_a_client_continues_after_a_break(opened, folder):
    page, writer = await opened(folder), Writer(folder, steps=20)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with listen_to(page) as listening:
        writer.go_on(2)
        steps: list[int] = []
        while len(steps) < 2:
            event = await listening.next()
            steps += json.loads(event["data"])["steps"].get("step", [])
        assert steps == [21, 22]
    writer.go_on(3)
    async with listen_to(page, cursor, **{"Last-Event-ID": event["id"]}) as listening:
        assert json.loads((await listening.next())["data"])["steps"]["step"] == [23, 24, 25]


async def test_a_silent_run_gives_signs_of_life(opened, folder, monkeypatch):
    monkeypatch.setattr(live, "ALIVE_S", 0.05)
    async with listen_to(await opened(folder)) as listening:
        assert await listening.next() == {"event": "alive", "data": "{}"}


async def test_a_client_that_cannot_continue_is_told_to_reload(opened, folder):
    page = await opened(folder)
    for cursor in ("", "7.0.0.0.0.0.0"):
        async with listen_to(page, cursor) as listening:
            assert (await listening.next())["event"] == "reload"
    async with listen_to(page) as listening:
        (folder / "metrics.jsonl").unlink()
        make_run(folder, steps=3)
        while (event := await listening.next())["event"] != "reload":
            pass
        assert event["data"] == "{}"


async def test_a_stop_ends_all_streams(opened, folder):
    page = await opened(folder)
    async with await page.get("/api/runs/run/events") as reply:
        await Listening(reply).next()
        async with asyncio.timeout(WAIT_S):
            await page.server.stop()
            assert not (await reply.content.read()).strip(b":\n"), "no event comes after the stop"


async def test_the_number_of_streams_is_limited(opened, folder, monkeypatch):
    monkeypatch.setattr(live, "MOST_STREAMS", 1)
    page = await opened(folder)
    cursor = (await page.json("/api/runs/run"))["cursor"]
    async with await page.get(f"/api/runs/run/events?cursor={cursor}") as first:
        await Listening(first).next()
        async with await page.get("/api/runs/run/events") as second:
            assert second.status == 503 and "close one" in (await second.json())["error"]
