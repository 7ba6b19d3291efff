"""Weights that come from memory and not from a folder: arrays of this process, or a trainer's shared memory.

Shared memory holds a safetensors file, whose header has the names, types, shapes and places. Its metadata have
`sha256`, a JSON object with the digest of each tensor's bytes, in hexadecimal. Each tensor is copied, compared with its
digest, and then used, so that a trainer that writes too early is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import FLOATS, Checkpoint, SafetensorsTensor, as_read
from models.checkpoints.safetensors_file import SafetensorsFile, type_name, write_tensors
from models.checkpoints.stored_tensor import Array, StoredTensor
from models.errors import WeightsError
from runtime.errors import InvalidArgumentError
from runtime.tensor.dlpack import import_array

SHARED_FOLDER = Path("/dev/shm")
_DIGESTS = "sha256"
_CHECKED_ELEMENTS = 1 << 22
_EXPONENTS: dict[int, tuple[np.dtype[Any], int]] = {
    4: (np.dtype(np.uint32), 0x7F800000), 2: (np.dtype(np.uint16), 0x7F80),
}  # fmt: skip
_EXPONENT_OF_HALF = 0x7C00


class ArrayTensor(StoredTensor):
    """An array that its owner may write later: everything is copied from it while a model is loaded."""

    file = "arrays"
    is_lasting = False

    def __init__(self, name: str, array: Array) -> None:
        kind = type_name(array.dtype)
        assert kind is not None, "it was checked"
        self.name, self.shape, self.type_name, self.size_bytes = name, array.shape, kind, array.nbytes
        self.dtype = FLOATS.get(kind)
        self._array = array.view()
        self._array.flags.writeable = False

    def array(self) -> Array:
        return as_read(self, self._array)


class SharedTensor(SafetensorsTensor):
    """One tensor of a shared memory: a copy, compared with its digest."""

    is_lasting = False

    def __init__(self, file: SafetensorsFile, name: str, digest: str) -> None:
        super().__init__(file, name)
        self._digest = digest

    def array(self) -> Array:
        copied = self._file.read(self.name)
        if _digest(copied) != self._digest:
            raise WeightsError(f"{self.file}: tensor {self.name!r}: its bytes have another digest than the header's")
        return as_read(self, copied)

    def release(self) -> None:
        """Nothing is mapped."""


def arrays_of(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Array]:
    """Arrays by name, without a copy where they are in the host's memory: of numpy, torch, or anything else with
    DLPack. Raises `InvalidArgumentError`, which names the array."""
    found: dict[str, Array] = {}
    for name, given in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"weights: a name is {name!r:.80}, must be a text", param="weights")
        if name in found:
            raise InvalidArgumentError(f"weights: {name!r:.200} is given twice", param="weights")
        array = given
        if not isinstance(given, np.ndarray):
            for method in ("detach", "cpu"):  # torch's: out of the graph, off the GPU
                array = getattr(array, method)() if hasattr(array, method) else array
            try:
                array = import_array(array)
            except (InvalidArgumentError, TypeError, BufferError, RuntimeError) as error:
                kind = type(given).__name__
                raise InvalidArgumentError(f"weights[{name!r:.200}] is a {kind}: {error}", param="weights") from None
        if type_name(array.dtype) is None:
            raise InvalidArgumentError(
                f"weights[{name!r:.200}] is of {array.dtype}, which is no type of weights", param="weights"
            )
        found[name] = array
    if not found:
        raise InvalidArgumentError("weights: no array is given", param="weights")
    return found


def checkpoint_of_arrays(arrays: Mapping[str, Array]) -> Checkpoint:
    """A checkpoint whose tensors are these arrays."""
    return Checkpoint(Path("arrays"), "arrays", {name: ArrayTensor(name, each) for name, each in arrays.items()})


@contextmanager
def shared_weights(weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[str]:
    """The name of shared memory that holds weights, for this user alone, until the block is left."""
    arrays = arrays_of(weights)
    path = SHARED_FOLDER / f"xserv-weights-{os.getpid()}-{secrets.token_hex(8)}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600))
    try:
        write_shared(path, arrays)
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def write_shared(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes arrays, with their digests, into a file that is there: shared memory by its name, or
    `/proc/self/fd/<number>` for an open descriptor."""
    plain = {name: np.ascontiguousarray(each).reshape(each.shape) for name, each in arrays.items()}
    digests = {name: _digest(each) for name, each in plain.items()}
    plan = [(name, each.dtype, each.shape) for name, each in plain.items()]
    write_tensors(path, plan, plain.values(), {_DIGESTS: json.dumps(digests)})


def _digest(array: Array) -> str:
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


def shared_path(name: str) -> Path:
    """The path of a shared memory, by its name. Raises `InvalidArgumentError` for one that is no plain file of this
    user's, or that others may open."""
    path = SHARED_FOLDER / name
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise InvalidArgumentError(f"shared memory {name!r:.200}: must be a plain name", param="shared_memory")
    try:
        found = os.lstat(path)
    except OSError as error:
        problem = f"shared memory {name!r:.200}: {error.strerror or error}"
        raise InvalidArgumentError(problem, param="shared_memory") from None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgumentError(
            f"shared memory {name!r:.200}: must be a plain file of this user's that no other may open (mode 0600), but"
            f" its mode is {stat.filemode(found.st_mode)} and its owner {found.st_uid}",
            param="shared_memory",
        )
    return path


def _open_shared(path: Path) -> tuple[SafetensorsFile, dict[str, str]]:
    """A shared memory, and its tensors' digests by their names."""
    file = SafetensorsFile(path)
    try:
        digests = json.loads(file.metadata.get(_DIGESTS, ""))
    except (ValueError, RecursionError):
        digests = None
    if not isinstance(digests, dict) or not all(isinstance(each, str) for each in digests.values()):
        raise WeightsError(f"{path}: the header's metadata must have {_DIGESTS!r}, a JSON object of digests by tensor")
    if lacking := [name for name in file.tensors if name not in digests]:
        raise WeightsError(f"{path}: {len(lacking)} tensors have no digest in the header, such as {lacking[0]!r:.200}")
    return file, digests


def shared_checkpoint(path: Path) -> Checkpoint:
    """The tensors of a shared memory. Raises `WeightsError`, also for a header without a digest of each tensor."""
    file, digests = _open_shared(path)
    return Checkpoint(path, path.name, {name: SharedTensor(file, name, digests[name]) for name in file.tensors})


def shared_digest(path: Path) -> str:
    """A digest of all that a shared memory holds, by the digests in its header. Raises as `shared_checkpoint`."""
    file, digests = _open_shared(path)
    known = [(name, each.dtype, list(each.shape), digests[name]) for name, each in sorted(file.tensors.items())]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def check_finite(checkpoint: Checkpoint) -> None:
    """Raises `WeightsError` with every tensor of floats that holds NaN or an infinity; reads all of them."""
    problems = []
    for stored in checkpoint.tensors.values():
        if stored.quantized is not None or stored.block_format is not None or stored.dtype is None:
            continue
        if not _is_finite(stored.array()):
            problems.append(f"{stored.file}: tensor {stored.name!r}")
        stored.release()
    if problems:
        count = "1 tensor holds" if len(problems) == 1 else f"{len(problems)} tensors hold"
        raise WeightsError(f"{checkpoint.place}: {count} NaN or an infinity:", problems)


def _is_finite(array: Array) -> bool:
    kind, exponent = _EXPONENTS[array.itemsize]
    if array.dtype == np.float16:
        exponent = _EXPONENT_OF_HALF
    bits = np.ascontiguousarray(array).reshape(-1).view(kind)
    return not any(
        ((bits[start : start + _CHECKED_ELEMENTS] & exponent) == exponent).any()
        for start in range(0, bits.size, _CHECKED_ELEMENTS)
    )
