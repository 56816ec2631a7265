"""The key stays in memory: these tests search every text that leaves a judge for it."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge import ConfigError, Endpoint, Failed, Judge, JudgeConfig
from freewheel.judge.outcome import DETAIL_CHARS

from .helpers import WAIT_S

Make = Callable[..., Judge]
KEY = "sk-DISTINCTIVE-0123456789abcdefghijklmnopqrstuvwxyz"
PIECES = [KEY[at : at + 12] for at in range(len(KEY) - 12)]
"""Half a key is a leak too."""


def leaks(text: str) -> list[str]:
    return [piece for piece in PIECES if piece in text]


def echo(replying: Any) -> Callable[[int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]]:
    """A judge that repeats the caller's key in every kind of reply and failure."""

    def play(number: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        said = headers.get("Authorization", "") or headers.get("api-key", "")
        pad = " " + "x" * max(0, DETAIL_CHARS - 60 - number % 60)
        error = json.dumps({"error": {"message": f"your header was {said}", "code": said}}).encode()
        for mark, answer in {
            b"case 0": (400, {}, error),
            b"case 1": (500, {}, error),
            b"case 2": (429, {"Retry-After": "1000"}, error),
            b"case 3": (400, {}, f"<html>{pad} {said}</html>".encode()),
            b"case 4": (200, {}, f"not JSON {said}".encode()),
            b"case 5": (200, {}, f"not JSON {pad}{said}".encode()),
            b"case 6": (200, {}, replying(f"I saw {said} and cannot score")),
            b"case 7": (200, {}, replying(f"I saw {said}. Score: 7")),
            b"case 8": (422, {}, json.dumps({"detail": [{"msg": f"{pad} {said}"}]}).encode()),
            b"case 9": (418, {"X-Echo": said}, said.encode()),
            b"halt 0": (401, {}, error),
            b"halt 1": (404, {}, f"{pad}{said}".encode()),
            b"halt 2": (302, {"Location": f"http://127.0.0.1:1/?key={said.split()[-1]}"}, error),
            b"halt 3": (402, {}, error),
        }.items():
            if mark in body:
                return answer
        return 200, {}, replying("5")

    return play


@pytest.mark.parametrize("header", ["Authorization", "api-key"])
def test_the_key_is_only_in_memory(
    scripted: Any,
    replying: Any,
    make_judge: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    header: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "freewheel")
    server = scripted(echo(replying))
    endpoint = Endpoint(url=server.url, api_key_header=header)
    given: dict[str, Any] = {"api_key": KEY}
    if header == "api-key":
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        given = {"api_key_env": "OPENAI_API_KEY"}
    judge = make_judge(endpoint, **given, max_attempts=2, request_deadline_s=20.0)
    verdicts = judge.submit([f"case {n}" for n in range(10)] * 2).result(WAIT_S)
    assert {v.status for v in verdicts} == {"failed", "scored"}, "one case holds a score"
    halts = []
    for n in range(4):
        halts += judge.submit([f"halt {n}"]).result(WAIT_S)
    assert [v.reason for v in halts] == ["auth", "not_found", "not_found", "quota"]
    source = "environment variable OPENAI_API_KEY" if header == "api-key" else "api_key argument"
    assert isinstance(halts[0], Failed) and source in halts[0].detail
    stats = judge.stats()
    config = judge.config
    shown = [repr(one) for one in (*verdicts, *halts, judge, config, endpoint, config.api_key, stats)]
    shown += [str(one) for one in (judge, config, config.to_dict(), stats.to_dict())]
    shown += [stats.line(), stats.prometheus(), *(pickle.dumps(one).decode("latin-1") for one in (judge, config))]
    if judge.config.placement == "process":
        assert judge._link is not None
        for name in ("cmdline", "environ")[: 1 + ("api_key" in given)]:
            shown.append(Path(f"/proc/{judge._link.child_pid}/{name}").read_text("latin-1"))
    judge.close()
    shown += [record.getMessage() + (record.exc_text or "") + repr(record.__dict__) for record in caplog.records]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".sqlite3" for path in files)
    shown += [path.read_bytes().decode("latin-1") for path in files]
    shown += list(capfd.readouterr())
    assert [(text[:300], leaks(text)) for text in shown if leaks(text)] == []
    assert all(KEY in json.dumps(headers) for headers, _ in server.seen), "it was really sent"


def test_a_refused_setting_does_not_show_the_key() -> None:
    attempts: list[dict[str, Any]] = [
        {"api_key": KEY + "\n" + KEY},
        {"api_key": [KEY]},
        {"api_key": {"key": KEY}},
        {"endpoint": {"url": "http://h", "api_key": KEY + "ü"}},
        {"endpoint": {"url": "http://h", "api_key": KEY, "wieght": 1}},
        {"endpoint": {"api_key": KEY}},
        {"endpoint": [{"url": "http://h", "api_key": KEY, "weight": "x"}, {"url": "http://h"}]},
        {"endpoint": [Endpoint(url="http://h", api_key=KEY), Endpoint(url="http://h")]},
        {"endpoint": {"url": f"http://{KEY}@h"}},
        {"max_attempts": 0, "api_key": KEY},
    ]
    for given in attempts:
        with pytest.raises(ConfigError) as caught:
            JudgeConfig.from_dict({"endpoint": "http://h", "model": "m", **given})
        assert leaks("".join(traceback.format_exception(caught.value))) == [], given
    with pytest.raises(ConfigError) as caught:
        JudgeConfig.from_dict({"endpoint": "http://h", "model": "m", "apikey": KEY})
    assert leaks(str(caught.value)) == [], "a misspelt key is still a key"


@pytest.mark.parametrize("key", ["x", "7", "EMPTY"])
def test_a_placeholder_key_does_not_change_a_score(scripted: Any, replying: Any, make_judge: Make, key: str) -> None:
    server = scripted(lambda number, headers, body: (200, {}, replying("7")))
    (verdict,) = make_judge(server.url, api_key=key).submit(["a"]).result(WAIT_S)
    assert verdict.value == 7.0 and verdict.raw == "7"
