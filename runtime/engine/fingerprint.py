"""A digest of all that makes the bits of an engine's pages beside their tokens."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import msgspec

import models
import numba_kernels
import runtime
from models.checkpoints.given_weights import shared_digest
from numba_kernels.cpu.target import TILES
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.engine.config import EngineConfig, SchedulingConfig
from runtime.engine.weights.commands import FolderWeights, SharedWeights, WeightSource
from runtime.kv.cache import KVCacheSpec
from runtime.later import later
from runtime.version import release

_llvm = later("llvmlite.binding")

_WITHOUT_EFFECT = {
    *(each.name for each in fields(SchedulingConfig)),
    "device", "enable_prefix_caching", "kv_cache_bytes", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "max_cpu_loras", "max_loras", "max_waiting", "max_waiting_tokens", "num_blocks", "overlap", "prefix_cache_dir",
    "prefix_cache_disk_bytes", "swap_space_bytes",
    "data_parallel_size", "decode_engines", "distributed_executor_backend", "engine_roles", "kv_transfer_address",
    "kv_transfer_bytes", "kv_transfer_key_file", "kv_transfer_library", "prefill_engines", "routing_policy",
}  # fmt: skip
"""Options that change no page of a model: all others count, though few of them do."""

_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5}\.gguf)")
_NOTES = "digests.json"


def fingerprint(model: Path, config: EngineConfig, spec: KVCacheSpec, notes: Path) -> str:
    """Covers the model's files and the program's by their contents, the options, the pages' form, and the processor.
    The folder ``notes`` keeps digests of the model's files, by path, size, and times of change.

    Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    options = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _WITHOUT_EFFECT}
    given = repr(sorted(options.items(), key=str))
    for part in (release(), given, repr(spec), repr(spec.planes), _device(spec.device)):
        digest.update(f"{part}\0".encode())
    digest.update(_program())
    known = _read(notes / _NOTES)
    kept: dict[str, str] = {}
    for file in [*_files(model), *([Path(config.mmproj)] if config.mmproj not in ("", "none") else [])]:
        found = file.stat()
        note = f"{file.resolve()} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"
        kept[note] = known.get(note) or _digest(file)
        digest.update(f"{file.name}\0{kept[note]}\0".encode())
    if kept.items() - known.items():
        names = {_name_in(note) for note in kept}
        others = {
            note: of_file
            for note, of_file in known.items()
            if (name := _name_in(note)) not in names and os.path.isfile(name)
        }
        _write(notes / _NOTES, others | kept)
    return digest.hexdigest()


def fingerprint_of_source(source: WeightSource, own: str, config: EngineConfig, spec: KVCacheSpec, notes: Path) -> str:
    """The fingerprint of a model's pages with other weights; ``own`` is that of the folder that it was started with.
    Arrays of this process get one of their own, so that their pages are never found again.

    Raises as `fingerprint`, and `WeightsError`."""
    if isinstance(source, FolderWeights):
        place = Path(source.path)
        name = fingerprint(place, config, spec, notes)
        if place.is_file() or (place / "config.json").is_file():
            return name
    else:
        name = shared_digest(Path(source.path)) if isinstance(source, SharedWeights) else secrets.token_hex(32)
    return hashlib.sha256(f"{own} {name}".encode()).hexdigest()


@functools.cache
def _program() -> bytes:
    """The digest of the sources from which this process was started."""
    digest = hashlib.sha256()
    for package in (numba_kernels, models, runtime):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


def _name_in(note: str) -> str:
    """The file of which a digest is noted."""
    return note.rsplit(" ", 4)[0]


def _device(device: Device) -> str:
    if device.kind == "cpu":
        return f"cpu {TILES} {_llvm.get_host_cpu_name()}"
    gpu = Gpu.of(device)
    return f"{device.kind} {gpu.arch}"


def _files(model: Path) -> Iterator[Path]:
    """A folder's own files; or a GGUF file, the others that it was split into, and the towers beside it."""
    if model.is_dir():
        yield from sorted(each for each in model.iterdir() if each.is_file() and not each.name.startswith("."))
    elif (parts := _SPLIT.fullmatch(model.name)) is not None:
        yield from sorted(model.parent.glob(f"{parts[1]}-?????-of-{parts[2]}"))
    else:
        yield model
    if not model.is_dir():
        yield from sorted(model.parent.glob("*mmproj*.gguf"))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read(file: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(file: Path, notes: dict[str, str]) -> None:
    """In one piece: another process may read or write it at the same time."""
    number, unfinished = tempfile.mkstemp(suffix=".tmp", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(number, "wb") as opened:
            opened.write(msgspec.json.encode(notes))
        os.replace(unfinished, file)
    except OSError:
        Path(unfinished).unlink(missing_ok=True)
        raise
