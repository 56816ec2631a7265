"""The memory cache, compared with a model; the store with real files. Failures are in `test_cache_troubles`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
import threading
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freewheel.judge import store as store_module
from freewheel.judge.cache import CACHE_FILE, MemoryCache, cache_dir
from freewheel.judge.cache_file import CachedReply
from freewheel.judge.store import CacheUnusableError, Store, memory_bytes

from .stores import MIB, NOW, Clock, OpenStore, fill, key, present, reply, warnings_in

# -- the memory cache ----------------------------------------------------------------------------------------


@given(
    max_entries=st.integers(0, 5),
    max_bytes=st.integers(0, 3_000),
    steps=st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefg"), st.integers(0, 1_500)), max_size=60),
)
def test_the_memory_cache_behaves_like_a_list_in_order_of_use(
    max_entries: int, max_bytes: int, steps: list[tuple[bool, str, int]]
) -> None:
    cache = MemoryCache(max_entries, max_bytes)
    model: list[tuple[str, CachedReply]] = []
    for putting, name, length in steps:
        known = [pair for pair in model if pair[0] == name]
        if putting:
            value = CachedReply("é" * length if length % 2 else "x" * length)
            cache.put(name.encode(), value)
            model = [pair for pair in model if pair[0] != name]
            model += [(name, value)] if memory_bytes(value) <= max_bytes else []
            while len(model) > max_entries or sum(memory_bytes(reply) for _, reply in model) > max_bytes:
                del model[0]
        else:
            assert cache.get(name.encode()) is (known[0][1] if known else None)
            model = [pair for pair in model if pair[0] != name] + known
        assert len(cache) == len(model)
        assert cache.bytes == sum(memory_bytes(reply) for _, reply in model)


# -- where it is ---------------------------------------------------------------------------------------------


def test_the_directory_is_the_configured_one_then_from_the_environment_then_xdg_then_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("FREEWHEEL_CACHE_DIR", "/from/env")
    monkeypatch.setenv("XDG_CACHE_HOME", "/from/xdg")
    assert cache_dir("~/mine") == Path("/home/somebody/mine")
    assert cache_dir(None) == Path("/from/env")
    monkeypatch.delenv("FREEWHEEL_CACHE_DIR")
    assert cache_dir(None) == Path("/from/xdg/freewheel")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/to/be/ignored")
    assert cache_dir(None) == Path("/home/somebody/.cache/freewheel")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir(None) == Path("/home/somebody/.cache/freewheel")


def test_the_directory_and_every_file_in_it_are_private(path: Path, opened: OpenStore) -> None:
    store = opened()
    store.close()
    path.chmod(0o644)
    store.open()
    fill(store, range(3))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {
        CACHE_FILE: 0o600,
        f"{CACHE_FILE}-wal": 0o600,
        f"{CACHE_FILE}-shm": 0o600,
        f"{CACHE_FILE}.lock": 0o600,
    }


def test_a_path_with_special_characters_of_a_uri_works(tmp_path: Path, opened: OpenStore) -> None:
    path = tmp_path / "a ?b#c%20d&é" / CACHE_FILE
    store = opened(path=path)
    fill(store, range(1))
    assert path.exists()
    assert present(store, range(2)) == {0}


# -- replies and notes ---------------------------------------------------------------------------------------


def test_a_put_is_found_at_once_after_reopening_and_soon_by_others_and_the_last_of_two_wins(opened: OpenStore) -> None:
    store, other = opened(), opened()
    store.put(key(1), CachedReply("first"))
    for name in range(3_000):
        store.put(key(name), reply(name))
    expected = {key(name): reply(name) for name in range(3_000)}
    assert store.get_many(list(expected)) == expected
    deadline = time.monotonic() + 10  # nobody flushes
    while not present(other, range(2_999, 3_000)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store.close()
    store.open()
    assert store.get_many([key(name) for name in range(-5, 3_000)]) == expected
    store.put(key(1), CachedReply("new"))
    assert store.flush()
    assert store.get_many([key(1)]) == {key(1): CachedReply("new")}
    assert store.stats().entries == 3_000


@settings(max_examples=30, deadline=None)
@example({key(1): "a\0b", key(2): "\ud800 \udfff", key(3): "", key(4): "é" * 5_000_000})
@given(st.dictionaries(st.binary(min_size=32, max_size=32), st.text(st.characters(codec=None), max_size=50)))
def test_any_text_is_returned_unchanged(texts: dict[bytes, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / CACHE_FILE, max_bytes=64 * MIB, ttl_s=None)
        store.open()
        with contextlib.closing(store):
            for name, text in texts.items():
                store.put(name, CachedReply(text))
            assert store.flush()
            assert store.get_many(list(texts)) == {name: CachedReply(text) for name, text in texts.items()}


def test_a_reply_above_the_bound_is_dropped_and_the_others_are_kept(opened: OpenStore) -> None:
    store = opened(max_bytes=MIB)
    for name, size in ((1, 0), (2, 2 * MIB), (3, 0)):
        store.put(key(name), reply(name, size))
    assert store.flush()
    assert present(store, range(1, 4)) == {1, 3}


FIRST_RELEASE = """
    CREATE TABLE replies (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, created_at REAL NOT NULL,
        used_at REAL NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL, text BLOB NOT NULL);
    CREATE INDEX replies_used ON replies (used_at, size, created_at);
    CREATE TABLE notes (name BLOB PRIMARY KEY NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;
    INSERT INTO notes VALUES (CAST('limiter' AS BLOB), x'3630');
    PRAGMA application_id = 1180125763;
    PRAGMA user_version = 1;
"""


def test_a_file_of_the_first_release_is_still_read_and_written(path: Path, opened: OpenStore) -> None:
    path.parent.mkdir()
    text = b"Score: 7"
    row = (key(1), NOW, NOW, 32 + len(text), zlib.crc32(text, zlib.crc32(key(1))), 10, 3, text)
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        conn.executescript("PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;" + FIRST_RELEASE)
        conn.execute("INSERT INTO replies VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    store = opened()
    assert store.get_many([key(1)]) == {key(1): CachedReply("Score: 7", 10, 3)}
    assert store.recall("limiter") == b"60"
    fill(store, range(2, 5))
    assert store.stats().entries == 4 and store.stats().set_aside == ()


def test_notes_are_recalled_at_once_after_reopening_and_by_other_stores(opened: OpenStore) -> None:
    store = opened()
    assert store.recall("https://judge") is None
    store.remember("https://judge", b"limit 60")
    assert store.recall("https://judge") == b"limit 60"
    store.remember("https://judge", b"limit 61\0")
    assert store.flush()
    assert opened().recall("https://judge") == b"limit 61\0"
    store.close()
    store.open()
    assert store.recall("https://judge") == b"limit 61\0"


# -- bounds --------------------------------------------------------------------------------------------------


def test_the_file_stays_within_its_bound_and_keeps_the_newest(path: Path, opened: OpenStore, clock: Clock) -> None:
    store = opened(max_bytes=2 * MIB, wall_clock=clock)
    for start in range(0, 10_000, 1_000):
        clock.now += 1
        fill(store, range(start, start + 1_000), size=600)
    store.close()
    assert path.stat().st_size <= 2 * MIB * 1.4  # one batch of 1,000 is written before eviction looks
    store.open()
    kept = present(store, range(10_000))
    assert kept >= set(range(9_000, 10_000))
    assert not kept & set(range(7_000))


def test_an_entry_that_is_used_outlives_one_that_is_not(opened: OpenStore, clock: Clock) -> None:
    store = opened(max_bytes=2 * MIB, wall_clock=clock)
    fill(store, range(1_000), size=600)
    clock.now += 3_600
    assert present(store, range(100)) == set(range(100))
    store.close()  # writes that they were used
    store.open()
    clock.now += 1
    for start in range(1_000, 3_000, 500):
        fill(store, range(start, start + 500), size=600)
    store.close()
    store.open()
    kept = present(store, range(1_000))
    assert kept >= set(range(100))
    assert len(kept) < 600


def test_reading_the_same_entries_again_and_again_does_not_write(path: Path, opened: OpenStore, clock: Clock) -> None:
    store = opened(wall_clock=clock)
    fill(store, range(100))
    log = path.with_name(f"{CACHE_FILE}-wal")
    before = log.stat().st_mtime_ns
    for _ in range(50):
        clock.now += 1
        present(store, range(100))
    assert store._touched == {}
    assert log.stat().st_mtime_ns == before


def test_large_replies_are_evicted_one_by_one(opened: OpenStore, clock: Clock) -> None:
    store = opened(max_bytes=20 * MIB, wall_clock=clock)
    for name in range(22):
        clock.now += 1
        fill(store, range(name, name + 1), size=MIB)
    store.close()
    store.open()
    assert len(present(store, range(22))) >= 17


def test_a_smaller_bound_shrinks_the_file_at_the_next_write(path: Path, opened: OpenStore) -> None:
    store = opened()
    fill(store, range(8_000), size=1_000)
    store.close()
    assert path.stat().st_size > 8 * MIB
    store = opened(max_bytes=2 * MIB)
    fill(store, range(8_000, 8_001))
    deadline = time.monotonic() + 10
    while path.stat().st_size > 2 * MIB * 1.3:  # eviction follows the write, and a checkpoint shrinks the file
        assert time.monotonic() < deadline
        store.put(key("more"), reply("more"))
        store.flush()
    store.close()
    assert path.stat().st_size <= 2 * MIB * 1.3


def test_replies_waiting_for_a_disk_are_bounded_and_the_oldest_are_dropped(
    tmp_path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WAITING_MAX_BYTES", MIB)
    (tmp_path / "file").write_text("in the way of a directory")
    store = opened(path=tmp_path / "file" / CACHE_FILE)
    for name in range(10_000):
        store.put(key(name), reply(name, 600))
    kept = present(store, range(10_000))
    assert 500 < len(kept) < 2_000
    assert kept == set(range(10_000 - len(kept), 10_000))
    assert sum("are dropped" in message for message in warnings_in(caplog)) == 1


# -- time ----------------------------------------------------------------------------------------------------


def test_an_expired_entry_is_a_miss_can_be_stored_again_and_is_removed_in_the_end(
    opened: OpenStore, clock: Clock
) -> None:
    store = opened(ttl_s=100.0, wall_clock=clock)
    fill(store, range(10))
    clock.now += 99
    assert present(store, range(10)) == set(range(10))
    clock.now += 2
    assert present(store, range(10)) == set()
    assert (store.stats().entries, store.stats().expired) == (10, 10)
    assert list(store.export()) == []
    fill(store, range(1))
    assert present(store, range(1)) == {0}
    store.close()
    store.open()
    fill(store, range(10, 11))  # the first write after opening removes expired entries
    store.close()
    store.open()
    assert store.stats().entries == 2
    forever = opened(ttl_s=None, wall_clock=clock)
    clock.now += 100 * 365 * 86_400
    assert present(forever, range(1)) == {0}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=8))
def test_a_clock_that_jumps_breaks_nothing(jumps: list[float]) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / CACHE_FILE, max_bytes=MIB, ttl_s=60.0, wall_clock=clock)
        store.open()
        with contextlib.closing(store):
            for name, jump in enumerate(jumps):
                clock.now += jump
                fill(store, range(name, name + 1))
                assert present(store, range(name, name + 1)) == {name}
                present(store, range(len(jumps)))
                store.stats()


# -- the end -------------------------------------------------------------------------------------------------


def open_files() -> set[str]:
    names = set()
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(f"{handle.name} {handle.readlink()}")
    return {name for name in names if "/proc/" not in name}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see open files")
def test_close_leaves_no_thread_no_open_file_and_no_log(path: Path) -> None:
    files, threads = open_files(), threading.active_count()
    store = Store(path, max_bytes=64 * MIB, ttl_s=None)
    store.open()
    for name in range(2_000):
        store.put(key(name), reply(name))
    present(store, range(10))
    store.close()
    store.close()
    assert open_files() == files
    assert threading.active_count() == threads
    assert {file.name for file in path.parent.iterdir()} == {CACHE_FILE, f"{CACHE_FILE}.lock"}


def test_a_closed_store_returns_nothing_keeps_nothing_and_raises_nothing(path: Path, opened: OpenStore) -> None:
    store = opened()
    fill(store, range(3))
    store.remember("a", b"1")
    store.close()
    Store(path.with_name("never-opened"), max_bytes=MIB, ttl_s=None).close()
    assert not path.with_name("never-opened").exists()
    store.put(key(9), reply(9))
    store.remember("b", b"2")
    assert present(store, range(10)) == set()
    assert store.recall("a") is None
    assert store.flush()
    with pytest.raises(CacheUnusableError, match="closed"):
        store.stats()


# -- for the command line ------------------------------------------------------------------------------------


def test_stats_describe_the_file(path: Path, opened: OpenStore, clock: Clock) -> None:
    store = opened(wall_clock=clock, ttl_s=50.0, max_bytes=5 * MIB)
    assert store.stats().oldest_at is None
    fill(store, range(10), size=100)
    clock.now += 60
    fill(store, range(10, 15), size=100)
    stats = store.stats()
    assert (stats.entries, stats.expired, stats.payload_bytes) == (15, 10, 15 * 132)
    assert (stats.oldest_at, stats.newest_at) == (NOW, NOW + 60)
    assert (stats.max_bytes, stats.ttl_s, stats.schema_version) == (5 * MIB, 50.0, 1)
    assert stats.path == str(path)
    assert stats.file_bytes >= stats.payload_bytes


def test_clear_removes_replies_by_age_or_all_keeps_notes_and_returns_the_space(
    path: Path, opened: OpenStore, clock: Clock
) -> None:
    store = opened(wall_clock=clock)
    fill(store, range(1_000), size=600)
    clock.now += 100
    fill(store, range(1_000, 6_000), size=600)
    assert store.clear(older_than_s=50) == 1_000
    assert present(store, range(2_000)) == set(range(1_000, 2_000))
    store.remember("a", b"1")
    assert store.flush()
    store.put(key("waiting"), reply("waiting"))
    assert store.clear() >= 5_000
    assert store.flush()
    assert store.get_many([key("waiting"), key(1)]) == {}
    assert store.recall("a") == b"1"
    assert store.clear() == 0
    store.close()
    assert path.stat().st_size < 100_000


def test_export_gives_each_reply_once_in_order_and_while_others_write(opened: OpenStore, clock: Clock) -> None:
    store = opened(wall_clock=clock)
    for start in range(0, 1_000, 100):
        fill(store, range(start, start + 100))
    other = opened(wall_clock=clock)
    exported = []
    for entry in store.export():
        json.dumps(entry)
        exported.append(entry)
        if len(exported) == 500:
            fill(other, range(2_000, 2_001))
    keys = [entry["key"] for entry in exported]
    assert len(keys) == len(set(keys)) == 1_001
    assert set(keys) >= {key(name).hex() for name in range(1_000)}
    by_key = {entry["key"]: entry for entry in exported}
    assert by_key[key(7).hex()] == {
        "key": key(7).hex(),
        "text": "score of 7",
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "created_at": NOW,
        "used_at": NOW,
    }


def test_export_of_large_replies_holds_few_at_a_time(opened: OpenStore) -> None:
    store = opened(max_bytes=256 * MIB)
    fill(store, range(60), size=MIB)
    tracemalloc.start()
    try:
        assert sum(1 for _ in store.export()) == 60
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB
    finally:
        tracemalloc.stop()
