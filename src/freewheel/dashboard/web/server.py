"""Serves the page and its data over HTTP, read-only, to clients that have the token.

    GET /?token=…                     cookie ─▶ /
    GET /, /static/…                  the page itself, from the package
    GET /api/runs[/RUN[/…]], /compare JSON: token ─▶ RunView ─▶ `views`   (in a thread, because it reads files)
    GET /api/runs/RUN/events          changes since a cursor, as server-sent events

Access (`Door`): the printed address contains a token. Opening it sets a cookie and removes the token from the address.
No script can read the cookie. It is named after the port, but browsers send it to every server at the same host.

Events (`_follow`):

    client (cursor, or Last-Event-ID after a break) ─▶ changes ─▶ `event: change`, id: the next cursor
                                                          ├─ nothing new for long ─▶ `event: alive`
                                                          └─ None ─▶ `event: reload`: fetch everything again

The server keeps nothing per client, so a client that reconnects continues from its cursor, even on another server. A
view that fails is an error in its own reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from freewheel.dashboard.web import timeline, views
from freewheel.dashboard.web.runs import Runs, RunView
from freewheel.utils.http import server_log
from freewheel.utils.waiting import wait_for_event

TOKEN_BYTES = 32
REFUSED = (
    "403: this page needs its token.\n\n"
    "Open the address as it was printed, with ?token=… at its end: by `freewheel train` at its start, or by\n"
    "`freewheel dashboard RUN`, which prints a fresh one. Programs send it as `Authorization: Bearer TOKEN`.\n"
)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every reply. Model output is shown as text, and only the page's own script may run."""


def make_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


class Door:
    """Knows the token, by its digest."""

    def __init__(self, token: str, port: int) -> None:
        self.cookie = f"freewheel-{port}"
        self._digest = _digest(token)

    def knows(self, token: str | None) -> bool:
        """Compare digests in constant time, so that time reveals neither content nor length."""
        return token is not None and hmac.compare_digest(_digest(token), self._digest)

    def lets_in(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        return self.knows(cookies.get(self.cookie)) or (scheme.lower() == "bearer" and self.knows(given.strip()))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


EVERY_S = 1.0
"""Seconds between two looks: as often as a run writes a pulse."""
ALIVE_S = 15.0
"""After this much silence an `alive` event is sent, so that each side notices when the other is gone."""
RETRY_MS = 1000
MOST_STREAMS = 64


async def _follow(response: web.StreamResponse, view: RunView, told: str, stopping: asyncio.Event) -> None:
    """Send events until the server stops or the client must reload."""
    loop = asyncio.get_running_loop()
    before, sent_at = b"", loop.time()
    while not stopping.is_set():
        found = await asyncio.to_thread(_changes, view, told)
        if found is None:
            await response.write(b"event: reload\ndata: {}\n\n")
            return
        cursor = found.pop("cursor")
        data = msgspec.json.encode(found)
        if data != before:
            await response.write(b"event: change\nid: %s\ndata: %s\n\n" % (cursor.encode(), data))
            told, sent_at = cursor, loop.time()
            before = msgspec.json.encode(_without_rows(found))
        elif loop.time() - sent_at >= ALIVE_S:
            await response.write(b"event: alive\ndata: {}\n\n")
            sent_at = loop.time()
        await wait_for_event(stopping, EVERY_S)


def _changes(view: RunView, told: str) -> dict[str, Any] | None:
    with view.reading():
        return views.changes(view, told)


def _without_rows(found: dict[str, Any]) -> dict[str, Any]:
    """Return the same moment without rows, to compare it with the one before."""
    empty = {"steps": {}, "evals": {}, "pulses": {}, "statistics": 0, "syncs": 0, "events": []}
    return {name: empty.get(name, value) for name, value in found.items()}


log = logging.getLogger("freewheel.dashboard")


def serve(runs: Runs, listening: socket.socket, token: str, *, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGINT or SIGTERM, in the main thread."""
    asyncio.run(_serve(runs, listening, token, ready))


async def _serve(runs: Runs, listening: socket.socket, token: str, ready: Callable[[], None]) -> None:
    stopping = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(one, stopping.set)
    server = Server(runs, token=token)
    await server.start(listening)
    try:
        ready()
        await stopping.wait()
    finally:
        await server.stop()


STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
"""Types of the assets; other files are not served."""
MOST_COMPARED = 12
"""Most runs in one chart: the eye cannot tell more lines apart."""
SHUTDOWN_S = 2.0

ViewAnswer = Callable[[RunView, web.Request], Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves on the loop that starts it, between `start` and `stop`."""

    def __init__(self, runs: Runs, *, token: str) -> None:
        self._runs = runs
        self._token = token
        self._assets = _assets()
        self._listening = 0
        """Listening clients."""
        self._stopping = asyncio.Event()

    async def start(self, listening: socket.socket) -> None:
        """`listening`: a bound socket."""
        self._door = Door(self._token, listening.getsockname()[1])
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.router.add_get("/", self._static)
        app.router.add_get("/static/{name:.+}", self._static)
        app.router.add_get("/api/runs", self._all_runs)
        app.router.add_get("/api/compare", self._compare)
        app.router.add_get("/api/runs/{run}/events", self._events)
        for path, answer in ANSWERS.items():
            app.router.add_get(f"/api/runs/{{run}}{path}", self._answering(partial(_within, answer)))
        for path, answer in OF_THE_JOURNAL.items():
            app.router.add_get(f"/api/runs/{{run}}{path}", self._answering(answer))
        quiet = server_log("freewheel.dashboard.http")  # no access log, because it would contain the token
        self._runner = web.AppRunner(app, access_log=None, logger=quiet, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        self._stopping.set()
        await self._runner.cleanup()

    # -- who, and what went wrong -------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await self._let_in(request, handler)
        except web.HTTPException as error:
            response = _json({"error": error.text}, status=error.status)
        except ConnectionError:
            raise
        except Exception as error:  # only this reply fails; the server continues
            log.exception("%s could not be answered", request.path)
            words = f"{type(error).__name__}: {error}"
            response = _json({"error": words}, status=HTTPStatus.INTERNAL_SERVER_ERROR)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/" and self._door.knows(request.query.get("token")):
            # Lax: a browser that follows a link from another site does not send a stricter cookie.
            response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
            response.set_cookie(self._door.cookie, self._token, httponly=True, samesite="Lax", path="/")
            return response
        if not self._door.lets_in(request.headers, request.cookies):
            return web.Response(status=HTTPStatus.FORBIDDEN, text=REFUSED)
        return await handler(request)

    # -- what is served -----------------------------------------------------------------------------------------------

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        if name not in self._assets:
            raise web.HTTPNotFound(text=f"the page has no {name!r}")
        kind, body = self._assets[name]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _all_runs(self, request: web.Request) -> web.StreamResponse:
        """Return all runs, live ones first: the page opens the first one."""

        def found() -> list[dict[str, Any]]:
            runs = self._runs.all()
            if len(runs) > 1:  # their metrics are read when they are opened
                for view in runs:
                    view.settings.look()
                return sorted(map(views.label, runs), key=lambda one: one["state"] != "live")
            return [_within(views.headline, view) for view in runs]

        return _json({"runs": await asyncio.to_thread(found)})

    async def _compare(self, request: web.Request) -> web.StreamResponse:
        wanted = [self._view(run_id) for run_id in request.query.get("runs", "").split(",") if run_id]
        if not wanted or len(wanted) > MOST_COMPARED:
            raise web.HTTPBadRequest(text=f"runs: name 1 to {MOST_COMPARED} of them, with commas between")
        metric, kind = request.query.get("metric", "eval/reward"), _kind(request)
        return _json(await asyncio.to_thread(views.compare, wanted, metric, kind))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        view = self._view(request.match_info["run"])
        told = request.headers.get("Last-Event-ID") or request.query.get("cursor", "")
        if self._listening >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text="too many pages are open: close one")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._listening += 1
        try:
            await response.prepare(request)
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            with contextlib.suppress(ConnectionError):
                await _follow(response, view, told, self._stopping)
        finally:
            self._listening -= 1
        return response

    def _answering(self, answer: ViewAnswer) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            view = self._view(request.match_info["run"])
            found = await asyncio.to_thread(answer, view, request)
            if found is None:
                raise web.HTTPNotFound(text="this run has nothing at that address")
            return _json(found)

        return handle

    def _view(self, run_id: str) -> RunView:
        view = self._runs.find(run_id)
        if view is None:
            raise web.HTTPNotFound(text=f"there is no run {run_id!r} here")
        return view


# -- what can be asked of a run ---------------------------------------------------------------------------------------


def _within(answer: Callable[..., Any], view: RunView, *given: Any) -> Any:
    with view.reading():
        return answer(view, *given)


def _series(view: RunView, request: web.Request) -> dict[str, Any] | None:
    name = request.query.get("name", "")
    return views.series(view, name, _kind(request), _number(request, "from"), _number(request, "to"))


def _timeline(view: RunView, request: web.Request) -> dict[str, Any]:
    view.trace.look()
    return timeline.window(view.trace, _number(request, "from"), _number(request, "to"))


def _samples(view: RunView, request: web.Request) -> dict[str, Any]:
    view.samples.look()
    given = request.query
    return view.samples.page(find=given.get("find", ""), only=given.get("only", ""), before=_number(request, "before"))


def _sample(view: RunView, request: web.Request) -> dict[str, Any] | None:
    view.samples.look()
    return view.samples.read(request.match_info["key"])


def _prompt(view: RunView, request: web.Request) -> dict[str, Any]:
    return views.prompt(view.folder, int(request.match_info["ordinal"]))


ANSWERS: dict[str, ViewAnswer] = {
    "": lambda view, request: views.overview(view),
    "/series": _series,
    "/judge": lambda view, request: views.judge(view),
    "/weights": lambda view, request: views.weights(view),
    "/timeline": _timeline,
    "/samples": _samples,
    "/samples/{key}": _sample,
}
OF_THE_JOURNAL: dict[str, ViewAnswer] = {
    "/ledger": lambda view, request: views.ledger(view.folder),
    r"/prompts/{ordinal:\d{1,15}}": _prompt,
}
"""Requests that need no lock of `RunView.reading`: an audit takes long, and other views do not wait for it."""


def _kind(request: web.Request) -> str:
    kind = request.query.get("kind", "step")
    if kind not in ("step", "eval"):
        raise web.HTTPBadRequest(text=f"kind = {kind!r}: give step or eval")
    return kind


def _number(request: web.Request, name: str) -> float | None:
    given = request.query.get(name)
    if not given:
        return None
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise web.HTTPBadRequest(text=f"{name} = {given[:40]!r}: give a number")
    return found


def _assets() -> dict[str, tuple[str, bytes]]:
    """Return all files of the page by name. Nothing else is served, whatever the address."""
    files = (path for path in STATIC.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): (TYPES[path.suffix], path.read_bytes()) for path in files}


def _json(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
