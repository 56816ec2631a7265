"""The trace and the samples of a run in one process. Recording never changes the run, also where it fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.tasks.word_problems import model_path
from freewheel.observe.samples import read_samples
from freewheel.observe.trace import read_trace
from freewheel.runtime.building import end_recording, start_recording
from freewheel.runtime.config import ObserveConfig

from .pipeline import Finished, run_pipeline, small_config


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_recording()


async def recorded(folder: Path, observe: dict[str, Any] | None = None, **sections: Any) -> Finished:
    """A run whose parts are one process, which traces as one component."""
    start_recording(ObserveConfig(**{"samples_per_s": 1e6, **(observe or {})}), folder, "whole", samples=True)
    try:
        return await run_pipeline(small_config(**sections), run_dir=folder)
    finally:
        end_recording()


async def test_trace_every_selects_groups(tmp_path: Path) -> None:
    await recorded(tmp_path / "some", {"trace_every": 4})
    assert {event["id"] % 4 for event in read_trace(tmp_path / "some") if event["ph"] == "b"} == {0}
    await recorded(tmp_path / "none", {"trace_every": 0, "samples_mb": 0.0})
    events = list(read_trace(tmp_path / "none"))
    assert {event["ph"] for event in events} == {"X"}
    activities = [event["name"] for event in events if event["name"] in ("generate", "wait_reward", "wait_room")]
    assert activities[-1] == "wait_room", "the last activity ends with the rollouter"
    assert not (tmp_path / "none" / "samples").exists()


async def test_samples_record_text_rewards_and_versions(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    finished = await recorded(tmp_path)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    groups = {group.ticket.sequence: group for step in finished.trained for group in step}
    samples = {sample["sequence"]: sample for sample in read_samples(tmp_path)}
    assert groups.keys() <= samples.keys()
    for sequence, group in groups.items():
        sample = samples[sequence]
        assert (sample["ordinal"], sample["attempt"], sample["replica"]) == (group.ordinal, 0, "rollouter-0")
        assert sample["prompt"] == tokenizer.decode(group.prompt.tolist())
        assert sample["row"] == dict(group.row)
        for index, told in enumerate(sample["responses"]):
            response, verdict = group.response(index), group.verdicts[index]
            text = tokenizer.decode(response.tokens.tolist())
            assert "".join(piece for _, piece in told["segments"]) == text
            versions = [version for version, _ in itertools.groupby(response.versions.tolist())]
            assert [version for version, _ in told["segments"]] == versions
            assert (told["tokens"], told["finish"]) == (len(response.tokens), response.finish)
            assert (told["value"], told["raw"], told["status"]) == (
                response.reward,
                response.raw_reward,
                verdict.status,
            )
            assert told["parts"] == verdict.parts


async def test_recording_does_not_change_the_result_also_where_it_fails(tmp_path: Path) -> None:
    without = await recorded(tmp_path / "without", {"trace_mb": 0.0, "samples_mb": 0.0}, mode="sync")
    for name in ("with", "failing"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "failing":
            for taken in ("trace", "samples"):
                (folder / taken).write_text("in their place")
        found = await recorded(folder, mode="sync")
        assert found.same_groups_as(without) and found.same_weights_as(without)
        assert found.metrics == without.metrics
    assert (tmp_path / "failing" / "trace").read_text() == "in their place"
    for row, version, groups in zip(without.rows, without.versions, without.trained, strict=True):
        counts = row.values["sample_age_counts"]
        lags = [version - group.min_version for group in groups]
        assert counts == [lags.count(lag) for lag in range(len(counts))] and sum(counts) == len(groups)
    assert not (tmp_path / "without/trace").exists() and not (tmp_path / "without/samples").exists()
