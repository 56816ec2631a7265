"""The promises of docs/security.md: no data is unpickled, run directories are private, keys stay in memory, Ray keeps
its authentication, and no name in a file points out of a run directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from freewheel.errors import ConfigError
from freewheel.observe.logs import attach_log, detach_log
from freewheel.observe.recorder import PrometheusSink, Recorder, TensorBoardSink, _kept_id
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import Journal
from freewheel.runtime import cluster
from freewheel.runtime.config import TrainConfig, check_judge
from freewheel.runtime.config_files import compose, to_yaml
from freewheel.runtime.start import new_run, write_config
from freewheel.trainer.checkpoint import CheckpointDamaged, CheckpointStore, RunLock
from freewheel.utils.files import open_private, private_folder

from .judge.conftest import Scripted, completion
from .programs import run_program

SOURCE = Path(__file__).parent.parent / "src" / "freewheel"
KEY = "sk-DISTINCTIVE-0123456789abcdefghijklmnopqrstuvwxyz"
PIECES = [KEY[at : at + 12].encode() for at in range(len(KEY) - 12)]
"""Half a key is a leak too."""

# -- no pickle --------------------------------------------------------------------------------------------------------

RULES = "S102,S301,S302,S307,S506,S602,S604,S605"
"""Ruff's rules for exec, eval, pickle, marshal, unsafe YAML and a shell."""
UNSAFE = re.compile(r"\b(?:torch|np|numpy|joblib)\.load\(|weights_only=False|allow_pickle=True|\.recv\(\)|\bpopen\(")
"""Further calls that can run code from a file or a socket, such as multiprocessing's `recv`."""
ALLOWED = {
    "rollout/reward_workers.py": 3,  # a socket between a process and its child, both ends
    "integrations/verl/settings.py": 1,  # reads what the same line pickled
    "integrations/trl.py": 1,  # reads what the same line pickled
    "runtime/preflight.py": 2,  # the input and output of a child that we started
    "runtime/config_files.py": 1,  # YAML with a subclass of SafeLoader
}
"""File → calls, with the reason why no one else controls the data."""


def test_no_code_unpickles_or_runs_data_from_a_file_or_a_socket():
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--ignore-noqa", "--output-format", "json"]
    found = json.loads(run_program(*ruff, "--select", RULES, SOURCE, code=1).stdout)
    calls = Counter(Path(one["filename"]).relative_to(SOURCE).as_posix() for one in found)
    assert calls == ALLOWED, "use safetensors, JSON or msgpack, or list here why it is safe"
    assert [path for path in SOURCE.rglob("*.py") if UNSAFE.search(path.read_text())] == []


# -- private ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_folders_and_files_are_private_and_an_existing_folder_keeps_its_mode(tmp_path: Path, umask: None):
    folder = private_folder(tmp_path / "run")
    os.close(open_private(folder / "file", os.O_WRONLY))
    assert (mode(folder), mode(folder / "file")) == (0o700, 0o600)
    folder.chmod(0o755)
    assert mode(private_folder(folder)) == 0o755


@pytest.mark.parametrize("umask", [0o000], indirect=True, ids=oct)
def test_a_run_directory_and_its_contents_are_private(tmp_path: Path, umask: None):
    """Create the files in the order in which `FullyAsyncMain` and its actors create them."""
    run_dir = tmp_path / "runs" / "one"
    with RunLock(run_dir):
        write_config(msgspec.structs.replace(TrainConfig(), run_dir=str(run_dir)))
        attach_log(run_dir, "main")
        detach_log()
        Recorder(run_dir=run_dir).close()
        TensorBoardSink(run_dir=run_dir).close()
        _kept_id(run_dir / "wandb_run_id")
        journal = Journal(run_dir / JOURNAL)
        store = CheckpointStore(run_dir, keep_last=2)
        store.save(1, state={}, fill=lambda folder: (folder / "weights").write_bytes(b"1") and None)
        store.export(run_dir / "final", 1, lambda folder: None)
        found = {path.relative_to(run_dir.parent).as_posix(): oct(mode(path)) for path in [run_dir, *run_dir.iterdir()]}
        found |= {path.name: oct(mode(path)) for path in (run_dir / "checkpoints").iterdir()}
        journal.close()
    folders = {"one", "one/checkpoints", "one/final", "one/tensorboard", "step_000001"}
    assert found == {name: "0o700" if name in folders else "0o600" for name in found}
    assert folders < found.keys() and len(found) >= len(folders) + 6


# -- paths ------------------------------------------------------------------------------------------------------------


def test_a_link_in_a_run_directory_is_not_written_through(tmp_path: Path):
    """In a run from somebody else, the log could be a link to a file of the user."""
    mine, run_dir = tmp_path / "authorized_keys", tmp_path / "run"
    run_dir.mkdir()
    for name, write in {
        "fully_async_training.log": lambda: attach_log(run_dir, "main"),
        "metrics.jsonl": lambda: Recorder(run_dir=run_dir),
        "wandb_run_id": lambda: _kept_id(run_dir / "wandb_run_id"),
        "run.lock": lambda: RunLock(run_dir).__enter__(),
    }.items():
        mine.write_text("ssh-ed25519 AAAA\nhalf a line")
        (run_dir / name).symlink_to(mine)
        with pytest.raises(OSError, match="it is a link"):
            write()
        assert mine.read_text() == "ssh-ed25519 AAAA\nhalf a line", name
    write_config(msgspec.structs.replace(TrainConfig(), run_dir=str(run_dir)))
    assert not (run_dir / "config.yaml").is_symlink()


@pytest.mark.parametrize("kept", ["../../elsewhere", "/etc/passwd", "abc/../../def", ""])
def test_a_foreign_run_id_is_replaced(tmp_path: Path, kept: str):
    (tmp_path / "id").write_text(kept)
    found = _kept_id(tmp_path / "id")
    assert found.isalnum() and found == (tmp_path / "id").read_text() == _kept_id(tmp_path / "id")


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "inner/../../../secret"])
def test_a_checkpoint_cannot_name_files_outside_its_folder(tmp_path: Path, name: str):
    from freewheel.trainer.checkpoint import _checksum, _measure

    store = CheckpointStore(tmp_path, keep_last=2)
    (tmp_path / "secret").write_text("x")
    path = store.save(1, state={}, fill=lambda folder: (folder / "inner").mkdir())
    state = json.loads((path / "state.json").read_text())
    del state["checksum"]
    state["files"] = {name: _measure(path / name)}
    state["checksum"] = _checksum(state)
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointDamaged):
        store.load(path)


def test_removing_old_checkpoints_follows_no_link(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("x")
    store = CheckpointStore(tmp_path / "run", keep_last=1)
    store.save(2, state={}, fill=lambda folder: None)
    for name in ("step_000001", "step_000009", ".tmp-elsewhere-1-step_000003"):
        (store.folder / name).symlink_to(tmp_path / "mine")
    store.save(3, state={}, fill=lambda folder: None)
    assert (tmp_path / "mine" / "thesis").read_text() == "x"


@pytest.mark.parametrize("task", ["../../up", "module:../../up", "/etc/task", "a:b/../../c", ".."])
def test_a_task_name_cannot_move_a_run_out_of_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
):
    monkeypatch.chdir(tmp_path)
    try:
        config = compose([f"data.task='{task}'", "data.train=x", "model.path=x"])
    except ConfigError as error:
        assert error.key == "data.task"
    else:
        assert Path(new_run(config).run_dir or "").resolve().parent == tmp_path / "runs"


HOSTILE = """
import json, sys
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
import numpy as np
from freewheel.data.group import Prompt, PromptGroup, Response, Ticket
from freewheel.data.tasks import get_task
from freewheel.judge.verdict import Scored
from freewheel.rewards.compute_score import compute_score
place = "../../HOSTILE/passwd"
row = {"data_source": place, "prompt": [{"role": "user", "content": place}], "uid": place, "index": place,
       "reward_model": {"ground_truth": place, "style": "rule"}, "extra_info": {"split": place, "index": place}}
open("rows.jsonl", "w").write(json.dumps(row))
(loaded,) = get_task("rows").load("train", "rows.jsonl")
compute_score(place, "1", "openai/gsm8k", loaded["extra_info"])
try:
    compute_score(place, place, place, loaded["extra_info"])
except ValueError as error:
    assert "no rule is registered" in str(error)
one = np.ones(1, np.int32)
response = Response(tokens=one, logprobs=one, versions=one, mask=one, finish="stop", verdict=Scored(1.0))
group = PromptGroup.of(Ticket(0, 0), Prompt(tokens=one, row=loaded), [response], 0.0)
assert PromptGroup.decode(group.encode()).row["data_source"] == place
sys.stdout.write(json.dumps([name for name in opened if "HOSTILE" in name]))
"""


def test_a_row_of_data_cannot_name_a_path(tmp_path: Path):
    assert json.loads(run_program(sys.executable, "-c", HOSTILE, cwd=tmp_path).stdout) == []


# -- keys and Ray -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "judge",
    [
        {"api_key": KEY},
        {"judge": {"endpoint": [{"url": "http://a/v1", "api_key": KEY}]}},
        {"api_endpoint": f"https://a/v1?api-version=2&key={KEY}"},
        {"judge": {"endpoint": {"url": f"https://a/v1?API-KEY={KEY}#x"}}},
    ],
)
def test_a_key_in_the_settings_is_refused_and_not_shown(judge: dict[str, Any]):
    with pytest.raises(ConfigError, match="a key must not be") as caught:
        check_judge(judge)
    assert not leaks(str(caught.value).encode())
    check_judge({"api_endpoint": "https://a/v1?api-version=2024-06-01", "model_name": "m"})


@pytest.mark.parametrize(
    "given",
    [
        *("reward.judge={{api_key: {}}}", "reward.judge={{api_key: {}"),
        *("reward.judge.api_key={}", "reward.judge.api_key=[{}", "api_key={}"),
    ],
)
def test_an_override_with_a_key_is_refused_and_not_shown(given: str):
    with pytest.raises(ConfigError) as caught:
        compose([given.format(KEY)])
    assert not leaks(str(caught.value).encode())


def test_settings_name_the_variable_and_never_hold_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    config = compose(["reward.judge={api_endpoint: 'http://127.0.0.1:1/v1', judge: {api_key_env: OPENAI_API_KEY}}"])
    assert "OPENAI_API_KEY" in to_yaml(config) and not leaks(to_yaml(config).encode())


def test_rays_environment_holds_no_key_and_its_authentication_is_unchanged(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setattr(ray, "init", lambda **settings: given.update(settings))
    for mode in (None, "token", "disabled"):
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        if mode is not None:
            monkeypatch.setenv("RAY_AUTH_MODE", mode)
        before = dict(os.environ)
        cluster._connect(None, 2)
        assert dict(os.environ) == before, "the setting of the user or of Ray is kept"
        assert given["runtime_env"].keys() == {"env_vars"}
        assert given["runtime_env"]["env_vars"].keys() == {"PYTHONPATH", "OMP_NUM_THREADS"}
        assert not leaks(repr(given).encode())
        assert given["include_dashboard"] is False and "_system_config" not in given


def test_metrics_are_served_on_loopback_only():
    sink = PrometheusSink(port=0)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
    finally:
        sink.close()


def leaks(data: bytes) -> bool:
    return any(piece in data for piece in PIECES)


def echo(number: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Play a judge that fails twice and shows the caller's key in everything it says."""
    key = headers["Authorization"]
    assert KEY in key
    if number <= 2:
        return 500, {}, json.dumps({"error": {"message": f"your header was {key}"}}).encode()
    return 200, {}, completion("7", id=key)


@pytest.mark.timeout(300)
def test_no_file_of_a_run_or_of_ray_contains_the_key(tmp_path: Path):
    """The judge echoes the key. Every byte of the run, the cache and Ray's files is searched."""
    judge, ray_dir = Scripted(echo), Path(tempfile.mkdtemp(prefix="fw-", dir="/tmp"))  # a socket's path must be short
    run_dir, cache = tmp_path / "run", tmp_path / "cache"
    settings = [
        f"run_dir={run_dir}",
        *("trainer.total_steps=2", "trainer.groups_per_step=2", "rollout.n=2", "eval.prompts=0", "data.limit=32"),
        *("trainer.device=cpu", "rollout.device=cpu", "observe.tensorboard=true"),
        f"reward.judge={{api_endpoint: '{judge.url}', model_name: m, use_async_io: true, judge_gate: 'off'}}",
    ]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(ray_dir)}
    environment |= {"FREEWHEEL_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    try:
        words = [sys.executable, "-m", "freewheel", "train", "--plain", *settings]
        done = run_program(*words, env=environment, cwd=tmp_path)
        assert len(judge.seen) > 2
        files = [path for place in (run_dir, cache, ray_dir) for path in place.rglob("*") if path.is_file()]
        expected = {"config.yaml", "metrics.jsonl", "fully_async_training.log", JOURNAL, "state.json", "raylet.out"}
        assert expected <= {path.name for path in files}
        assert [str(path) for path in files if leaks(path.read_bytes())] == []
        assert not leaks((done.stdout + done.stderr).encode())
    finally:
        judge.close()
        shutil.rmtree(ray_dir, ignore_errors=True)
