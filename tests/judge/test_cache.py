"""The memory cache, compared with a model, and the store with real files. Failures are in `test_cache_troubles`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freewheel.judge import JudgeConfig, Usage
from freewheel.judge import cache as cache_module
from freewheel.judge.cache import CACHE_FILE, CachedReply, CacheUnusableError, MemoryCache, ReplyCache, Store, cache_dir
from freewheel.judge.outcome import Reply

from .helpers import MIB, NOW, Clock, OpenStore, fill, key, open_fds, present, reply, warnings_in


@example(max_bytes=500, steps=[(True, "a", 0)])
@given(
    max_bytes=st.integers(0, 3_000),
    steps=st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefg"), st.integers(0, 1_500)), max_size=60),
)
def test_the_memory_cache_behaves_like_a_list_in_order_of_use(
    max_bytes: int, steps: list[tuple[bool, str, int]]
) -> None:
    cache = MemoryCache(max_bytes)
    model: list[tuple[str, CachedReply]] = []
    for putting, name, length in steps:
        known = [pair for pair in model if pair[0] == name]
        model = [pair for pair in model if pair[0] != name]
        if putting:
            value = CachedReply("é" * length if length % 2 else "x" * length)
            cache.put(name.encode(), value)
            model += [(name, value)] if value.memory_bytes <= max_bytes else []
            while sum(reply.memory_bytes for _, reply in model) > max_bytes:
                del model[0]
        else:
            assert cache.get(name.encode()) is (known[0][1] if known else None)
            model += known
        assert cache.bytes == sum(reply.memory_bytes for _, reply in model)


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        ("~/mine", {"FREEWHEEL_CACHE_DIR": "/env", "XDG_CACHE_HOME": "/xdg"}, "/home/me/mine"),
        (None, {"FREEWHEEL_CACHE_DIR": "/env", "XDG_CACHE_HOME": "/xdg"}, "/env"),
        (None, {"XDG_CACHE_HOME": "/xdg"}, "/xdg/freewheel"),
        (None, {"XDG_CACHE_HOME": "relative/is/ignored"}, "/home/me/.cache/freewheel"),
        (None, {}, "/home/me/.cache/freewheel"),
    ],
)
def test_the_directory_is_configured_or_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, environment: dict[str, str], expected: str
) -> None:
    for name in ("FREEWHEEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache_dir(configured) == Path(expected)


def test_the_directory_and_every_file_in_it_are_private(path: Path, opened: OpenStore) -> None:
    opened().close()
    path.chmod(0o644)
    fill(opened(), range(3))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == dict.fromkeys([CACHE_FILE + suffix for suffix in ("", "-wal", "-shm", ".lock")], 0o600)


# -- replies and notes ---------------------------------------------------------------------------------------


def test_a_put_is_found_at_once_and_soon_by_others_and_the_last_of_two_wins(tmp_path: Path, opened: OpenStore) -> None:
    path = tmp_path / "a ?b#c%20d&é" / CACHE_FILE  # characters that mean something in a URI
    store, other = opened(path=path), opened(path=path)
    store.put(key(1), CachedReply("first"))
    for name in range(3_000):
        store.put(key(name), reply(name))
    expected = {key(name): reply(name) for name in range(3_000)}
    assert store.get_many(list(expected)) == expected
    assert store.flush()
    assert present(other, range(3_000)) == set(range(3_000))
    store.put(key(1), CachedReply("new"))
    store.close()
    expected[key(1)] = CachedReply("new")
    store = opened(path=path)
    assert store.get_many([key(name) for name in range(-5, 3_000)]) == expected
    assert store.stats().entries == 3_000


def test_a_put_during_the_write_of_its_key_is_written_next(opened: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = opened(), cache_module._write
    late = [CachedReply("second")]

    def write_and_put(*arguments: Any) -> None:
        write(*arguments)
        if late:
            store.put(key(1), late.pop())

    monkeypatch.setattr(cache_module, "_write", write_and_put)
    store.put(key(1), CachedReply("first"))
    assert store.flush()
    assert opened().get_many([key(1)]) == {key(1): CachedReply("second")}


@pytest.mark.parametrize(("settings", "keeps"), [({}, True), ({"cache_ttl_s": 9.0}, False), ({"cache": False}, True)])
def test_a_reply_with_a_lifetime_is_not_kept_in_memory(tmp_path: Path, settings: dict[str, Any], keeps: bool) -> None:
    """Only the file knows the age of a reply."""
    config = JudgeConfig(endpoint="http://h", model="m", cache_dir=str(tmp_path), **settings)
    cache = ReplyCache(config)
    with contextlib.closing(cache):
        cache.keep(key(1), Reply("7", Usage(10, 1)))
        assert (cache.in_memory(key(1)) is not None) == keeps
        assert bool(cache.on_disk([key(1)])) == config.cache


@settings(max_examples=30, deadline=None)
@example({key(1): "a\0b", key(2): "\ud800 \udfff", key(3): "", key(4): "é" * 5_000_000})
@given(st.dictionaries(st.binary(min_size=32, max_size=32), st.text(st.characters(codec=None), max_size=50)))
def test_any_text_is_returned_unchanged(texts: dict[bytes, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / CACHE_FILE, max_bytes=64 * MIB, ttl_s=None)
        with contextlib.closing(store):
            for name, text in texts.items():
                store.put(name, CachedReply(text))
            assert store.flush()
            assert store.get_many(list(texts)) == {name: CachedReply(text) for name, text in texts.items()}


def test_the_secret_of_the_codes_is_kept_in_the_file_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    def secret(**settings: Any) -> bytes:
        config = JudgeConfig(endpoint="http://h", model="m", cache_dir=str(tmp_path), **settings)
        with contextlib.closing(ReplyCache(config)) as cache:
            return cache.secret()

    found = [secret() for _ in range(2)]
    for damage in ("5", "x''"):
        with contextlib.closing(sqlite3.connect(tmp_path / CACHE_FILE)) as conn, conn:
            assert conn.execute(f"UPDATE notes SET value = {damage}").rowcount == 1
        found += [secret() for _ in range(2)]
    assert found[0::2] == found[1::2] and secret(cache=False) not in found
    assert len(set(found)) == 3 and {len(one) for one in found} == {32}


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


# -- bounds --------------------------------------------------------------------------------------------------


def test_the_file_stays_within_its_bound_and_keeps_what_is_new_or_in_use(
    path: Path, opened: OpenStore, clock: Clock
) -> None:
    store = opened(max_bytes=2 * MIB, wall_clock=clock)
    fill(store, range(100), size=600)
    clock.now += 1
    fill(store, range(100, 1_000), size=600)
    store.put(key("large"), reply("large", 2 * MIB))  # cannot be kept, and drives out no other
    clock.now += 3_600
    assert present(store, range(100)) == set(range(100))
    store.close()  # writes that they were used
    store = opened(max_bytes=2 * MIB, wall_clock=clock)
    clock.now += 1
    for start in range(1_000, 3_000, 500):
        fill(store, range(start, start + 500), size=600)
    store.close()
    assert path.stat().st_size <= 2 * MIB * 1.4  # one batch is written before eviction looks
    store = opened(max_bytes=2 * MIB, wall_clock=clock)
    kept = present(store, range(3_000))
    assert kept >= set(range(100)) | set(range(2_500, 3_000))
    assert len(kept & set(range(1_000))) < 600
    assert store.get_many([key("large")]) == {}


def test_reading_the_same_entries_again_and_again_does_not_write(path: Path, opened: OpenStore, clock: Clock) -> None:
    store = opened(wall_clock=clock)
    fill(store, range(100))
    log = path.with_name(f"{CACHE_FILE}-wal")
    before = log.stat().st_mtime_ns
    for _ in range(50):
        clock.now += 1
        present(store, range(100))
    store.remember("a", b"1")
    assert log.stat().st_mtime_ns == before and store.flush() and log.stat().st_mtime_ns > before
    assert {entry["used_at"] for entry in store.export()} == {NOW}


def test_replies_waiting_for_a_disk_are_bounded_and_the_oldest_are_dropped(
    tmp_path: Path, opened: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "WAITING_MAX_BYTES", MIB)
    (tmp_path / "file").write_text("in the way of a directory")
    store = opened(path=tmp_path / "file" / CACHE_FILE)
    for name in range(10_000):
        store.put(key(name), reply(name, 600))
    kept = present(store, range(10_000))
    assert 500 < len(kept) < 2_000
    assert kept == set(range(10_000 - len(kept), 10_000))
    assert sum("are dropped" in message for message in warnings_in(caplog)) == 1


def test_an_expired_entry_is_a_miss_and_can_be_stored_again(opened: OpenStore, clock: Clock) -> None:
    store = opened(ttl_s=100.0, wall_clock=clock)
    fill(store, range(10))
    clock.now += 99
    assert present(store, range(10)) == set(range(10))
    clock.now += 2
    assert present(store, range(10)) == set()
    assert store.stats().entries == 10
    assert list(store.export()) == []
    fill(store, range(1))
    assert present(store, range(10)) == {0}
    clock.now += 100 * 365 * 86_400
    assert present(opened(ttl_s=None, wall_clock=clock), range(10)) == set(range(10))


# -- the end -------------------------------------------------------------------------------------------------


def test_close_leaves_no_thread_no_open_file_and_no_log(path: Path) -> None:
    files, threads = open_fds(), threading.active_count()
    store = Store(path, max_bytes=64 * MIB, ttl_s=None)
    store.open()
    fill(store, range(2_000))
    present(store, range(10))
    store.stats()
    store.close()
    store.close()
    assert (open_fds(), threading.active_count()) == (files, threads)
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
    store = opened(wall_clock=clock, ttl_s=50.0)
    assert store.stats().oldest_at is None
    fill(store, range(10), size=100)
    clock.now += 60
    fill(store, range(10, 15), size=100)
    stats = store.stats()
    assert (stats.entries, stats.payload_bytes, stats.schema_version) == (15, 15 * 132, 1)
    assert (stats.oldest_at, stats.newest_at) == (NOW, NOW + 60)
    assert stats.path == str(path)
    assert stats.file_bytes >= stats.payload_bytes


def test_clear_removes_replies_by_age_or_all_keeps_notes_and_returns_the_space(
    path: Path, opened: OpenStore, clock: Clock
) -> None:
    store = opened(wall_clock=clock)
    store.remember("a", b"1")
    fill(store, range(1_000), size=600)
    clock.now += 100
    fill(store, range(1_000, 6_000), size=600)
    assert store.clear(older_than_s=50) == 1_000
    assert present(store, range(2_000)) == set(range(1_000, 2_000))
    assert (store.clear(), store.clear()) == (5_000, 0)
    assert present(store, range(6_000)) == set()
    assert store.recall("a") == b"1"
    store.close()
    assert path.stat().st_size < 100_000


def test_export_gives_each_reply_once_in_order_and_while_others_write(opened: OpenStore, clock: Clock) -> None:
    store, other = opened(wall_clock=clock), opened(wall_clock=clock)
    for start in range(0, 1_000, 100):
        fill(store, range(start, start + 100))
    exported = []
    for entry in store.export():
        json.dumps(entry)
        exported.append(entry)
        if len(exported) == 500:
            fill(other, range(2_000, 2_001))
    by_key = {entry["key"]: entry for entry in exported}
    assert len(by_key) == len(exported) == 1_001
    assert by_key.keys() == {key(name).hex() for name in (*range(1_000), 2_000)}
    assert by_key[key(7).hex()] == {
        "key": key(7).hex(),
        "text": "score of 7",
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "created_at": NOW,
        "used_at": NOW,
    }
