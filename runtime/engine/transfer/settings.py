"""How a config's engines hand requests over."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.messages import TransferSettings

LEAST_KEY_BYTES = 16


def transfer_settings(config: EngineConfig, secret: bytes = b"", engine: int = 0) -> TransferSettings | None:
    """The settings of an engine of a fleet with this secret, or of a lone one; None if it hands nothing over. Engine i
    of a fleet listens at the i-th port after ``kv_transfer_address``. Raises `RequestError`."""
    is_remote = config.distributed_executor_backend == "ray"
    address = config.kv_transfer_address
    if not address:
        if not config.hands_over:
            return None
        host = "127.0.0.1" if is_remote else ""  # Ray puts the node's there
        return TransferSettings(
            secret=secret, host=host, most_bytes=config.kv_transfer_bytes, library=config.kv_transfer_library
        )
    host, port = parse_address(address)
    return TransferSettings(
        secret=secret if config.hands_over else b"",
        host=host,
        port=port + engine,
        foreign_secret=_secret_of(Path(config.kv_transfer_key_file)),
        most_bytes=config.kv_transfer_bytes,
        library=config.kv_transfer_library,
    )


def parse_address(text: str, param: str = "kv_transfer_address") -> tuple[str, int]:
    """HOST:PORT. Raises `RequestError`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise RequestError(f"{param} must be HOST:PORT, got {text!r:.80}", param=param)
    return host, int(port)


def _secret_of(file: Path) -> bytes:
    """A key of the file's content. Raises `RequestError`."""
    param = "kv_transfer_key_file"
    try:
        found = file.stat()
        content = file.read_bytes().strip()
    except OSError as error:
        raise RequestError(f"{param} {file}: {error.strerror or error}", param=param) from None
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or found.st_uid != os.geteuid():
        raise RequestError(f"{param} {file} must be its owner's alone (chmod 600)", param=param)
    if len(content) < LEAST_KEY_BYTES:
        raise RequestError(
            f"{param} {file} has {len(content)} bytes, must have at least {LEAST_KEY_BYTES}: write one with `openssl "
            "rand -hex 32`",
            param=param,
        )
    return hashlib.sha256(b"xserv pages\0" + content).digest()
