"""The journal's file: appended events survive the process, a full disk and damage to the file."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.data.group import Ticket
from freewheel.queue import journal as journal_module
from freewheel.queue.journal import (
    NO_SEQUENCE,
    Abandoned,
    AttemptFailed,
    CheckpointMark,
    Committed,
    Journal,
    JournalBusy,
    JournalDamaged,
    JournalEvent,
    JournalFormat,
    JournalFull,
    Reserved,
    Step,
    Stored,
    Took,
    set_aside,
)
from freewheel.queue.ledger import Frontier
from freewheel.utils.sqlite import COMPANIONS

pytestmark = pytest.mark.timeout(60)

KILLS = 10
GROUP_BYTES = 80_000


def group(sequence: int, *, size: int = 300, ordinal: int | None = None, attempt: int = 0) -> Stored:
    """A group whose data contains its sequence."""
    data = (f"<{sequence}>".encode() * size)[:size]
    return Stored(Ticket(sequence if ordinal is None else ordinal, sequence, attempt), sequence % 7, data, sequence / 8)


def trained(step: int, sequences: Sequence[int], *, size: int = 300) -> list[JournalEvent]:
    groups = [group(one, size=size) for one in sequences]
    return [*groups, Took(step, tuple(one.ticket for one in groups)), Committed(step, step, float(step))]


@contextlib.contextmanager
def opened(path: Path, *, readonly: bool = False) -> Iterator[Journal]:
    journal = Journal(path, readonly=readonly)
    try:
        yield journal
    finally:
        journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system; skips where none may be mounted."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def sequences(journal: Journal) -> list[int]:
    return [one.ticket.sequence for one in journal.stored()]


def everything(journal: Journal) -> list[object]:
    """All content, row by row."""
    steps = list(journal.steps(after=0))
    rows = [journal.base(), journal.reserved(), steps, [journal.groups(one.step) for one in steps]]
    rows += [list(journal.stored()), list(journal.failures()), list(journal.abandoned())]
    return [msgspec.msgpack.encode(one) for one in rows]


# -- events -----------------------------------------------------------------------------------------------------------


def test_the_next_process_reads_what_was_appended_and_a_repeated_event_changes_nothing(path: Path):
    failure = AttemptFailed(Ticket(5, 5, 1), "infra", "engine", "it broke", 7.0)
    abandoned = Abandoned(6, 2, "prompt", 8.0)
    events = [*trained(1, [0, 1]), group(2), Took(2, (Ticket(3, 3),), 1), failure, abandoned, Reserved(1024)]
    with opened(path) as journal:
        assert journal.last_step() == 0
        journal.append(events)
    with opened(path) as journal:
        before = everything(journal)
        journal.append([*events, Reserved(1), Took(3, ())])
        assert everything(journal) == before
        assert journal.base() == CheckpointMark()
        assert list(journal.steps(after=0)) == [
            Step(1, 1, (Ticket(0, 0), Ticket(1, 1)), 0, 1.0),
            Step(2, None, (Ticket(3, 3),), 1, 0.0),
        ]
        assert list(journal.stored()) == [group(2)]
        assert journal.groups(1) == [group(0), group(1)]
        assert list(journal.failures()) == list(journal.failures(5)) == [failure]
        assert list(journal.failures(4)) == []
        assert list(journal.abandoned()) == [abandoned]
        assert journal.reserved() == 1024
    with contextlib.closing(Journal(path, readonly=True, checked=False)) as reader:
        assert reader.last_step() == 1, "the last committed step"


def test_a_group_is_stored_until_a_step_takes_it_or_its_attempt_fails(journal: Journal):
    journal.append([group(one) for one in range(5)])
    journal.append([Took(1, (Ticket(1, 1), Ticket(3, 3)))])
    assert sequences(journal) == [0, 2, 4]
    journal.append([Took(1, ()), AttemptFailed(Ticket(4, 4), "data", "reward", "x" * 10**6, 0.0)])
    assert sequences(journal) == [0, 1, 2, 3]
    assert [len(one.detail) for one in journal.failures()] == [journal_module.DETAIL_CHARS]


def test_a_step_changes_until_it_is_committed_and_then_only_to_a_later_version(journal: Journal):
    journal.append([group(one) for one in range(3)])
    journal.append([Took(1, (Ticket(0, 0), Ticket(1, 1)))])
    journal.append([AttemptFailed(Ticket(1, 1), None, "stale", "", 0.0), Took(1, (Ticket(0, 0),), 1)])
    journal.append([Took(1, (Ticket(0, 0), Ticket(2, 2)))])
    for events, version in (
        ([Committed(1, 1, 1.0), Took(1, (Ticket(2, 2),)), Took(1, ())], 1),
        ([Committed(1, 2, 1.0), Committed(1, 1, 9.0)], 2),
    ):
        journal.append(events)
        assert list(journal.steps(after=0)) == [Step(1, version, (Ticket(0, 0), Ticket(2, 2)), 0, 1.0)]
    assert journal.groups(1) == [group(0), group(2)]
    journal.compact(step=1, frontier=Frontier(low=1, ended=(2,)), keep_groups=0)
    journal.append([Committed(1, 3, 1.0)])
    assert [one.version for one in journal.steps(after=0)] == [2], "a checkpoint covers it"


def test_a_commit_of_an_unknown_step_is_refused_and_changes_nothing(journal: Journal):
    with pytest.raises(AssertionError, match="step 3"):
        journal.append([group(0), Committed(3, 1, 0.0)])
    assert sequences(journal) == []


tickets = st.builds(Ticket, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 9))
seconds = st.floats(allow_nan=False)
words = st.text(max_size=20)


@settings(max_examples=25, deadline=None)
@given(
    stored=st.lists(st.builds(Stored, tickets, st.integers(-1, 2**31), st.binary(max_size=200), seconds), max_size=8),
    steps=st.lists(
        st.tuples(st.lists(tickets, min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 99) | st.none())
    ),
    failures=st.lists(st.builds(AttemptFailed, tickets, st.none() | words, words, words, seconds), max_size=5),
    abandoned=st.lists(st.builds(Abandoned, st.integers(0, 2**40), st.integers(0, 9), words, seconds), max_size=5),
    reserved=st.integers(0, 2**62),
)
def test_events_are_read_as_they_were_written(tmp_path_factory, stored, steps, failures, abandoned, reserved):
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    with opened(path) as journal:
        journal.append([*stored, *abandoned, Reserved(reserved)])
        for step, (chosen, missing, version) in enumerate(steps, 1):
            committed = [] if version is None else [Committed(step, version, 1.5)]
            journal.append([Took(step, tuple(chosen), missing), *committed])
        assert [(list(s.tickets), s.missing, s.version) for s in journal.steps(after=0)] == steps
        used = {ticket.sequence for chosen, _, _ in steps for ticket in chosen}
        first = {one.ticket.sequence: one for one in reversed(stored)}
        assert list(journal.stored()) == [first[key] for key in sorted(first) if key not in used]
        journal.append(failures)
        failed = {one.ticket.sequence: one for one in reversed(failures)}
        assert list(journal.failures()) == [failed[key] for key in sorted(failed)]
        ended = {one.ordinal: one for one in reversed(abandoned)}
        assert list(journal.abandoned()) == [ended[key] for key in sorted(ended)]
        assert journal.reserved() == reserved
    shutil.rmtree(path.parent)


# -- compaction, rewinding, resetting ---------------------------------------------------------------------------------


def test_compaction_deletes_the_data_of_old_groups_and_keeps_their_ordinals(journal: Journal):
    for step in range(1, 5):
        journal.append(trained(step, [3 * step, 3 * step + 1, 3 * step + 2]))
    journal.append([group(99)])
    frontier = Frontier(low=12, trained=9)
    journal.compact(step=3, frontier=frontier, keep_groups=4)
    before = everything(journal)
    journal.compact(step=3, frontier=Frontier(low=99), keep_groups=0)
    journal.compact(step=1, frontier=Frontier(), keep_groups=0)
    assert everything(journal) == before, "a repeated or earlier compaction changes nothing"
    assert journal.base() == CheckpointMark(3, 3, frontier)
    assert next(journal.steps(after=0)).tickets == tuple(Ticket(one, NO_SEQUENCE) for one in (3, 4, 5))
    kept = [ticket for step in journal.steps(after=1) for ticket in step.tickets]
    assert kept == [Ticket(one, one) for one in range(6, 15)]
    assert [journal.group(one) is not None for one in range(3, 15)] == [False] * 3 + [True] * 9
    assert [journal.groups(one) is not None for one in (1, 2, 3, 4)] == [False, True, True, True]
    assert sequences(journal) == [99], "kept groups are not stored again"


def test_a_step_whose_groups_are_deleted_keeps_the_version_of_its_oldest_group(journal: Journal):
    for step, mine in enumerate(([2, 3], [4, 5], [7, 6]), 1):
        journal.append(trained(step, mine))  # 7 is of version 0, the others of their own number
    for step, versions in ((2, [2, 4, None]), (3, [2, 4, 0])):
        journal.compact(step=step, frontier=Frontier(low=8), keep_groups=0)
        assert [one.min_version for one in journal.steps(after=0)] == versions


def test_the_next_compaction_finishes_one_that_was_killed(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_module, "DROPPED_AT_ONCE", 2)
    with opened(path) as journal:
        for step in range(1, 6):
            journal.append(trained(step, [2 * step, 2 * step + 1]))
        to_history, calls = journal._move_to_history, iter(range(10))

        def killed(steps: Sequence[Step]) -> None:
            assert next(calls) < 2, "killed"
            to_history(steps)

        monkeypatch.setattr(journal, "_move_to_history", killed)
        with pytest.raises(AssertionError, match="killed"):
            journal.compact(step=4, frontier=Frontier(low=10), keep_groups=0)
    with opened(path) as journal:
        assert journal.base().step == 4
        assert sequences(journal) == []
        journal.compact(step=5, frontier=Frontier(low=12), keep_groups=0)
        assert [journal.group(one) for one in range(2, 12)] == [None] * 10
        assert [ticket.ordinal for step in journal.steps(after=0) for ticket in step.tickets] == list(range(2, 12))


def test_the_file_stays_bounded_over_thousands_of_steps_and_a_trained_group_costs_two_bytes(journal: Journal):
    per_step, steps, every = 32, 3000, 50
    sizes = []
    for step in range(1, steps + 1):
        journal.append(trained(step, range(step * per_step, (step + 1) * per_step)))
        if step % every == 0:
            frontier = Frontier(low=(step + 1) * per_step, trained=step * per_step)
            journal.compact(step=step, frontier=frontier, keep_groups=64)
        if step % 1000 == 0:
            assert Path(f"{journal.path}-wal").stat().st_size < journal_module.CHECKPOINT_BYTES + 4 * 2**20
            sizes.append(journal.path.stat().st_size)
    ordinals = [ticket.ordinal for step in journal.steps(after=0) for ticket in step.tickets]
    assert ordinals == list(range(per_step, (steps + 1) * per_step))
    grown = sizes[2] - sizes[0]
    assert grown <= 2 * 2000 * per_step + 3 * journal_module.PAGE_BYTES, f"{grown} bytes for {2000 * per_step} groups"


def test_rewinding_stores_the_groups_of_later_steps_again_but_not_beyond_the_base(journal: Journal):
    for step in (1, 2, 3):
        journal.append(trained(step, [step * 10, step * 10 + 1]))
    journal.append([Took(4, (Ticket(40, 40),)), group(40)])
    journal.rewind(after=1)
    assert [step.step for step in journal.steps(after=0)] == [1]
    assert sequences(journal) == [20, 21, 30, 31, 40]
    journal.compact(step=1, frontier=Frontier(low=12), keep_groups=0)
    with pytest.raises(AssertionError, match="base"):
        journal.rewind(after=0)


def test_a_reset_starts_from_a_checkpoint_and_keeps_groups_of_open_prompts(journal: Journal):
    journal.append([*trained(1, [0, 1]), *(group(one) for one in range(2, 8)), Took(2, (Ticket(2, 2),))])
    frontier = Frontier(low=4, ended=(6,), trained=5)
    journal.reset(step=3, version=2, frontier=frontier)
    assert journal.base() == CheckpointMark(3, 2, frontier)
    assert sequences(journal) == [4, 5, 7]
    assert [step.step for step in journal.steps(after=0)] == [1], "what is known of earlier steps stays"
    for step in (4, 5):
        journal.append(trained(step, [step * 10]))
    journal.compact(step=5, frontier=Frontier(low=51), keep_groups=0)
    journal.reset(step=4, version=4, frontier=Frontier(low=41, trained=6))
    assert [step.step for step in journal.steps(after=0)] == [1, 4], "later steps are forgotten"


# -- processes --------------------------------------------------------------------------------------------------------

WRITING = """
import resource, sys
from collections.abc import Sequence
from pathlib import Path
from freewheel.data.group import Ticket
from freewheel.queue.journal import *
from freewheel.queue.ledger import Frontier

PER_STEP, GROUP_BYTES = {per_step}, {size}
{functions}
journal = Journal(Path(sys.argv[1]))
"""
STEP_AFTER_STEP = """
step = max((one.step for one in journal.steps(after=0)), default=0)
while True:
    step += 1
    for event in trained_large(step):
        journal.append([event])
    if step % 20 == 0:
        journal.compact(step=step, frontier=Frontier(low=PER_STEP * (step + 1)), keep_groups=4)
    print(step, flush=True)
"""
UNTIL_FULL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
done = 0
try:
    while True:
        journal.append([group(done, size=GROUP_BYTES)])
        done += 1
except JournalFull:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append([group(done, size=GROUP_BYTES)])
assert [one.ticket.sequence for one in journal.stored()] == list(range(done + 1)) and done > 9, done
print("continued")
"""
PER_STEP = 3


def trained_large(step: int) -> list[JournalEvent]:
    """Groups as large as real ones, so that kills hit checkpoints and transactions of several pages."""
    return trained(step, range(step * PER_STEP, (step + 1) * PER_STEP), size=GROUP_BYTES)


def process(script: str, path: Path) -> subprocess.Popen[str]:
    functions = "\n".join(inspect.getsource(one) for one in (group, trained, trained_large))
    source = WRITING.format(functions=functions, per_step=PER_STEP, size=GROUP_BYTES) + script
    return subprocess.Popen([sys.executable, "-c", source, str(path)], stdout=subprocess.PIPE, text=True)


def test_a_kill_at_any_instant_loses_nothing_that_was_acknowledged(path: Path):
    rng = random.Random(5)
    last = 0
    for _ in range(KILLS):
        writer = process(STEP_AFTER_STEP, path)
        assert writer.stdout is not None
        for _ in range(rng.randrange(5, 60)):
            last = int(writer.stdout.readline())
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(rng.random() * 0.01)
        writer.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in writer.stdout.read().split()]
        writer.stdout.close()
        writer.wait()
        last = max([last, *acknowledged])
        with opened(path) as journal:
            steps = list(journal.steps(after=0))
            assert [step.step for step in steps] == list(range(1, len(steps) + 1))
            assert len([step for step in steps if step.version is not None]) >= last
            assert_is_what_was_written(journal)
            for step in steps[journal.base().step :]:
                assert journal.groups(step.step) is not None
            for one in journal.stored():  # put, and the kill came before their step was taken
                assert one.ticket.sequence // PER_STEP == len(steps) + 1
            journal.rewind(after=max(last, journal.base().step))


def assert_is_what_was_written(journal: Journal) -> None:
    for step in journal.steps(after=0):
        *groups, took, _ = trained_large(step.step)
        assert [one.ordinal for one in step.tickets] == [one.ordinal for one in took.tickets]
        assert step.version in (None, step.step)
        assert journal.groups(step.step) in (None, groups)
    for one in journal.stored():
        assert one == group(one.ticket.sequence, size=GROUP_BYTES)
    for failure in journal.failures():
        assert failure.reason == "engine"


def test_a_limit_on_file_sizes_counts_as_a_full_disk(path: Path):
    """A quota causes the same error."""
    output, _ = process(UNTIL_FULL, path).communicate()
    assert output.strip() == "continued"


def test_a_full_disk_is_reported_changes_nothing_and_ends_when_there_is_room(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(12 * 2**20))
    with opened(small_disk / "journal.sqlite") as journal:
        done = 0
        with pytest.raises(JournalFull, match=r"journal\.sqlite.*MB free"):
            for _ in range(1000):
                journal.append([group(done + one, size=GROUP_BYTES) for one in range(4)])
                done += 4
        assert sequences(journal) == list(range(done)), "the transaction that did not fit left nothing"
        with pytest.raises(JournalFull):
            journal.append([group(done + one, size=GROUP_BYTES) for one in range(100)])
        ballast.unlink()
        journal.append([group(done + one, size=GROUP_BYTES) for one in range(4)])
        assert list(journal.stored()) == [group(one, size=GROUP_BYTES) for one in range(done + 4)]


def test_a_reader_next_to_a_live_writer_sees_one_moment_and_does_not_make_the_log_grow(journal: Journal):
    with opened(journal.path, readonly=True) as reader:
        for step in range(1, 200):
            for event in trained_large(step):
                journal.append([event])
            with reader.snapshot():
                in_steps = {ticket.sequence for one in reader.steps(after=0) for ticket in one.tickets}
                if step % 10 == 0:
                    journal.append([group(10**6 + step)])
                    assert in_steps == set(range(PER_STEP, (step + 1) * PER_STEP))
                    assert 10**6 + step not in sequences(reader)
            if step == 20:
                paused = reader.stored()  # a reader that stops in the middle of a stream
                next(paused)
        assert Path(f"{journal.path}-wal").stat().st_size < 2 * journal_module.CHECKPOINT_BYTES


def test_only_one_process_writes_and_only_the_owner_can_read(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal_module, "LOCK_WAIT_S", 0.0)
    with opened(path) as journal:
        journal.append([group(0)])
        with pytest.raises(JournalBusy, match="another process"):
            Journal(path)
        Journal(path, readonly=True).close()
        for one in path.parent.iterdir():
            assert stat.S_IMODE(one.stat().st_mode) == 0o600, one.name
    Journal(path).close()


def test_reading_a_journal_that_nobody_writes_creates_no_file_until_somebody_writes(path: Path):
    with opened(path) as journal:
        journal.append(trained(1, [0, 1]))
    before = {one.name: one.stat().st_mtime_ns for one in path.parent.iterdir()}
    with opened(path, readonly=True) as reader:
        assert reader.last_step() == 1 and reader.groups(1) == [group(0), group(1)]
        assert {one.name: one.stat().st_mtime_ns for one in path.parent.iterdir()} == before
        with opened(path) as journal:
            journal.append(trained(2, [2, 3]))
            assert reader.last_step() == 1, "the log does not change the file"
            killed = path.parent / "killed"
            killed.mkdir()
            for suffix in ("", *COMPANIONS):
                shutil.copy(f"{path}{suffix}", killed)
        with pytest.raises(JournalBusy, match="look again"):
            reader.last_step()
    for one in (path, killed / path.name):
        with opened(one, readonly=True) as reader:
            assert reader.last_step() == 2, "also from the log of a killed writer"


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a killed writer: part in the database, part in the log."""
    path = tmp_path_factory.mktemp("killed") / "journal.sqlite"
    with opened(path) as journal:
        for step in range(1, 61):
            failure = AttemptFailed(Ticket(step, 10**6 + step), "infra", "engine", "it broke", 0.0)
            journal.append([*trained_large(step), failure])
        journal.append([group(10**5 + one, size=GROUP_BYTES) for one in range(20)])
        return copied(path, path.with_name("copy"))


def copied(source: Path, path: Path) -> Path:
    for suffix in ("", "-wal"):
        shutil.copy(f"{source}{suffix}", f"{path}{suffix}")
    Path(f"{path}-shm").unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite.lock"])
def test_a_link_in_place_of_the_journal_is_refused_and_its_target_unchanged(path: Path, name: str):
    victim = path.with_name("mine")
    victim.write_text("keep")
    path.with_name(name).symlink_to(victim)
    with pytest.raises(OSError, match="it is a link"):
        Journal(path)
    assert victim.read_text() == "keep"


@pytest.mark.parametrize("which", ["", "-wal"])
@pytest.mark.parametrize("how", ["cut", "garbled", "zeros"])
def test_a_damaged_file_is_reported_or_returns_what_was_written(killed: Path, path: Path, which: str, how: str):
    rng = random.Random(f"{which}{how}")
    read = 0
    for _ in range(6):
        victim = Path(f"{copied(killed, path)}{which}")
        size = victim.stat().st_size
        if how == "cut":
            os.truncate(victim, rng.randrange(size))
        else:
            with victim.open("r+b") as file:
                file.seek(rng.randrange(size))
                length = rng.randrange(1, 5000)
                file.write(bytes(length) if how == "zeros" else rng.randbytes(length))
        with contextlib.suppress(JournalDamaged), opened(path) as journal:
            assert_is_what_was_written(journal)
            steps = list(journal.steps(after=0))
            if which:  # a power cut takes the end of the log: what is left is a prefix
                assert [step.step for step in steps] == list(range(1, len(steps) + 1))
                assert all(step.version is not None for step in steps[:-1])
            read += 1
    assert read == 6 or which == "", "a log ends at its first bad entry, and everything before it is read"


def test_a_damaged_group_or_step_is_missing_and_logged(path: Path, caplog: pytest.LogCaptureFixture):
    with opened(path) as journal:
        for step in (1, 2, 3):
            journal.append(trained(step, [step]))
        journal.append([group(4), group(5)])
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE steps SET crc = crc + 1 WHERE step = 2")
    data = bytearray(path.read_bytes())
    for sequence in (1, 4):
        data[data.index(f"<{sequence}><{sequence}>".encode()) + 1] ^= 4
    path.write_bytes(data)
    with opened(path) as journal:
        assert [step.step for step in journal.steps(after=0)] == [1, 3]
        assert journal.groups(1) is None
        assert sequences(journal) == [2, 5], "no readable step has group 2"
    for text in ("sequence 1 is damaged", "sequence 4 is damaged", "2 is damaged"):
        assert text in caplog.text


@pytest.mark.parametrize("content", [b"not a database at all " * 500, b"\x00" * 100_000, b"SQLite format 3\x00" * 999])
def test_another_file_is_not_a_journal(path: Path, content: bytes):
    path.write_bytes(content)
    with pytest.raises(JournalDamaged, match=r"journal\.sqlite"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_foreign_database_is_refused_and_an_empty_file_becomes_a_journal(path: Path):
    with pytest.raises(FileNotFoundError):
        Journal(path, readonly=True)
    assert not list(path.parent.iterdir()), "reading creates nothing"
    path.touch()
    with opened(path) as journal:
        assert journal.base() == CheckpointMark()
    foreign = path.with_name("foreign.sqlite")
    with contextlib.closing(sqlite3.connect(foreign)) as other, other:
        other.execute("CREATE TABLE mine (x)")
    for readonly in (False, True):
        with pytest.raises(JournalDamaged, match="not a journal"):
            Journal(foreign, readonly=readonly)


def test_a_log_whose_file_is_gone_is_not_replayed_into_a_new_one(killed: Path, path: Path):
    copied(killed, path).unlink()
    with pytest.raises(JournalDamaged, match="sqlite-wal is left"):
        Journal(path)


def test_a_later_format_is_refused_by_its_number(path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as later:
        later.setattr(journal_module, "FORMAT", 7)
        Journal(path).close()
    with pytest.raises(JournalFormat, match="has format 7"):
        Journal(path)


def test_a_damaged_journal_is_set_aside_with_its_log_and_a_new_one_starts(killed: Path, path: Path):
    for number in (1, 2):
        copied(killed, path)
        assert set_aside(path) == path.with_name(f"journal.sqlite.damaged-{number}")
        assert path.with_name(f"journal.sqlite.damaged-{number}-wal").exists()
        with opened(path) as journal:
            assert sequences(journal) == []
        path.unlink()


# -- the first release ------------------------------------------------------------------------------------------------


def test_a_journal_of_the_first_release_is_still_read_and_continued(path: Path):
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.executescript(Path(__file__).with_name("first_release.sql").read_text())
    with opened(path) as journal:
        assert journal.base() == CheckpointMark(1, 1, Frontier(low=2, trained=2))
        assert [step.tickets for step in journal.steps(after=0)] == [
            (Ticket(0, NO_SEQUENCE), Ticket(1, NO_SEQUENCE)),
            (Ticket(2, 2), Ticket(3, 3, 1)),
        ]
        assert journal.groups(2) == [group(2), group(3, attempt=1)]
        assert list(journal.stored()) == [group(4)]
        assert list(journal.failures()) == [AttemptFailed(Ticket(5, 5, 1), "infra", "engine", "it broke", 7.0)]
        assert list(journal.abandoned()) == [Abandoned(6, 2, "prompt", 8.0)]
        assert journal.reserved() == 1024
        journal.append(trained(3, [4, 7]))
        assert journal.last_step() == 3
