"""`freewheel cache`: what is in the cache of replies, and what to do with it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

if TYPE_CHECKING:
    from freewheel.judge.store import Store, StoreStats

cache_app = typer.Typer(help="The replies that were paid for once: show, clear or export them.", no_args_is_help=True)

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_OF_A_JUDGE = ("expired", "max_bytes", "ttl_s")
"""Not reported here: each judge has bounds of its own, and the file does not know them."""
_NO_BOUND_BYTES = sys.maxsize
"""Nothing is put by these commands, so nothing is ever removed for a bound."""

CacheDir = Annotated[
    str | None,
    typer.Option("--cache-dir", metavar="DIR", help="Where it lies, if not in $FREEWHEEL_CACHE_DIR or ~/.cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout.")]


@cache_app.command("stats")
def stats(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Show how many replies there are, and how much room they take."""
    from freewheel.cli.console import plain_errors, print_json, print_text

    with plain_errors(), _store(cache_dir) as (store, path):
        found = store.stats() if path.exists() else None
        if as_json:
            import msgspec

            known = msgspec.to_builtins(found) if found is not None else {"path": str(path), "entries": 0}
            print_json({key: value for key, value in known.items() if key not in _OF_A_JUDGE})
        else:
            print_text(_describe(found) if found is not None else f"{path}: there is no cache yet")


@cache_app.command("clear")
def clear(
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Only replies stored longer ago: 90s, 30m, 12h, 7d, 2w."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove replies. They will be asked for, and paid for, again."""
    from freewheel.cli.console import plain_errors, print_json, print_text
    from freewheel.errors import ConfigError

    with plain_errors(), _store(cache_dir) as (store, path):
        age_s = parse_age_s(older_than) if older_than is not None else None
        removed = 0
        if path.exists():
            if not yes:
                if not sys.stdin.isatty():
                    raise ConfigError("--yes", False, "nobody can be asked here; add --yes to remove replies")
                which = f"replies older than {older_than}" if older_than else f"all {store.stats().entries:,} replies"
                typer.confirm(f"Remove {which} from {path}?", abort=True, err=True)
            removed = store.clear(older_than_s=age_s)
        if as_json:
            print_json({"path": str(path), "removed": removed})
        else:
            print_text(f"{path}: {removed:,} replies removed")


@cache_app.command("export")
def export(
    target: Annotated[str, typer.Argument(metavar="FILE", help="Where the JSON lines go; - is stdout.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE where it exists.")] = False,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Write every reply, however old, as a JSON line: key, text, tokens, times."""
    from freewheel.cli.console import plain_errors, print_json, say, writing_stdout
    from freewheel.errors import ConfigError

    with plain_errors(), _store(cache_dir) as (store, path):
        if as_json and target == "-":
            raise ConfigError("--json", True, "stdout takes the replies already; write them to a file")
        entries: Iterator[dict[str, object]] = store.export() if path.exists() else iter(())
        if target == "-":
            with writing_stdout():
                _write_lines(sys.stdout.buffer, entries)
            return
        try:
            count = _write_file(target, entries, overwrite=overwrite)
        except OSError as error:
            raise ConfigError("FILE", target, f"it cannot be written: {error.strerror}") from None
    if as_json:
        print_json({"path": str(path), "exported": count, "file": target})
    else:
        say(f"{count:,} replies written to {target}")


def _write_file(target: str, entries: Iterator[dict[str, object]], *, overwrite: bool) -> int:
    """To a device or a FIFO as it is. A file is written beside, for this user alone, and then takes its place.

    A link is followed: what it leads to is written, and the link stays.
    """
    from freewheel.errors import ConfigError

    try:
        is_file = stat.S_ISREG(Path(target).stat().st_mode)
    except FileNotFoundError:
        pass
    else:
        if not is_file:
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CLOEXEC), "wb") as stream:
                return _write_lines(stream, entries)
        if not overwrite:
            raise ConfigError("FILE", target, "it exists already; give another file, or --overwrite to replace it")
    path = Path(target).resolve()
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")  # its mode is 0600
    part = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            count = _write_lines(file, entries)
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def _write_lines(file: BinaryIO, entries: Iterator[dict[str, object]]) -> int:
    import msgspec

    encode, count = msgspec.json.Encoder().encode, 0
    for entry in entries:
        file.write(encode(_encodable(entry)) + b"\n")
        count += 1
    file.flush()
    return count


def parse_age_s(text: str) -> float:
    """`7d` as seconds."""
    from freewheel.errors import ConfigError

    try:
        age_s = float(text[:-1]) * _UNITS_S[text[-1:]]
    except (ValueError, KeyError):
        raise ConfigError("--older-than", text, "give a number and s, m, h, d or w, as in 7d") from None
    if not 0 <= age_s < float("inf"):
        raise ConfigError("--older-than", text, "give an age of 0 or more")
    return age_s


@contextlib.contextmanager
def _store(configured: str | None) -> Iterator[tuple[Store, Path]]:
    from freewheel.judge.cache import CACHE_FILE, cache_dir
    from freewheel.judge.store import Store

    path = cache_dir(configured) / CACHE_FILE
    store = Store(path, max_bytes=_NO_BOUND_BYTES, ttl_s=None)
    try:
        yield store, path
    finally:
        store.close()


def _describe(found: StoreStats) -> str:
    import datetime

    def when(at: float | None) -> str:
        return datetime.datetime.fromtimestamp(at).isoformat(" ", "seconds") if at is not None else "-"

    lines = [
        ("file", found.path),
        ("replies", f"{found.entries:,}"),
        ("text", f"{found.payload_bytes / 1e6:,.1f} MB"),
        ("on disk", f"{found.file_bytes / 1e6:,.1f} MB"),
        ("stored", f"{when(found.oldest_at)} to {when(found.newest_at)}"),
        *(("set aside", name) for name in found.set_aside),
    ]
    return "\n".join(f"{name:<10}{value}" for name, value in lines)


def _encodable(entry: dict[str, object]) -> dict[str, object]:
    """A judge may have sent a lone surrogate, which UTF-8 cannot carry."""
    text = entry["text"]
    assert isinstance(text, str)
    return entry if text.isascii() else {**entry, "text": text.encode("utf-8", "replace").decode()}
