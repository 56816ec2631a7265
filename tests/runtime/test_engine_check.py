"""An engine that cannot serve a run is noticed before anything starts; a server of the user's is asked."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.data.tasks.word_problems import model_path
from freewheel.runtime import engines, placement
from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Machine
from freewheel.runtime.plan import Plan, resolve

LAPTOP = Machine(cpus=2, memory_bytes=8 << 30)


class Server(BaseHTTPRequestHandler):
    """Speaks like a `vllm serve` that may be given weights, as far as it is asked before a run."""

    answers: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        body = self.answers.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"{}")

    def log_message(self, *args: Any) -> None:
        pass


GOOD = {
    "/v1/models": b'{"data": [{"id": "a model", "max_model_len": 256}]}',
    "/is_paused": b"{}",
    "/collective_rpc": b'{"results": ["float32"]}',
}


@pytest.fixture
def server() -> Iterator[Any]:
    kind = type("ThisServer", (Server,), {"answers": dict(GOOD)})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        kind.url = f"http://127.0.0.1:{serving.server_address[1]}"  # type: ignore[attr-defined]
        yield kind
        serving.shutdown()


def plan_of(url: str, **rollout: Any) -> Plan:
    return resolve(to_config({"rollout": {"engine": "vllm", "urls": [url], **rollout}}), LAPTOP)


def test_a_server_that_can_serve_the_run_is_no_problem(server: Any) -> None:
    assert engines.engine_problems(plan_of(server.url), model_path()) == []


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"/v1/models": b'{"data": [{"id": "m", "max_model_len": 8}]}'}, "it takes 8 tokens, and "),
        ({"/is_paused": None}, "it cannot be given new weights"),
        ({"/collective_rpc": None}, "its workers do not know freewheel"),
        ({"/collective_rpc": b'{"results": ["bfloat16"]}'}, "it serves bfloat16, and the run has float32"),
    ],
)
def test_a_server_that_cannot_is_named_with_the_reason(server: Any, answers: dict[str, Any], says: str) -> None:
    server.answers |= answers
    asked = io.BytesIO(pickle.dumps((plan_of(server.url), model_path())))
    problem = pickle.loads(engines._answer(asked))  # what a child would do, whose start takes seconds
    assert problem.key == "rollout.urls" and server.url in str(problem) and says in str(problem)


def test_a_run_whose_server_is_gone_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "_ask_smi", lambda: "")
    settings = ["train", "rollout.engine=vllm", "rollout.urls=[http://127.0.0.1:9]"]
    done = CliRunner().invoke(app, settings)
    assert done.exit_code == 2 and "there is no vLLM server" in done.stderr and not list(tmp_path.iterdir())
    done = CliRunner().invoke(app, [*settings, "--dry-run"])
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0 and "there is no vLLM server" in text.partition("Against this run here")[2]
    assert "asks the vLLM server http://127.0.0.1:9 for responses" in text and "vllm engine" not in text


def test_what_only_other_machines_can_say_is_left_to_them(server: Any) -> None:
    server.answers.clear()
    elsewhere = to_config({"rollout": {"engine": "vllm", "urls": [server.url]}, "ray": {"address": "auto"}})
    assert engines.engine_problems(resolve(elsewhere, LAPTOP), model_path()) == []
    assert engines.engine_problems(plan_of(server.url), None) == [], "a check does not download a model"


def test_a_child_that_dies_says_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.write('no kernel image\\n'); sys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = engines.engine_problems(plan_of("http://127.0.0.1:9"), model_path())
    assert problem.key == "rollout.engine" and "it cannot be used here: " in str(problem)


def test_a_child_that_is_late_is_left_to_the_rollouters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LOOK_S", 0.01)
    assert engines.engine_problems(plan_of("http://127.0.0.1:9"), model_path()) == []


def test_the_native_engine_needs_no_look() -> None:
    assert engines.engine_problems(resolve(to_config({}), LAPTOP), model_path()) == []
