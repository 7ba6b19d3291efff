"""Pages that lie elsewhere than in an engine's memory, found by a key of all that they depend on.

A page is stored under the key of its prefix: a cryptographic hash of a root (model, arithmetic, salt) and of all tokens
up to the page's end. `PageStore` is what the engine knows of such a place; `DiskPages` is a folder of files.

A file holds pages of one pool, plane by plane, after a header with their keys, tokens and checksums. It is written
under another name, synchronised and renamed, by a thread of its own, so that it exists whole or not at all; it is never
changed afterwards. Several processes may use a folder: each sees the others' files, and a file that another one deletes
is a miss. The least recently used files go first. A file that cannot be read, or differs from its header, is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import logging
import os
import queue
import stat
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidArgumentError

logger = logging.getLogger("xserv.engine")

_MAGIC = b"xspages1"
_HEAD = struct.Struct("<8sQQ32s")  # magic, bytes of the header, bytes of the file, digest of the header
_ALIGNMENT = 4096
_SUFFIX = ".pages"
_UNFINISHED = ".tmp"
_OLD_S = 600.0
"""An unfinished file of this age belongs to no process that still writes it."""
_REST_S = 30.0
"""Seconds without writes after the disk was full."""

MOST_QUEUED_BYTES = 256 << 20
"""Bytes that wait to be written."""

Fill = Callable[[int, NDArray[np.uint8]], None]
"""Reads pages of a plane, by its number, into ``[num_pages, page_bytes]``."""


class PageName(msgspec.Struct, frozen=True, array_like=True):
    """A page's key, that of the page before it, and its tokens as bytes, which are compared."""

    key: bytes
    parent: bytes
    tokens: bytes


class PageLostError(OSError):
    """A page that was found cannot be read any more."""


class PageRun(NamedTuple):
    """``num_pages`` pages that lie side by side in one file, from ``row`` on."""

    file: str
    row: int
    num_pages: int


class PageStore(Protocol):
    """Pages by key. Methods are called by the engine's loop alone, and never wait for a write."""

    def refresh(self) -> None:
        """Notice what others have stored or dropped."""
        ...

    def find(self, keys: Sequence[bytes]) -> list[PageName | None]:
        """The pages of these keys; None for each that there is none of."""
        ...

    def inside(self, parent: bytes) -> list[PageName]:
        """The pages after ``parent``."""
        ...

    def latest(self, most: int) -> list[PageName]:
        """``most`` pages, about, that were used last, these first."""
        ...

    def runs(self, keys: Sequence[bytes]) -> list[PageRun]:
        """The places of pages that were found, in their order."""
        ...

    def read(self, run: PageRun, take: Callable[[Fill], None]) -> None:
        """Calls ``take`` with a function that reads the run's planes. Raises PageLostError if any of them is gone or
        not what was stored."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether it takes pages to `write`."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether it surely has no page."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether more pages may be handed to `write`."""
        ...

    def write(self, pool: int, names: Sequence[PageName], planes: Sequence[NDArray[np.uint8]]) -> None:
        """Stores pages of a pool, ``[num_pages, page_bytes]`` by plane; the arrays are kept."""
        ...

    def close(self, timeout_s: float | None = None) -> int:
        """Waits until what was handed over is written, at most so long if a time is given. Returns the bytes that
        are not."""
        ...


class _Header(msgspec.Struct, array_like=True):
    pool: int
    page_bytes: list[int]
    sums: list[int]
    names: list[PageName]


class _File(NamedTuple):
    data_start: int
    size_bytes: int
    header: _Header


class DiskPages:
    """See `PageStore`; a folder of files, below one of the same fingerprint.

    Args:
        root: of all models' pages; made if it is absent, for its owner alone.
        fingerprint: of all that makes a page's bits beside its tokens.
        max_bytes: of all files below ``root``.
        page_bytes: by pool: bytes of each plane's page.

    Raises InvalidArgumentError if the folder cannot be used, or others may read or write it.
    """

    def __init__(self, root: Path, fingerprint: str, max_bytes: int, page_bytes: Sequence[Sequence[int]]) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._folder = root / fingerprint
        self._page_bytes = [list(sizes) for sizes in page_bytes]
        make_private(root)
        make_private(self._folder)
        self._files: dict[str, _File] = {}
        self._places: dict[bytes, dict[str, int]] = {}  # rows by key and file: two processes may have written one page
        self._after: dict[bytes, dict[bytes, None]] = {}  # keys by their parent's
        self._unusable: set[str] = set()
        self._seen_ns = -1
        self._lock = threading.Lock()  # of all of these
        self._queue: queue.SimpleQueue[tuple[int, Sequence[PageName], Sequence[NDArray[np.uint8]]] | None]
        self._queue = queue.SimpleQueue()
        self._queued_bytes = 0
        self._rests_until_s = 0.0
        self._listed: dict[str, tuple[float, int, str]] = {}  # the writer's: use, bytes, path of every finished file
        self._drop_unfinished()
        self.refresh()
        self._writer = threading.Thread(target=self._write_all, name="xserv-pages", daemon=True)
        self._writer.start()

    def refresh(self) -> None:
        """See `PageStore`."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except OSError:
            changed_ns = -1
        if changed_ns == self._seen_ns:
            return
        try:
            names = {each.name for each in os.scandir(self._folder) if each.name.endswith(_SUFFIX)}
        except OSError:
            names = set()
        with self._lock:
            # A change within the clock's grain of this one would look the same: look again the next time.
            is_settled = time.time_ns() - changed_ns > 50_000_000
            self._seen_ns = changed_ns if is_settled else -1
            for name in self._files.keys() - names:
                self._forget(name)
            self._unusable &= names
            unknown = names - self._files.keys() - self._unusable
        for name in sorted(unknown):
            found = self._read_header(self._folder / name)
            with self._lock:
                if found is None:
                    self._unusable.add(name)
                else:
                    self._note(name, found)

    def num_pages(self) -> list[int]:
        """By pool: the pages that are stored."""
        with self._lock:
            counts = [0] * len(self._page_bytes)
            for file in self._files.values():
                counts[file.header.pool] += len(file.header.names)
        return counts

    def find(self, keys: Sequence[bytes]) -> list[PageName | None]:
        """See `PageStore`."""
        with self._lock:
            return [self._name(key) if key in self._places else None for key in keys]

    def inside(self, parent: bytes) -> list[PageName]:
        """See `PageStore`."""
        with self._lock:
            return [self._name(key) for key in self._after.get(parent, ())]

    def latest(self, most: int) -> list[PageName]:
        """See `PageStore`. The pages of a file count as used together."""
        with self._lock:
            files = {name: file.header.names for name, file in self._files.items()}
        used_s: dict[str, float] = {}
        for name in files:
            with contextlib.suppress(OSError):  # it is gone
                used_s[name] = os.stat(self._folder / name, follow_symlinks=False).st_mtime
        found: list[PageName] = []
        for name in sorted(used_s, key=lambda each: used_s[each], reverse=True):
            if len(found) >= most:
                break
            found += reversed(files[name])
        return found

    def runs(self, keys: Sequence[bytes]) -> list[PageRun]:
        """See `PageStore`."""
        found: list[PageRun] = []
        file, first, count = "", 0, 0
        with self._lock:
            for key in keys:
                place, row = self._place(key)
                if count and (place, row) == (file, first + count):
                    count += 1
                    continue
                if count:
                    found.append(PageRun(file, first, count))
                file, first, count = place, row, 1
        return [*found, PageRun(file, first, count)] if count else found

    def read(self, run: PageRun, take: Callable[[Fill], None]) -> None:
        """See `PageStore`. The file counts as used."""
        with self._lock:
            file = self._files.get(run.file)
        if file is None:
            raise PageLostError(f"{run.file} is gone")
        rows, sizes = slice(run.row, run.row + run.num_pages), file.header.page_bytes
        sums = np.zeros(run.num_pages, np.uint64)
        try:
            descriptor = os.open(self._folder / run.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:

                def fill(plane: int, pages: NDArray[np.uint8]) -> None:
                    first = file.data_start + sum(sizes[:plane]) * len(file.header.names) + run.row * sizes[plane]
                    if os.preadv(descriptor, [pages.reshape(-1).data], first) != pages.nbytes:
                        raise PageLostError(f"{run.file} is shorter than it was")
                    sums[:] += _sums(pages)

                take(fill)
                os.utime(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._drop(run.file)
            raise PageLostError(f"{run.file} cannot be read: {error}") from error
        if sums.tolist() != file.header.sums[rows]:
            self._drop(run.file)
            raise PageLostError(f"{run.file} has other bytes than were written")

    keeps = True
    is_empty = False

    @property
    def has_room(self) -> bool:
        """See `PageStore`."""
        return self._queued_bytes < MOST_QUEUED_BYTES and time.monotonic() >= self._rests_until_s

    def write(self, pool: int, names: Sequence[PageName], planes: Sequence[NDArray[np.uint8]]) -> None:
        """See `PageStore`."""
        with self._lock:
            self._queued_bytes += sum(plane.nbytes for plane in planes)
        self._queue.put((pool, names, planes))

    def close(self, timeout_s: float | None = None) -> int:
        """See `PageStore`. A file that is unfinished by then is deleted at a later start."""
        if self._writer.is_alive():
            self._queue.put(None)
            self._writer.join(timeout_s)
        return self._queued_bytes

    # The writer's thread.

    def _write_all(self) -> None:
        while (job := self._queue.get()) is not None:
            pool, names, planes = job
            try:
                if time.monotonic() >= self._rests_until_s:
                    self._write_file(pool, list(names), planes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._rests_until_s = time.monotonic() + _REST_S
                logger.warning("pages could not be written to %s: %s", self._folder, error.strerror or error)
            except Exception:  # no answer needs this file, and without this thread the queue would stay full
                logger.exception("pages could not be written to %s", self._folder)
            with self._lock:
                self._queued_bytes -= sum(plane.nbytes for plane in planes)

    def _write_file(self, pool: int, names: list[PageName], planes: Sequence[NDArray[np.uint8]]) -> None:
        sums = np.zeros(len(names), np.uint64)
        for plane in planes:
            sums += _sums(plane)
        header = _Header(pool, [plane.shape[1] for plane in planes], sums.tolist(), names)
        encoded = msgspec.msgpack.encode(header)
        data_start = _data_start(len(encoded))
        size = data_start + sum(plane.nbytes for plane in planes)
        if not self._make_room(size):
            return
        head = _HEAD.pack(_MAGIC, len(encoded), size, hashlib.sha256(encoded).digest())
        name = uuid.uuid4().hex
        unfinished = self._folder / (name + _UNFINISHED)
        try:
            start = (head + encoded).ljust(data_start, b"\0")
            write_private(unfinished, start, *(plane.data for plane in planes))
            os.rename(unfinished, self._folder / (name + _SUFFIX))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        with self._lock:
            self._note(name + _SUFFIX, _File(data_start, size, header))

    def _make_room(self, size: int) -> bool:
        """Deletes the least recently used files until so many bytes fit. False if they never do."""
        if size > self._max_bytes:
            return False
        total = self._list() + sum(num_bytes for _, num_bytes, _ in self._listed.values())
        by_use = list(self._listed.values())
        heapq.heapify(by_use)
        while by_use and total + size > self._max_bytes:
            used_s, num_bytes, path = heapq.heappop(by_use)
            with contextlib.suppress(FileNotFoundError):
                latest_s = os.stat(path, follow_symlinks=False).st_mtime
                if latest_s != used_s:  # it was read since it was listed
                    self._listed[path] = (latest_s, num_bytes, path)
                    heapq.heappush(by_use, self._listed[path])
                    continue
                os.unlink(path)
            total -= num_bytes
        return total + size <= self._max_bytes

    def _list(self) -> int:
        """Brings `_listed` up to date, asking for the sizes of new files alone. Returns the bytes of unfinished
        files."""
        listed: dict[str, tuple[float, int, str]] = {}
        num_unfinished = 0
        folders = [str(self._root), *(each.path for each in os.scandir(self._root) if each.is_dir())]
        for folder in folders:
            with contextlib.suppress(OSError):
                for each in os.scandir(folder):
                    with contextlib.suppress(OSError):
                        if each.name.endswith(_UNFINISHED):
                            num_unfinished += each.stat(follow_symlinks=False).st_size
                        elif each.path in self._listed:
                            listed[each.path] = self._listed[each.path]
                        elif each.name.endswith(_SUFFIX):
                            found = each.stat(follow_symlinks=False)
                            listed[each.path] = (found.st_mtime, found.st_size, each.path)
        self._listed = listed
        return num_unfinished

    # The index. The lock is held, but for `_drop`.

    def _place(self, key: bytes) -> tuple[str, int]:
        """The first file with this page, and its row."""
        return next(iter(self._places[key].items()))

    def _name(self, key: bytes) -> PageName:
        file, row = self._place(key)
        return self._files[file].header.names[row]

    def _note(self, name: str, file: _File) -> None:
        self._files[name] = file
        for row, page in enumerate(file.header.names):
            self._places.setdefault(page.key, {}).setdefault(name, row)
            self._after.setdefault(page.parent, {})[page.key] = None

    def _forget(self, name: str) -> None:
        file = self._files.pop(name, None)
        for page in () if file is None else file.header.names:
            places = self._places.get(page.key, {})
            if places.pop(name, None) is not None and not places:
                del self._places[page.key]
                siblings = self._after[page.parent]
                del siblings[page.key]
                if not siblings:
                    del self._after[page.parent]

    def _drop(self, name: str) -> None:
        """It is not read again."""
        with self._lock:
            self._forget(name)
            self._unusable.add(name)

    def _read_header(self, path: Path) -> _File | None:
        """None if it is no whole file of pages of this shape."""
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                found = os.fstat(file.fileno())
                magic, length, size, digest = _HEAD.unpack(file.read(_HEAD.size))
                if magic != _MAGIC or size != found.st_size or length > size or found.st_uid != os.geteuid():
                    return None
                encoded = file.read(length)
            if hashlib.sha256(encoded).digest() != digest:
                return None
            header = msgspec.msgpack.decode(encoded, type=_Header)
        except (OSError, struct.error, msgspec.MsgspecError):
            return None
        data_start = _data_start(length)
        is_ours = 0 <= header.pool < len(self._page_bytes) and header.page_bytes == self._page_bytes[header.pool]
        is_whole = size == data_start + sum(header.page_bytes) * len(header.names)
        return _File(data_start, size, header) if is_ours and is_whole else None

    def _drop_unfinished(self) -> None:
        with contextlib.suppress(OSError):
            for each in os.scandir(self._folder):
                if each.name.endswith(_UNFINISHED) and time.time() - each.stat().st_mtime > _OLD_S:
                    os.unlink(each.path)


def make_private(folder: Path, param: str = "prefix_cache_dir") -> None:
    """Makes a folder for its owner alone, or checks that it is such a one. Raises InvalidArgumentError that names the
    option."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be read and written")
    except OSError as error:
        raise InvalidArgumentError(f"{param} {folder} cannot be used: {error.strerror or error}", param=param) from None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidArgumentError(
            f"{param} {folder} has mode {stat.S_IMODE(found.st_mode):o} and owner {found.st_uid}: it holds "
            f"prompts, so it must be owner {os.geteuid()}'s alone (chmod 700)",
            param=param,
        )


def _data_start(header_bytes: int) -> int:
    return -(-(_HEAD.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT


def write_private(path: Path, *pieces: bytes | memoryview) -> None:
    """Writes a new file for its owner alone, to the disk. Raises OSError; then the file may hold a part."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            _write_whole(descriptor, memoryview(piece).cast("B"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sums(pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The checksum of each page ``[num_pages, page_bytes]``: a torn part changes it, and memory limits its speed."""
    words = pages if pages.shape[1] % 8 else pages.view(np.uint64)
    return np.asarray(words.sum(axis=1, dtype=np.uint64))
