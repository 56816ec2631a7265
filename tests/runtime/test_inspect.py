"""`freewheel inspect` as users and scripts meet it: on dead runs and live ones, whole and damaged; and one prompt."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.data.group import NO_VERSION, Prompt, PromptGroup, Response, Ticket
from freewheel.inspect import run as inspecting
from freewheel.inspect.run import escape_controls
from freewheel.judge import verdict
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.audit import Audit, audit
from freewheel.queue.journal import Abandoned, AttemptFailed, Committed, Journal, Stored, Took
from freewheel.queue.ledger import Frontier
from freewheel.runtime.config import JournalConfig, TrainConfig
from freewheel.runtime.start import write_config
from freewheel.trainer.checkpoint import CheckpointStore, RunLock

NOW_S = 1_700_000_000.0
PROMPT, SAID = [5, 9, 11], [7, 12, 13, 14, 8]
"""Words of the embedded model."""


def response(*, value: float, versions: list[int], reason: str = "", parts: Any = None) -> Response:
    mask = np.array([version != NO_VERSION for version in versions], np.uint8)
    return Response(
        tokens=np.array(SAID[: len(versions)], np.int32),
        logprobs=np.zeros(len(versions), np.float32),
        versions=np.array(versions, np.int32),
        mask=mask,
        finish="stop",
        verdict=verdict.Failed(reason) if np.isnan(value) else verdict.Scored(value * 2, parts=parts or {}),
        reward=value,
        raw_reward=value * 2,
    )


def stored(ordinal: int, *, min_version: int = 0) -> Stored:
    ticket = Ticket(ordinal, ordinal + 10, 1 if ordinal == 3 else 0)
    responses = [
        response(value=0.5, versions=[0, 0, NO_VERSION, 1, 1], parts={"format": 1.0}),
        response(value=float("nan"), versions=[1, 1], reason="timeout"),
    ]
    prompt = Prompt(tokens=np.array(PROMPT, np.int32), row={"data_source": "test"})
    group = PromptGroup.of(ticket, prompt, responses, created_s=NOW_S)
    return Stored(ticket, min_version, group.encode(), NOW_S + 5)


def write_run(folder: Path, *, steps: int = 2, keep_groups: int = 100) -> Journal:
    """Two prompts a step, each a version; a checkpoint of step 1, where the journal was compacted. Prompt 9 is
    abandoned, 8 has failed, 7 is queued."""
    write_config(msgspec.structs.replace(TrainConfig(), run_dir=str(folder)))
    journal = Journal(folder / JOURNAL)
    for number in range(1, steps + 1):
        groups = [stored(2 * number - 2), stored(2 * number - 1)]
        journal.append([*groups, Took(number, tuple(group.ticket for group in groups))])
        journal.append([Committed(number, number, NOW_S + 60 * number)])
    frontier = Frontier(low=2, trained=2)
    state = {"version": 1, "frontier": msgspec.to_builtins(frontier)}
    CheckpointStore(folder, keep_last=2).save(1, state=state, fill=lambda folder: None)
    journal.compact(step=1, frontier=frontier, keep_groups=keep_groups)
    journal.append([stored(7), Abandoned(9, 0, "zero_variance", NOW_S + 7)])
    journal.append([AttemptFailed(Ticket(8, 40), "infra", "engine", "CUDA error", NOW_S + 8)])
    journal.append([AttemptFailed(Ticket(3, 1), None, "lost", "rollouter-0 died", NOW_S + 1)])
    return journal


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run").close()
    return tmp_path / "run"


def freewheel(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def told(*arguments: object) -> dict[str, Any]:
    done = freewheel(*arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (1 if found.get("violations") else 0)
    return found


def refused(*arguments: object) -> str:
    done = freewheel(*arguments)
    assert done.exit_code == 2 and not done.stdout, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("freewheel: error: ")
    return str(line)


# -- a run ------------------------------------------------------------------------------------------------------------


def test_a_clean_run_is_accounted_for(run_dir: Path):
    found = told(run_dir)
    assert (found["run"], found["steps"], found["version"], found["live"]) == (str(run_dir), 2, 2, "")
    assert found["states"] == {
        "trained": 4, "abandoned": 1, "ended": 0, "taken": 0, "queued": 1, "failed": 1, "open": 3,
    }  # fmt: skip
    assert found["abandoned"] == {"zero_variance": 1} and found["failures"] == {"engine": 1, "lost": 1}
    journal = found["journal"]
    assert (journal["groups"], journal["first_step"], journal["last_step"], journal["base"]) == (1, 1, 2, 1)
    assert journal["bytes"] > 0
    assert [(one["step"], one["version"], one["damaged"]) for one in found["checkpoints"]] == [(1, 1, "")]
    assert (found["lost"], found["repeated"], found["stale_trained"], found["violations"]) == (0, 0, 0, [])
    done = freewheel(run_dir)
    assert done.exit_code == 0 and "\x1b" not in done.stdout, "no colour where there is no terminal"
    text = " ".join(done.stdout.split())
    for part in ("step 2, version 2", "prompts 10", "trained 4", "zero_variance 1", "Every prompt is accounted for"):
        assert part in text
    (run_dir / "config.yaml").write_text("nobody: knows\n")
    assert any("lags are not checked" in note for note in told(run_dir)["notes"])


def test_violations_are_reported_and_set_the_exit_code(run_dir: Path):
    group = stored(20, min_version=-9)
    with contextlib.closing(Journal(run_dir / JOURNAL)) as journal:
        journal.append([Abandoned(2, 0, "prompt", NOW_S)])
        journal.append([group, Took(3, (group.ticket,)), Committed(3, 3, NOW_S)])
    found = told(run_dir)
    assert (found["repeated"], found["stale_trained"]) == (1, 1)
    text = " ".join(found["violations"])
    assert "prompt 2 was abandoned and trained on in step 2" in text
    assert "lagged 11 versions in step 3, and 5 are allowed" in text
    done = freewheel(run_dir)
    assert done.exit_code == 1 and "prompt 2 was abandoned and trained on" in done.stdout


def test_a_live_run_is_inspected_while_it_is_written(tmp_path: Path):
    journal = write_run(tmp_path / "run")
    with RunLock(tmp_path / "run"):
        found = told(tmp_path / "run")
        journal.append([stored(12)])
        again = told(tmp_path / "run")
    journal.close()
    assert f"process {os.getpid()}" in found["live"] and any("the run is live" in note for note in found["notes"])
    assert (found["states"]["queued"], again["states"]["queued"]) == (1, 2)
    (tmp_path / "run/run.lock").write_text("process 1 on elsewhere\n")  # the file of a killed run
    assert told(tmp_path / "run")["live"] == ""
    with RunLock(tmp_path / "run"):  # and nothing of the look at it is left
        pass


def test_a_run_that_is_resumed_during_an_inspection_is_inspected_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def resumed(journal: Journal, **settings: Any) -> Audit:
        with contextlib.closing(Journal(run_dir / JOURNAL)) as writer:
            writer.append([stored(12)])
        return audit(journal, **settings)

    monkeypatch.setattr(inspecting, "audit", resumed)
    assert "was opened for writing while it was read: look again" in refused(run_dir)


def test_an_inspection_changes_nothing_in_the_folder(run_dir: Path):
    leftover = run_dir / "checkpoints" / ".tmp-elsewhere-1-step_000009"
    leftover.mkdir()

    def seen() -> dict[str, tuple[int, bytes]]:
        files = sorted(path for path in run_dir.rglob("*") if path.is_file())
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = seen()
    assert freewheel(run_dir).exit_code == freewheel(run_dir, "--group", 3).exit_code == 0
    assert seen() == before and leftover.is_dir()


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_without_a_journal_is_audited_by_its_checkpoints(run_dir: Path, kept: bool):
    for file in run_dir.glob("journal*"):
        file.unlink()
    write_config(TrainConfig(run_dir=str(run_dir), journal=JournalConfig(enabled=kept)))
    found = told(run_dir)
    assert found["journal"] is None and found["steps"] == 1 and found["states"]["ended"] == 2
    if kept:
        (violation,) = found["violations"]
        assert violation.startswith(f"{JOURNAL} is missing") and not found["notes"]
        assert "\n1 violation:\n" in freewheel(run_dir).stdout
    else:
        assert not found["violations"] and any("journal.enabled=false" in note for note in found["notes"])
    assert "nothing is known about single groups" in refused(run_dir, "--group", 0)
    shutil.rmtree(run_dir / "checkpoints")
    with RunLock(run_dir):
        found = told(run_dir)
    assert not found["violations"] and any("the run is starting" in note for note in found["notes"]) == kept


def test_a_damaged_journal_is_a_violation_and_checkpoints_are_still_audited(run_dir: Path):
    for file in run_dir.glob("journal*"):
        file.unlink()
    (run_dir / JOURNAL).write_bytes(b"this is no database, and far from it" * 100)
    (run_dir / f"{JOURNAL}.damaged-1").touch()
    found = told(run_dir)
    assert "the journal cannot be read" in found["violations"][0] and found["states"]["ended"] == 2
    assert any("damaged-1" in note for note in found["notes"])


def test_a_damaged_checkpoint_is_reported_and_not_used(run_dir: Path):
    store = CheckpointStore(run_dir, keep_last=3)
    for step in (2, 3):
        store.save(
            step,
            state={"version": step, "frontier": msgspec.to_builtins(Frontier(low=99, trained=1))},
            fill=lambda folder: (folder / "weights").write_bytes(b"1234") and None,
        )
    (run_dir / "checkpoints/step_000002/weights").write_bytes(b"1")
    (run_dir / "checkpoints/step_000003/state.json").write_text("{")
    found = told(run_dir)
    assert [(one["step"], bool(one["damaged"])) for one in found["checkpoints"]] == [(1, False), (2, True), (3, True)]
    assert not found["violations"] and sum("a resume skips it" in note for note in found["notes"]) == 2
    assert found["checkpoints"][1]["damaged"] == "weights: cut off: 1 of 4 bytes"
    first = run_dir / "checkpoints/step_000001"
    shutil.copytree(first, first.with_suffix(".replaced"))  # used only if its successor is damaged
    assert Path(told(run_dir)["checkpoints"][0]["path"]).name == "step_000001"
    (first / "state.json").write_text("{")
    again = told(run_dir)
    assert [Path(one["path"]).name for one in again["checkpoints"]][:2] == ["step_000001", "step_000001.replaced"]
    assert [one["version"] for one in again["checkpoints"]][:2] == [None, 1] and not again["violations"]


def test_a_folder_without_a_run_is_a_one_line_error(tmp_path: Path, run_dir: Path):
    assert "there is no such folder" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "it is not a run's folder" in refused(tmp_path / "empty")
    assert "prompts 0 to 9 have been seen" in refused(run_dir, "--group", 10)


def test_inspect_imports_neither_torch_nor_ray_nor_classes_from_the_settings(run_dir: Path):
    text = (run_dir / "config.yaml").read_text().replace("rollouter_class: null", "rollouter_class: evil:Rollouter")
    (run_dir / "config.yaml").write_text(text)
    (run_dir / "evil.py").write_text("raise SystemExit('imported')")
    code = f"""
import sys
sys.argv = ["freewheel", "inspect", {str(run_dir)!r}, *sys.argv[1:]]
from freewheel.cli import app
app(standalone_mode=False)
assert not {{"torch", "ray", "transformers", "evil"}} & {{*sys.modules}}, sorted(sys.modules)
"""
    for more in ([], ["--group", "0"]):
        done = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, cwd=run_dir)
        assert done.returncode == 0, done.stderr


# -- one prompt -------------------------------------------------------------------------------------------------------


def test_the_whole_life_of_a_prompt_is_shown(run_dir: Path):
    life = told(run_dir, "--group", 3)
    assert (life["state"], life["step"], life["version"], life["sequence"]) == ("trained", 2, 2, 13)
    assert (life["created_s"], life["stored_s"], life["committed_s"]) == (NOW_S, NOW_S + 5, NOW_S + 120)
    (failed,) = life["failed"]
    assert (failed["attempt"], failed["kind"]) == (0, None)
    assert (failed["reason"], failed["detail"]) == ("lost", "rollouter-0 died")
    first, second = life["responses"]
    assert first["versions"] == [[0, 2], [NO_VERSION, 1], [1, 2]]
    assert (first["value"], first["raw"], first["status"], first["parts"]) == (0.5, 1.0, "scored", {"format": 1.0})
    assert (second["value"], second["status"], second["reason"]) == (None, "failed", "timeout")
    assert life["prompt"] and first["text"] and first["tokens"] == SAID, "decoded by the embedded model's tokenizer"
    text = freewheel(run_dir, "--group", 3).stdout
    words = ("trained in step 2, version 2", "v0 ×2, given ×1, v1 ×2", "reward 0.5, raw 1", "no reward", "(timeout)")
    assert all(part in text for part in words), text


@pytest.mark.parametrize(("ordinal", "state"), [(7, "queued"), (8, "failed"), (9, "abandoned"), (5, "open")])
def test_a_prompts_state_agrees_with_the_audit(run_dir: Path, ordinal: int, state: str):
    life = told(run_dir, "--group", ordinal)
    assert life["state"] == state and bool(life["responses"]) == (state == "queued")
    assert any("its responses were not kept" in note for note in life["notes"]) == (state in ("failed", "abandoned"))
    assert life["abandoned"] == ("zero_variance" if state == "abandoned" else "")
    assert f"prompt {ordinal} of {run_dir}: {state}" in freewheel(run_dir, "--group", ordinal).stdout


def test_a_compacted_group_keeps_step_version_and_time_and_tokens_need_no_tokenizer(tmp_path: Path):
    write_run(tmp_path, keep_groups=0).close()
    life = told(tmp_path, "--group", 0)
    assert (life["state"], life["step"], life["version"], life["committed_s"]) == ("trained", 1, 1, NOW_S + 60)
    assert not life["responses"] and "only step, version and time are known" in life["notes"][0]
    text = (tmp_path / "config.yaml").read_text().replace("path: embedded", "path: /nowhere/model")
    (tmp_path / "config.yaml").write_text(text)
    life = told(tmp_path, "--group", 3)
    assert life["prompt"] is None and "no tokenizer.json was found" in life["notes"][0]
    assert str(PROMPT) in freewheel(tmp_path, "--group", 3).stdout, "token ids, without a tokenizer"


def test_model_output_cannot_rewrite_the_terminal():
    assert escape_controls("a\x1b[2J\r\x07b\n\u202ec") == "a\\x1b[2J\\r\\x07b\n\\u202ec"
