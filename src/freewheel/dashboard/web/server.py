"""`Server`: the page and what it asks for, over HTTP. Only reads, and only for who has the token.

    GET /?token=…                     cookie ─▶ /
    GET /, /static/…                  the page itself, from the package
    GET /api/runs[/RUN[/…]], /compare JSON: token ─▶ RunView ─▶ `pages`, `panels`   (in a thread: files are read there)
    GET /api/runs/RUN/events          what changes, as server-sent events, from a cursor on

A view that cannot be made is an error in its own reply; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from freewheel.dashboard.web import pages, panels
from freewheel.dashboard.web.door import HEADERS, REFUSED, Door
from freewheel.dashboard.web.live import Streams
from freewheel.dashboard.web.runs import Runs, RunView
from freewheel.utils.http import server_log

log = logging.getLogger("freewheel.dashboard")

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
"""By which assets are found: a file of another kind is not served."""
MOST_COMPARED = 12
"""Runs in one picture; more than that nobody tells apart."""
SHUTDOWN_S = 2.0
METHODS = ("GET", "HEAD")

Answer = Callable[[RunView, web.Request], Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A request that gets an error, in words."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class Server:
    """Serves on the loop that starts it, between `start` and `stop`."""

    def __init__(self, runs: Runs, *, token: str) -> None:
        self._runs = runs
        self._token = token
        self._streams = Streams()
        self._assets = _assets()

    async def start(self, listening: socket.socket) -> None:
        """`listening`: a socket that is bound already."""
        self._door = Door(self._token, listening.getsockname()[1])
        app = web.Application(middlewares=[self._guarded], client_max_size=0)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name:.+}", self._static)
        app.router.add_get("/api/runs", self._all_runs)
        app.router.add_get("/api/compare", self._compare)
        app.router.add_get("/api/runs/{run}/events", self._events)
        for path, answer in ANSWERS.items():
            app.router.add_get(f"/api/runs/{{run}}{path}", self._answering(partial(_within, answer)))
        for path, answer in OF_THE_JOURNAL.items():
            app.router.add_get(f"/api/runs/{{run}}{path}", self._answering(answer))
        quiet = server_log("freewheel.dashboard.http")  # no log has the token
        self._runner = web.AppRunner(app, access_log=None, logger=quiet, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        self._streams.stop()
        await self._runner.cleanup()

    # -- who, and what went wrong -------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await self._let_in(request, handler)
        except Refused as error:
            response = _json({"error": str(error)}, status=error.status)
        except web.HTTPException as error:
            response = _json({"error": error.reason}, status=error.status)
        except ConnectionError:
            raise
        except Exception as error:  # of one reply; the server is there for the others
            log.exception("%s could not be answered", request.path)
            words = f"{type(error).__name__}: {error}"
            response = _json({"error": words}, status=HTTPStatus.INTERNAL_SERVER_ERROR)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in METHODS:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not taken: there is nothing to change")
        if request.path == "/" and self._door.knows(request.query.get("token")):
            # Lax: a browser that comes from a link on another site would not send a stricter one to where it is led.
            response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
            response.set_cookie(self._door.cookie, self._token, httponly=True, samesite="Lax", path="/")
            return response
        if not self._door.lets_in(request.headers, request.cookies):
            return web.Response(status=HTTPStatus.FORBIDDEN, text=REFUSED)
        return await handler(request)

    # -- the page -----------------------------------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return self._asset("index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return self._asset(request.match_info["name"])

    def _asset(self, name: str) -> web.Response:
        found = self._assets.get(name)
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"the page has no {name!r}")
        kind, body = found
        return web.Response(body=body, content_type=kind, charset="utf-8")

    # -- runs ---------------------------------------------------------------------------------------------------------

    async def _all_runs(self, request: web.Request) -> web.StreamResponse:
        """Those that are live first: the page opens the first one."""

        def found() -> list[dict[str, Any]]:
            views = self._runs.all()
            if len(views) > 1:  # their metrics are read when somebody opens them
                return sorted(map(_named, views), key=lambda one: one["state"] != "live")
            return [_within(pages.headline, view) for view in views]

        return _json({"runs": await asyncio.to_thread(found)})

    async def _compare(self, request: web.Request) -> web.StreamResponse:
        wanted = [self._view(run_id) for run_id in request.query.get("runs", "").split(",") if run_id]
        if not wanted or len(wanted) > MOST_COMPARED:
            raise Refused(HTTPStatus.BAD_REQUEST, f"runs: name 1 to {MOST_COMPARED} of them, with commas between")
        metric, kind = request.query.get("metric", "eval/reward"), _kind(request)
        return _json(await asyncio.to_thread(panels.compare, wanted, metric, kind))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        view = self._view(request.match_info["run"])
        told = request.headers.get("Last-Event-ID") or request.query.get("cursor", "")
        if self._streams.full:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open: close one")
        return await self._streams.serve(request, view, told, HEADERS)

    def _answering(self, answer: Answer) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            view = self._view(request.match_info["run"])
            found = await asyncio.to_thread(answer, view, request)
            if found is None:
                raise Refused(HTTPStatus.NOT_FOUND, "there is no such thing in this run")
            return _json(found)

        return handle

    def _view(self, run_id: str) -> RunView:
        view = self._runs.find(run_id)
        if view is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no run {run_id!r} here")
        return view


# -- what can be asked of a run ---------------------------------------------------------------------------------------


def _within(answer: Callable[..., Any], view: RunView, *given: Any) -> Any:
    with view.reading():
        return answer(view, *given)


def _named(view: RunView) -> dict[str, Any]:
    view.settings.look()
    return {
        "id": view.id,
        "name": view.folder.name,
        "folder": str(view.folder),
        "state": view.state,
        "state_words": pages.STATE_WORDS[view.state],
        "mode": view.settings.text("mode"),
        "task": view.settings.text("data.task"),
        "model": view.settings.text("model.path"),
        "total_steps": view.settings.number("trainer.total_steps"),
    }


def _series(view: RunView, request: web.Request) -> dict[str, Any] | None:
    name = request.query.get("name", "")
    return pages.series(view, name, _kind(request), _number(request, "from"), _number(request, "to"))


def _timeline(view: RunView, request: web.Request) -> dict[str, Any]:
    view.timeline.look()
    return view.timeline.window(_number(request, "from"), _number(request, "to"))


def _samples(view: RunView, request: web.Request) -> dict[str, Any]:
    view.samples.look()
    given = request.query
    return view.samples.page(find=given.get("find", ""), only=given.get("only", ""), before=_number(request, "before"))


def _sample(view: RunView, request: web.Request) -> dict[str, Any] | None:
    view.samples.look()
    return view.samples.read(request.match_info["key"])


def _prompt(view: RunView, request: web.Request) -> dict[str, Any]:
    return panels.prompt(view.folder, int(request.match_info["ordinal"]))


ANSWERS: dict[str, Answer] = {
    "": lambda view, request: pages.overview(view),
    "/series": _series,
    "/judge": lambda view, request: panels.judge(view),
    "/weights": lambda view, request: panels.weights(view),
    "/timeline": _timeline,
    "/samples": _samples,
    "/samples/{key}": _sample,
}
OF_THE_JOURNAL: dict[str, Answer] = {
    "/ledger": lambda view, request: panels.ledger(view.folder),
    r"/prompts/{ordinal:\d{1,15}}": _prompt,
}
"""These need nothing that `RunView.reading` guards: an audit takes its time, and the other views do not wait for it."""


def _kind(request: web.Request) -> str:
    kind = request.query.get("kind", "step")
    if kind not in ("step", "eval"):
        raise Refused(HTTPStatus.BAD_REQUEST, f"kind = {kind!r}: give step or eval")
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
        raise Refused(HTTPStatus.BAD_REQUEST, f"{name} = {given[:40]!r}: give a number")
    return found


def _assets() -> dict[str, tuple[str, bytes]]:
    """All of the page, by the names in addresses. What is not in here is not served, whatever an address says."""
    files = (path for path in STATIC.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(STATIC).as_posix(): (TYPES[path.suffix], path.read_bytes()) for path in files}


def _json(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
