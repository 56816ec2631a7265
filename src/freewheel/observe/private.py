"""Folders and files that only their owner can read, whatever the umask is.

A run directory holds prompts, responses, verdicts and settings, and lies where others may look. Everybody who creates
something in one calls this: the lock, the configuration, the log, the metrics, the journal, the checkpoints.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
"""Also of files in a private folder: a folder that the user made before is left as open as it is."""


def private_folder(path: str | os.PathLike[str]) -> Path:
    """Makes it, with parents as usual. One that is there stays as it is: who may look in is its owner's to say."""
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return folder
    folder.chmod(FOLDER_MODE)  # a umask takes bits away, its own user's too
    return folder


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a file, which is made if it is not there. A link is refused with an `OSError`: in a run directory
    that somebody handed over it may lead to any file of the user's. (One to a device, `/dev/null`, does no harm.)"""
    try:
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        if Path(path).is_symlink() and not Path(path).is_char_device():
            why = "it is a link, which may lead out of the run directory: remove it"
            raise OSError(errno.ELOOP, why, os.fspath(path)) from None
        return os.open(path, flags | os.O_CLOEXEC)
    os.fchmod(made, FILE_MODE)
    return made
