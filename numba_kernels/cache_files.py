"""A cache on disk whose files are found by content: the base of the caches of kernels and of translated kernels.

    <XDG_CACHE_HOME or ~/.cache>/xserv/<cache>/<digest of the sources>/<file>

A file is one line of JSON, which holds a digest of the rest, and bytes. Folders are the user's alone (0700), files
too (0600). A file is written beside and renamed, so that any number of processes may do so at once; a file whose digest
does not match counts as absent. If the disk cannot be written, a warning is logged, and code lies in a folder of this
process and those that it starts, which goes with it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import DeviceError

logger = logging.getLogger("xserv.cache")

TEMPORARY = "XSERV_TEMPORARY_CACHE"
"""The environment variable with the replacement of a folder that cannot be written."""

PROBE_BYTES = 1 << 20
PARTIAL = ".partial"
LOCK = ".lock"
UNUSED_DAYS = 30
_GENERATION = re.compile(r"[0-9a-f]{16}")


def cache_root(cache: str) -> Path:
    """``$XDG_CACHE_HOME/xserv/<cache>``, or the same below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "xserv" / cache


def refuse_foreign(folder: Path) -> None:
    """Raises DeviceError where others could have written into a folder; a missing one is fine."""
    try:
        status = folder.stat()
    except OSError:
        return
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise DeviceError(
            f"kernel cache {folder}: others may write into it (owner {status.st_uid}, mode "
            f"{status.st_mode & 0o777:o}), and what lies there is executed: chmod 700 it, or name another by "
            "XDG_CACHE_HOME"
        )


def read_entry(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """A file's facts and bytes; None where there is no such file, or it is not whole."""
    try:
        line, _, content = path.read_bytes().partition(b"\n")
        facts = json.loads(line)
        if facts.pop("sha256") != hashlib.sha256(content).hexdigest():
            return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return facts, content


def write_entry(path: Path, facts: dict[str, Any], content: bytes) -> None:
    """Puts a file in its place. If the write fails, the next process makes it again."""
    line = json.dumps(facts | {"sha256": hashlib.sha256(content).hexdigest()}).encode()
    partial = None
    try:
        open_generation(path.parent)
        number, partial = tempfile.mkstemp(suffix=PARTIAL, dir=path.parent)  # mode 0600
        with os.fdopen(number, "wb") as file:
            file.write(line + b"\n" + content)
        os.replace(partial, path)
    except OSError as error:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        warn_of_no_cache(path.parent, error)


def warn_of_no_cache(folder: Path, error: OSError) -> None:
    """Logs the warning once in a process and those that it starts."""
    if not _warned and TEMPORARY not in os.environ:
        _warned.append(folder)
        logger.warning(
            "the cache %s cannot be written (%s): what is compiled now is compiled again at the next start; "
            "set XDG_CACHE_HOME to another folder",
            folder,
            error.strerror or error,
        )


_warned: list[Path] = []


def temporary_folder(folder: Path, error: OSError) -> Path:
    """The replacement of a folder that cannot be made or written: below a folder that this process and those that it
    starts have, so that they share what they compile. It goes when the first of them ends."""
    if TEMPORARY not in os.environ:
        warn_of_no_cache(folder, error)
        root = tempfile.mkdtemp(prefix="xserv-cache-")
        os.environ[TEMPORARY] = root
        atexit.register(_remove, root, os.getpid())
    there = Path(os.environ[TEMPORARY], folder.parent.name, folder.name)
    there.mkdir(mode=0o700, parents=True, exist_ok=True)
    return there


def _remove(root: str, process_id: int) -> None:
    if os.getpid() == process_id:  # no forked child
        shutil.rmtree(root, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Raises OSError where a new folder takes no files: its disk is full, its quota used up."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))


def open_generation(folder: Path) -> None:
    """Makes the folder of the present sources, if missing; then deletes those of other sources that were not used for
    UNUSED_DAYS. Raises OSError where it cannot be made."""
    if folder.is_dir():
        return
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    oldest = time.time() - UNUSED_DAYS * 86400
    for other in folder.parent.iterdir():
        if _GENERATION.fullmatch(other.name) and other.is_dir() and other.stat().st_mtime < oldest:
            shutil.rmtree(other, ignore_errors=True)


def mark_used(folder: Path) -> None:
    """Marks a folder of some sources as in use, by its time, which `open_generation` checks."""
    with contextlib.suppress(OSError):
        os.utime(folder)


@contextmanager
def locked(path: Path, *, is_waiting: bool = True) -> Iterator[bool]:
    """Lets other makers of the same file, in any process, wait until this is left; they then find it.

    Without `is_waiting` it yields False if another holder has the lock. Without locks (a read-only folder, a file
    system without locks) the same file may be made twice.
    """
    number = None
    lock = path.with_name(path.name + LOCK)
    try:
        open_generation(path.parent)
        number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(number, fcntl.LOCK_EX if is_waiting else fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_held, is_busy = True, False
    except OSError as error:
        is_held, is_busy = False, isinstance(error, BlockingIOError)
    try:
        yield not is_busy
    finally:
        if is_held:
            lock.unlink(missing_ok=True)  # a waiter has the file open, and finds the work done
        if number is not None:
            os.close(number)
