"""The log: one file for all processes, lines that grep finds, and no exception into training."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import subprocess
import sys
import time

import pytest

from freewheel.observe.logs import LogFile, attach_log, component_statistics, detach_log

LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) \[[\w-]+\] ")


@pytest.fixture(autouse=True)
def detached():
    level = logging.getLogger("freewheel").level
    yield
    detach_log()
    logging.getLogger("freewheel").setLevel(level)


def handlers():
    return [one for one in logging.getLogger("freewheel").handlers if isinstance(one, LogFile)]


def objects(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_record_is_a_line_for_people_and_an_object_for_programs_and_attaching_again_changes_them(tmp_path):
    path = attach_log(tmp_path, "trainer")
    assert path == tmp_path / "fully_async_training.log"
    logging.getLogger("freewheel.trainer").info("Saved step %d", 20, extra={"step": 20, "version": 19})
    logging.getLogger("freewheel").debug("too quiet for INFO")
    attach_log(tmp_path, "queue", "DEBUG")
    logging.getLogger("freewheel").debug("once ü", extra={"ordinal": 7})
    assert len(handlers()) == 2
    first, second = path.read_text().splitlines()
    assert LINE.match(first) and first.endswith(" INFO [trainer] Saved step 20")
    assert second.endswith(" DEBUG [queue] once ü")
    first, second = objects(tmp_path)
    assert abs(first.pop("time") - time.time()) < 60
    same = {"run": tmp_path.name}
    assert first == {"level": "INFO", **same, "role": "trainer", "message": "Saved step 20", "version": 19, "step": 20}
    del second["time"]
    assert second == {"level": "DEBUG", **same, "role": "queue", "message": "once ü", "ordinal": 7}


def test_each_run_of_a_process_has_its_own_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        attach_log(tmp_path / name, "main")
        attach_log(tmp_path / name, "queue")
        logging.getLogger("freewheel").warning("hello")
    with pytest.raises(OSError, match="missing"):
        attach_log(tmp_path / "missing", "main")
    logging.getLogger("freewheel").warning("still there")
    for _ in range(2):
        detach_log()
    logging.getLogger("freewheel").warning("not for these files")
    assert not handlers()
    found = [[(one["role"], one["message"]) for one in objects(tmp_path / name)] for name in ("a", "b")]
    assert found == [[("queue", "hello")], [("queue", "hello"), ("queue", "still there")]]
    lines = [(tmp_path / name / "fully_async_training.log").read_text().splitlines() for name in ("a", "b")]
    assert [len(one) for one in lines] == [1, 2]


def test_a_library_that_sets_up_logging_does_not_end_the_log(tmp_path):
    """vLLM does, when it is imported: `dictConfig` closes every handler of the process."""
    path = attach_log(tmp_path, "rollouter-0")
    logging.getLogger("freewheel").info("before")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    logging.getLogger("freewheel").info("after")
    assert [line.rpartition(" ")[2] for line in path.read_text().splitlines()] == ["before", "after"]


def test_a_traceback_stays_in_one_piece_and_a_wrong_message_is_still_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("freewheel"), "propagate", False)  # pytest raises for bad messages
    path = attach_log(tmp_path, "100%")
    log = logging.getLogger("freewheel")
    try:
        raise RuntimeError("boom \ud800")
    except RuntimeError:
        log.exception("failed", extra={"step": object()})
    log.info("%d steps", "three")
    text = path.read_text()
    assert "ERROR [100%] failed\nTraceback (most recent call last):\n" in text and "RuntimeError: boom" in text
    assert text.endswith("INFO [100%] a message that cannot be formatted: '%d steps'\n")
    first, second = objects(tmp_path)
    assert first["message"].startswith("failed\nTraceback (most recent call last):\n")
    assert first["step"].startswith("<object") and second["message"].endswith("cannot be formatted: '%d steps'")


WRITER = """
import logging, sys
from freewheel.observe.logs import attach_log
attach_log(sys.argv[1], sys.argv[2])
log = logging.getLogger("freewheel")
for number in range(300):
    log.info("%d %s\\n  second line of %s", number, sys.argv[2] * 300, sys.argv[2])
"""


def test_processes_write_to_one_file_without_mixing(tmp_path):
    names = ["alpha", "beta", "gamma"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in names]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = (tmp_path / "fully_async_training.log").read_text().splitlines()
    assert len(lines) == 2 * 300 * len(names)
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        name = re.search(r"\[(\w+)\]", first)[1]
        assert first.endswith(" " + name * 300) and second == f"  second line of {name}"
    found = objects(tmp_path)
    assert len(found) == 300 * len(names)
    assert all(one["message"].endswith(f"second line of {one['role']}") for one in found)


FULL = """
import logging, resource, sys
from freewheel.observe.logs import attach_log
attach_log(sys.argv[1], "main")
log = logging.getLogger("freewheel")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (450, hard))
for number in range(10):
    log.info("before %d %s", number, "x" * 60)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.info("after")
log.info("and after")
"""


def test_a_full_disk_loses_lines_raises_nothing_and_is_logged_afterwards(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "fully_async_training.log").read_text().splitlines()
    whole = [line for line in lines if LINE.match(line) and line.endswith("x" * 60)]
    assert 0 < len(whole) < 10
    assert lines[-3].endswith(f"WARNING [main] {10 - len(whole)} lines before this one were lost")
    assert lines[-2].endswith("[main] after") and LINE.match(lines[-2])
    assert lines[-1].endswith("[main] and after")
    told = [json.loads(line)["message"] for line in (tmp_path / "log.jsonl").read_text().splitlines()[-3:]]
    assert re.fullmatch(r"\d+ lines before this one were lost", told[0]) and told[1:] == ["after", "and after"]


# -- Component Statistics ---------------------------------------------------------------------------------------------

STATS = {
    "trainer": {"global_steps": 12, "processed_samples": 3072, "current_param_version": 12, "param_sync_count": 11},
    "rollouter": {"total_generated_samples": 4000, "generation_errors": 0, "spans": {"wait_room": 0.123456}},
    "queue": {"queue_size": 5, "waiting_for": "5 groups ready, 3 in generation\nor scoring", "dropped": {"stale": 2}},
    "sync": {"sync_failures": 1, "last_sync_s": 0.0123456, "fenced": ["rollouter-1"]},
}


def test_one_line_of_statistics_covers_all_four_components():
    first, *more = component_statistics(STATS)
    assert first == (
        "Component Statistics | "
        "trainer: global_steps=12 processed_samples=3072 current_param_version=12 param_sync_count=11 | "
        "rollouter: total_generated_samples=4000 generation_errors=0 | queue: queue_size=5 | "
        "sync: sync_failures=1 last_sync_s=0.01235"
    )
    assert more == [
        "Component Statistics of rollouter: spans={wait_room=0.1235}",
        'Component Statistics of queue: waiting_for="5 groups ready, 3 in generation\\nor scoring" dropped={stale=2}',
        "Component Statistics of sync: fenced=[rollouter-1]",
    ]
    (line, *_) = component_statistics({"trainer": {"global_steps": 1}, "reward": {"scored": 3}})
    assert line.endswith("trainer: global_steps=1 | rollouter: no answer | queue: no answer | sync: no answer")
