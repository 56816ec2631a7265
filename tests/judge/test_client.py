"""The way to the judge: proxies of the environment, TLS, and addresses that need neither."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from freewheel.judge import Failed, Scored
from freewheel.judge.client import proxy_for
from freewheel.judge.testing import MockJudge
from freewheel.utils.http import is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("a.localhost", True),
        ("10.0.0.1", False), ("example.org", False), ("localhost.example.org", False), ("", False),
    ],
)  # fmt: skip
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_environments_proxy_is_used_for_the_world_and_not_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_for("https://api.example.org/v1") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example.org")
    assert proxy_for("https://api.example.org/v1") == "http://proxy:3128"
    assert proxy_for("http://api.example.org/v1") is None
    assert proxy_for("https://inside.example.org/v1") is None
    assert proxy_for("https://127.0.0.1:8000/v1") is None
    monkeypatch.setenv("ALL_PROXY", "http://any:3128")
    assert proxy_for("http://api.example.org/v1") == "http://any:3128"


async def test_a_judge_behind_a_proxy_is_asked_through_it(
    scripted: Any, replying: Any, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = scripted(lambda number, headers, body: (200, {}, replying("7")))
    monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1/chat/completions"))
    async with bench("http://judge.invalid/v1") as engine:
        (verdict,) = await engine.score(["one"])
    assert isinstance(verdict, Scored) and proxy.seen[0][0]["Host"] == "judge.invalid"


async def test_a_certificate_is_checked_against_the_bundle_that_is_named(bench: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    with MockJudge(ssl_context=context).in_thread() as judge:
        async with bench(judge.url, ca_file=str(bundle)) as engine:
            assert isinstance((await engine.score(["one"]))[0], Scored)
        async with bench(judge.url, max_attempts=1, cache=False) as engine:
            (verdict,) = await engine.score(["one"])
        assert isinstance(verdict, Failed) and "certificate" in verdict.detail.lower()
        assert judge.counts().received == 1


async def test_a_body_of_megabytes_goes_up_whole(bench: Any, scripted: Any, replying: Any) -> None:
    server = scripted(lambda number, headers, body: (200, {}, replying("7")))
    async with bench(server.url) as engine:
        [verdict] = await engine.score(["x" * (3 << 20)])
    assert verdict.value == 7
    assert server.seen[0][1].count(b"x") >= 3 << 20
