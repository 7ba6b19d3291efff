"""Stored responses in a folder, so that conversations outlive the server: a file each, JSON after a digest.

A file is written under another name, synchronised and renamed, by a thread of its own: it exists whole or not at all.
Its name tells neither tenant nor id. Several servers may use a folder; a file that one deletes is a miss to all. A
file that cannot be read, is torn, has expired or belongs to another tenant is a miss, too. The oldest files go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from runtime.errors import InvalidArgumentError
from runtime.kv.page_store import make_private, write_private
from server.config import ServerConfig, ServerConfigError

logger = logging.getLogger("xserv.server")

_MAGIC = b"xsresp1\n"
_SUFFIX, _UNFINISHED = ".response", ".tmp"
_SECRET, _SECRET_BYTES = "secret", 32
_OLD_S = 600.0
"""An unfinished file of this age belongs to no server that still writes it."""
_LOOKED_S = 300.0
"""Other servers' files are counted again after so long."""
_MOST_QUEUED = 1024
"""Responses that wait to be written."""
_LEAST_BYTES = 4096
"""The least that a file counts, so that the bound of bytes bounds their number."""


class ResponseFolder:
    """``most_bytes`` and ``ttl_s`` bound what is kept; ``clock``: seconds since 1970.

    Raises `ServerConfigError` for a folder that cannot be used or that others may read.
    """

    def __init__(self, folder: Path, most_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._most_bytes, self._ttl_s, self._clock = folder, most_bytes, ttl_s, clock
        try:
            make_private(folder, "responses_dir")
        except InvalidArgumentError as error:
            raise ServerConfigError(str(error)) from None
        self.num_failed = 0
        self._lock = threading.Lock()
        self._pending: dict[str, bytes] = {}
        self._size, self._looked_s = 0, -_LOOKED_S
        self._thread = ThreadPoolExecutor(1, "xserv-responses")

    def put(self, tenant: str | None, response_id: str, data: bytes) -> None:
        """Store, or replace, soon."""
        name = self._name(tenant, response_id)
        body = f"{self._clock():.3f}\n".encode() + data
        content = _MAGIC + hashlib.sha256(name.encode() + body).digest() + body
        with self._lock:
            if len(self._pending) >= _MOST_QUEUED:
                self.num_failed += 1
                logger.warning("responses_dir %s lacks a response: %d wait to be written", self._folder, _MOST_QUEUED)
                return
            self._pending[name] = content
        self._thread.submit(self._write, name, content)

    def get(self, tenant: str | None, response_id: str) -> bytes | None:
        """The stored data, or None."""
        name = self._name(tenant, response_id)
        with self._lock:
            content = self._pending.get(name)
        if content is None:
            try:
                content = (self._folder / name).read_bytes()
            except OSError:
                return None
        head = len(_MAGIC)
        digest, body = content[head : head + 32], content[head + 32 :]
        if not content.startswith(_MAGIC) or digest != hashlib.sha256(name.encode() + body).digest():
            return None
        stored_s, _, data = body.partition(b"\n")
        return data if self._clock() < float(stored_s) + self._ttl_s else None

    def has(self, tenant: str | None, response_id: str) -> bool:
        """Whether it is kept, here or by another server, and not deleted."""
        name = self._name(tenant, response_id)
        with self._lock:
            return name in self._pending or (self._folder / name).exists()

    def delete(self, tenant: str | None, response_id: str) -> Future[None]:
        """It is gone when the future is done, also from the disk; a thread waits for that."""
        return self._thread.submit(self._delete, self._name(tenant, response_id))

    def _delete(self, name: str) -> None:
        with self._lock:
            self._pending.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                (self._folder / name).unlink()
        self._synchronise()

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown(wait=True)

    def _name(self, tenant: str | None, response_id: str) -> str:
        owner = "" if tenant is None else f"{len(tenant)} {tenant}"
        return hashlib.sha256(f"{owner}\0{response_id}".encode(errors="surrogatepass")).hexdigest() + _SUFFIX

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
        is_written = False
        try:
            write_private(path, content)
            os.utime(path, (self._clock(), self._clock()))
            is_written = True
            with self._lock:
                if self._pending.get(name) is content:  # else it was deleted, or replaced
                    path.rename(self._folder / name)
            self._synchronise()
            self._size += max(len(content), _LEAST_BYTES)
            if self._size > self._most_bytes or self._clock() - self._looked_s > _LOOKED_S:
                self._tidy()
        except OSError as error:
            self.num_failed += 1
            what = "is not tidied" if is_written else "lacks a response"
            logger.warning("responses_dir %s %s: %s", self._folder, what, error.strerror or error)
        finally:
            with self._lock:
                if self._pending.get(name) is content:
                    del self._pending[name]
            path.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Delete what has expired, and beyond the bound of bytes the oldest: a sixteenth more than needed, so that not
        every write to a full folder lists it."""
        now, files = self._clock(), []
        for each in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                found = each.stat(follow_symlinks=False)
                if each.name.endswith(_SUFFIX):
                    files.append((found.st_mtime, max(found.st_size, _LEAST_BYTES), each.path))
                elif each.name.endswith(_UNFINISHED) and now - found.st_mtime > _OLD_S:
                    Path(each.path).unlink(missing_ok=True)
        self._size, self._looked_s = sum(size for _, size, _ in files), now
        most = self._most_bytes if self._size <= self._most_bytes else self._most_bytes * 15 // 16
        for stored_s, size, path in sorted(files):
            if stored_s + self._ttl_s > now and self._size <= most:
                break
            Path(path).unlink(missing_ok=True)
            self._size -= size

    def _synchronise(self) -> None:
        """Make renames and deletions last."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def folder_of(config: ServerConfig) -> Path | None:
    return Path(config.responses_dir).expanduser() if config.responses_dir else None


def response_folder(config: ServerConfig) -> ResponseFolder | None:
    """The config's folder. Raises `ServerConfigError`."""
    folder = folder_of(config)
    if folder is None:
        return None
    return ResponseFolder(folder, config.responses_dir_bytes, config.responses_dir_ttl_s)


def tenants_secret(folder: Path) -> bytes:
    """The key of tenants' names, which all servers of a folder share, made by the first. Raises `ServerConfigError`."""
    path, draft = folder / _SECRET, folder / f"{uuid.uuid4().hex}{_UNFINISHED}"
    try:
        make_private(folder, "responses_dir")
        if not path.exists():
            write_private(draft, secrets.token_bytes(_SECRET_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # whole, and only if no other server was faster
            draft.unlink()
        secret = path.read_bytes()
    except InvalidArgumentError as error:
        raise ServerConfigError(str(error)) from None
    except OSError as error:
        raise ServerConfigError(f"responses_dir {folder} cannot be used: {error.strerror or error}") from None
    if len(secret) != _SECRET_BYTES:
        raise ServerConfigError(f"responses_dir: {path} has {len(secret)} bytes, must be {_SECRET_BYTES}: delete it")
    return secret
