"""The store with damaged files, full disks, locks, forks and killed processes, all of them real."""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge import cache as cache_module
from freewheel.judge.cache import ASIDES_MAX, CACHE_FILE, CacheFile, CacheUnusableError, Store
from freewheel.utils.sqlite import Trouble, diagnose

from .helpers import MIB, OpenStore, fill, key, present, reply, warnings_in

PROGRAM = """
import hashlib, os, random, sys, threading
from pathlib import Path
from freewheel.judge.cache import CachedReply, Store

def key(name): return hashlib.sha256(str(name).encode()).digest()
store = Store(Path(sys.argv[1]), max_bytes=1 << 28, ttl_s=None)
store.open()
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run a program that has a store on the path given as first argument."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_whole(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# -- damage --------------------------------------------------------------------------------------------------


@functools.cache
def whole_file() -> bytes:
    """A cache file with 2,000 entries."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CACHE_FILE
        store = Store(path, max_bytes=64 * MIB, ttl_s=None)
        fill(store, range(2_000), size=600)
        store.close()
        return path.read_bytes()


def overwrite(path: Path, start: int, data: bytes) -> None:
    content = whole_file()
    path.write_bytes(content[:start] + data + content[start + len(data) :])


def run_sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for statement in statements:
            conn.execute(statement)


def change(path: Path, statement: str) -> None:
    path.write_bytes(whole_file())
    run_sql(path, statement)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "header": (lambda path: overwrite(path, 0, b"\xff" * 64), "corrupt-1"),
    "truncated": (lambda path: path.write_bytes(whole_file()[:500_000]), "corrupt-1"),
    "cut in the header": (lambda path: path.write_bytes(whole_file()[:50]), "corrupt-1"),
    "all other pages": (lambda path: overwrite(path, 4_096, random.Random(1).randbytes(1_000_000)), "corrupt-1"),
    "a text file": (lambda path: path.write_text("Dear diary,\n" * 1_000), "corrupt-1"),
    "no tables": (lambda path: change(path, "DROP TABLE replies"), "corrupt-1"),
    "a newer schema": (lambda path: change(path, "PRAGMA user_version = 99"), "schema-99-1"),
    "an older schema": (lambda path: change(path, "PRAGMA user_version = 0"), "schema-0-1"),
    "another program's database": (
        lambda path: run_sql(path, "PRAGMA user_version = 1", "CREATE TABLE bookmarks (url)"),
        "schema-1-1",
    ),
    "an unmarked database": (lambda path: run_sql(path, "CREATE TABLE bookmarks (url)"), "schema-0-1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_file_is_set_aside_with_one_warning_and_the_store_continues(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    make, suffix = DAMAGES[damage]
    path.parent.mkdir()
    make(path)
    store = opened()
    present(store, range(2_000))
    fill(store, range(5_000, 5_010))
    assert present(store, range(5_000, 5_010)) == set(range(5_000, 5_010))
    aside = path.with_name(f"{CACHE_FILE}.{suffix}")
    assert store.stats().set_aside == (aside.name,)
    assert present(opened(), range(5_000, 5_010)) == set(range(5_000, 5_010))
    (message,) = warnings_in(caplog)
    assert str(path) in message and str(aside) in message


def test_an_empty_file_is_filled_and_not_set_aside(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.touch()
    store = opened()
    fill(store, range(3))
    assert store.stats().set_aside == () and warnings_in(caplog) == []


def test_a_damaged_page_never_yields_a_wrong_reply(path: Path, opened: OpenStore) -> None:
    content = whole_file()
    pages = len(content) // 4_096
    rng = random.Random(7)
    path.parent.mkdir()
    for attempt in range(40):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 3, 40])):
            start = rng.randrange(1, pages) * 4_096 + rng.randrange(4_096 - 16)
            damaged[start : start + 16] = rng.randbytes(16)
        path.write_bytes(damaged)
        store = opened()
        found = store.get_many([key(name) for name in range(2_000)])
        for name in range(2_000):
            assert found.get(key(name), reply(name, 600)).text == reply(name, 600).text, attempt
        fill(store, range(3_000, 3_500), size=600)
        assert present(store, range(3_000, 3_500)) == set(range(3_000, 3_500))
        store.close()
        for leftover in path.parent.iterdir():
            leftover.unlink()


def test_a_reply_whose_checksum_is_wrong_is_a_miss(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    change(path, "UPDATE replies SET text = CAST('10' AS BLOB) WHERE id = 1")
    assert len(present(opened(), range(2_000))) == 1_999
    assert "damaged replies" in warnings_in(caplog)[0]


def test_a_disk_that_damages_every_file_is_not_filled_with_copies(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    for number in range(ASIDES_MAX + 2):
        path.write_text(f"damaged again, {number}" * 1_000)
        store = opened()
        store.put(key(1), reply(1))
        assert present(store, range(3)) == {1}
        assert store.flush(timeout_s=0.3 if number >= ASIDES_MAX else 10.0) == (number < ASIDES_MAX)
        store.close()
    asides = sorted(path.parent.glob(f"{CACHE_FILE}.corrupt-?"))
    assert [aside.read_text()[:16] for aside in asides] == [f"damaged again, {n}" for n in range(ASIDES_MAX)]
    assert "delete those" in caplog.text


def test_two_connections_that_find_the_same_damage_set_the_file_aside_once(path: Path) -> None:
    first, second = CacheFile(path, 1.0), CacheFile(path, 1.0)
    damaged: list[sqlite3.Connection] = []
    for file in (first, second):
        file.use(damaged.append)

    def find_damage(db: sqlite3.Connection) -> None:
        if db is damaged[1]:
            first.use(find_damage)  # the other one is faster
        if db in damaged:
            error = sqlite3.DatabaseError("malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

    second.use(find_damage)
    assert len(first.list_asides()) == 1
    for file in (first, second):
        file.disconnect()


# -- troubles while running ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder_too", [False, True])
def test_a_deleted_file_or_directory_is_created_again(path: Path, opened: OpenStore, folder_too: bool) -> None:
    store = opened()
    fill(store, range(10))
    if folder_too:
        shutil.rmtree(path.parent)
    else:
        path.unlink()
        assert present(store, range(10)) == set()
    fill(store, range(10, 20))
    assert present(opened(), range(20)) == set(range(10, 20))


def test_a_file_that_replaces_the_open_one_is_used(path: Path, tmp_path: Path, opened: OpenStore) -> None:
    other = opened(path=tmp_path / "other" / CACHE_FILE)
    fill(other, range(100, 110))
    other.close()
    store = opened()
    fill(store, range(10))
    other.path.replace(path)
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink()
    assert present(store, range(200)) == set(range(100, 110))
    fill(store, range(110, 120))
    assert present(opened(), range(200)) == set(range(100, 120))


class SmallDisk:
    """Makes SQLite report a full disk, by its own limit on the pages of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
        self.is_full = True
        connect = cache_module.connect

        def limited(path: Path, *, settings: Any, **options: Any) -> sqlite3.Connection:
            limit = [f"max_page_count = {pages}"] if self.is_full else []
            return connect(path, settings=[*settings, *limit], **options)

        monkeypatch.setattr(cache_module, "connect", limited)


def test_a_full_disk_gives_one_warning_reads_continue_and_writes_resume(
    opened: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "RETRY_AFTER_S", 0.3)
    disk = SmallDisk(monkeypatch, 120)
    store = opened()
    fill(store, range(100), size=600)
    for name in range(100, 3_000):
        store.put(key(name), reply(name, 600))
    assert not store.flush(timeout_s=1.0)
    assert present(store, range(3_000)) == set(range(3_000))  # the rest from memory
    (message,) = warnings_in(caplog)
    assert "disk is full" in message
    disk.is_full = False
    assert store.flush(), "the store tries again by itself"
    store.close()
    assert present(opened(), range(3_000)) == set(range(3_000))


def test_closing_on_a_full_disk_ends_and_counts_the_lost_replies(
    opened: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, 30)
    store = opened()
    for name in range(3_000):
        store.put(key(name), reply(name, 600))
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 4.0, "it tried once more, and not until the time of `close` was over"
    assert any("not written" in message for message in warnings_in(caplog))


def test_the_writers_thread_starts_when_the_store_opens_and_without_one_close_writes(
    opened: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At interpreter exit, when an open judge is closed, no thread can be started any more."""
    before = set(threading.enumerate())
    opened()
    (new,) = set(threading.enumerate()) - before
    assert new.name == "freewheel-judge-cache" and new.daemon

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        store, late = opened(), opened()
        store.put(key(1), reply(1))
        store.remember("a", b"note")
        assert present(store, range(3)) == {1}
        store.close()
    assert present(opened(), range(3)) == {1} and opened().recall("a") == b"note"
    late.put(key("late"), reply("late"))
    assert late.flush(), "the next item tries to start the thread again"
    assert warnings_in(caplog) == []


def test_a_file_in_place_of_the_directory_leaves_the_store_in_memory_until_it_is_gone(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "RETRY_AFTER_S", 0.5)
    path.parent.write_text("in the way")
    store = opened()
    store.put(key(1), reply(1))
    store.remember("a", b"1")
    assert not store.flush(timeout_s=0.2)
    assert present(store, range(3)) == {1}
    assert (store.recall("a"), store.recall("b")) == (b"1", None)
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(CacheUnusableError):
        store.stats()
    path.parent.unlink()
    assert store.flush()
    assert present(opened(), range(3)) == {1}


def test_a_lock_of_another_process_loses_nothing_and_blocks_neither_put_nor_get(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    fill(store, range(10))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        for name in range(10, 2_000):
            store.put(key(name), reply(name))
        assert present(store, range(2_000)) == set(range(2_000))
        assert time.monotonic() - started < 10
        assert not store.flush(timeout_s=0.6)
        other.execute("COMMIT")
    assert store.flush()
    assert warnings_in(caplog) == []
    assert present(opened(), range(2_000)) == set(range(2_000))


def test_errors_are_told_apart_by_their_code() -> None:
    def sqlite(code: int) -> sqlite3.OperationalError:
        error = sqlite3.OperationalError("some words")
        error.sqlite_errorcode = code
        return error

    expected = {
        sqlite(sqlite3.SQLITE_FULL): Trouble.FULL,
        sqlite(sqlite3.SQLITE_BUSY_SNAPSHOT): Trouble.LOCKED,
        sqlite(sqlite3.SQLITE_READONLY_DBMOVED): Trouble.READ_ONLY,
        sqlite(sqlite3.SQLITE_CORRUPT_INDEX): Trouble.CORRUPT,
        sqlite(sqlite3.SQLITE_IOERR_FSYNC): Trouble.IO,
        sqlite(sqlite3.SQLITE_IOERR_SHORT_READ): Trouble.CORRUPT,
        sqlite3.OperationalError("no such table: replies"): Trouble.CORRUPT,
        sqlite3.ProgrammingError("misuse"): Trouble.OTHER,
        OSError(28, "No space left on device"): Trouble.FULL,
        FileNotFoundError(2, "gone"): Trouble.CANNOT_OPEN,
    }
    assert {error: diagnose(error) for error in expected} == expected


# -- several processes ---------------------------------------------------------------------------------------

SHARING = """
    worker, count = sys.argv[2], int(sys.argv[3])
    rng = random.Random(worker)
    for n in range(count):
        store.put(key(f"{worker}/{n}"), CachedReply(f"{worker}/{n}".ljust(600), n, 1))
        if n % 50 == 0:
            names = [f"{rng.randrange(4)}/{rng.randrange(count)}" for _ in range(64)]
            found = store.get_many([key(name) for name in names])
            for name in names:
                if key(name) in found:
                    assert found[key(name)].text == name.ljust(600), name
        if n % 700 == 0:
            assert store.flush(30)
    assert store.flush(30)
    store.close()
    assert not store._logged, store._logged
"""


def test_four_processes_share_a_file_without_loss_and_set_a_damaged_one_aside_once(
    path: Path, opened: OpenStore
) -> None:
    path.parent.mkdir()
    DAMAGES["header"][0](path)
    count = 3_000
    for worker in [python(SHARING, path, worker, count) for worker in range(4)]:
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == 0, err
    store = opened()
    names = [f"{worker}/{n}" for worker in range(4) for n in range(count)]
    found = store.get_many([key(name) for name in names])
    assert all(found[key(name)].text == name.ljust(600) for name in names)
    assert len(store.stats().set_aside) == 1
    assert is_whole(path)


def test_a_process_that_closes_the_file_leaves_the_log_of_those_that_use_it(path: Path, opened: OpenStore) -> None:
    """SQLite deletes the log when the last connection closes, and knows the others by their locks."""
    store = opened()
    fill(store, range(10))
    worker = python(SHARING, path, 0, 10)
    _, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    assert path.with_name(f"{CACHE_FILE}-wal").exists()
    fill(store, range(10, 20))
    store.close()
    assert present(opened(), range(20)) == set(range(20)) and is_whole(path)


def test_a_process_killed_while_writing_leaves_a_whole_file_with_everything_flushed(
    path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    endless = """
        n = int(sys.argv[2])
        while True:
            store.put(key(n), CachedReply(f"score of {n}", 10, 3))
            n += 1
            if n % 500 == 0:
                assert store.flush()
                print(n, flush=True)
    """
    survivor = opened()
    rng = random.Random(3)
    start = 0
    for _ in range(4):
        process = python(endless, path, start)
        assert process.stdout is not None
        flushed = start
        for _ in range(rng.randrange(2, 8)):
            flushed = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert present(survivor, range(start, flushed)) == set(range(start, flushed))
        start = flushed
    survivor.close()
    store = opened()
    assert present(store, range(start)) == set(range(start))
    assert warnings_in(caplog) == []
    assert is_whole(path)


def test_a_forked_child_and_its_parent_continue_with_separate_connections(path: Path) -> None:
    forking = """
        for n in range(100): store.put(key(f"before/{n}"), CachedReply("b"))
        store.flush()
        stop = threading.Event()
        def keep_reading():
            while not stop.is_set(): store.get_many([key(f"before/{n}") for n in range(100)])
        reader = threading.Thread(target=keep_reading); reader.start()
        children = []
        for child in range(5):
            for n in range(500): store.put(key(f"parent/{child}/{n}"), CachedReply("p" * 600))
            pid = os.fork()
            if pid == 0:
                try:
                    inherited = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                                 if os.path.exists(f"/proc/self/fd/{fd}")]
                    assert not any("judge.sqlite3" in name for name in inherited), inherited
                    assert len(store.get_many([key(f"before/{n}") for n in range(100)])) == 100
                    for n in range(500): store.put(key(f"child/{child}/{n}"), CachedReply("c" * 600))
                    assert store.flush(30)
                    assert len(store.get_many([key(f"child/{child}/{n}") for n in range(500)])) == 500
                    store.close()
                    code = 0
                except BaseException as error:
                    print("child", repr(error), file=sys.stderr, flush=True)
                    code = 1
                os._exit(code)
            children.append(pid)
        stop.set(); reader.join()
        codes = [os.waitpid(pid, 0)[1] for pid in children]
        assert codes == [0] * 5, codes
        assert store.flush(30)
        for kind in ("parent", "child"):
            names = [key(f"{kind}/{child}/{n}") for child in range(5) for n in range(500)]
            assert len(store.get_many(names)) == 2500, kind
        store.close()
        assert threading.active_count() == 1
    """
    process = python(forking, path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert is_whole(path)
