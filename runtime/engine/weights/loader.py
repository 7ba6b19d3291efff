"""Reads other weights of a model that runs: from a folder, from shared memory, or from arrays of this process.

They must be the same model's: the same config, float type, quantisation and form of pages. So an engine that takes
them is as one that was started with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.given_weights import check_finite, checkpoint_of_arrays, shared_checkpoint
from models.errors import ConfigError, ModelLoadError
from models.registry import Declaration
from runtime.device.host_copies import HostCopies
from runtime.engine.errors import RequestError
from runtime.engine.weights.commands import FolderWeights, GivenArrays, SharedWeights, WeightSource
from runtime.errors import OutOfMemoryError
from runtime.kv.cache import KVCacheSpec

logger = logging.getLogger("xserv.engine")

Declare = Callable[[Path | Checkpoint | None], Declaration]
"""Declares the model with these weights; None: those that it was started with."""

Load = Callable[[Declaration, HostCopies | None], Model]
"""Loads it, on a GPU with these copies of what its files have, or with new ones that note it."""


class Loader:
    """See `WeightLoader`.

    pages        gives the form of a model's pages
    keeps_given  keep a copy of weights that came from memory, which `reload` reads
    """

    def __init__(
        self, folder: Path, model: Model, declare: Declare, load: Load, pages: Callable[[Model], KVCacheSpec], *,
        keeps_given: bool,
    ) -> None:  # fmt: skip
        self._declare, self._load, self._pages, self._keeps_given = declare, load, pages, keeps_given
        self._config, self._dtype, self._quantization = model.config, model.dtype, model.quantization
        self._spec = pages(model)
        self._served: WeightSource | None = FolderWeights(str(folder))
        self._is_own = True  # the folder that the engine was started with
        self._signature = _signature(folder)
        self._kinds: dict[str, str] | None = None  # how the matrices of the folder are stored
        self._copies = model.host_copies
        self._read: tuple[WeightSource | None, tuple[tuple[object, ...], ...], HostCopies | None] | None = None

    def declared(self) -> Model:
        return self._declare(None).model

    def load(self, source: WeightSource) -> Model:
        self._read = None
        signature: tuple[tuple[object, ...], ...] = ()
        weights: Path | Checkpoint
        if isinstance(source, FolderWeights):
            weights = Path(source.path)
            signature = _signature(weights)
        else:
            weights = _given(source)
        declared = self._checked(self._declare(weights))
        check_finite(declared.source)
        model = self._load(declared, None)
        kept: WeightSource | None = source
        if not isinstance(source, FolderWeights):
            kept = _copied(weights) if self._keeps_given and isinstance(weights, Checkpoint) else None
        elif _signature(Path(source.path)) != signature:
            raise ModelLoadError(f"{source.path}: its files changed while they were read")
        self._read = kept, signature, model.host_copies
        return model

    def take_over(self) -> None:
        assert self._read is not None, "weights were read"
        self._served, self._signature, self._copies = self._read
        self._is_own, self._read = False, None

    def keep(self) -> None:
        if self._copies is None or not isinstance(self._served, FolderWeights):
            return
        try:
            self._copies.make()
        except (OSError, OutOfMemoryError) as error:
            logger.warning("asleep the weights stay in their files, not in pinned memory: %s", error)
        else:
            logger.info("asleep %s bytes of the weights lie in pinned memory", f"{self._copies.size_bytes:,}")

    def forget(self) -> None:
        if isinstance(self._served, GivenArrays):
            self._served = None
        if self._copies is not None:
            self._copies.drop()

    def reload(self) -> Model:
        served = self._served
        if served is None:
            raise RequestError(
                "the weights came from memory and are not kept while the engine sleeps: give some (update_weights)",
                param="tags",
            )
        weights: Path | Checkpoint | None
        if isinstance(served, FolderWeights):
            weights = Path(served.path)
            if _signature(weights) != self._signature:
                raise RequestError(
                    f"{weights}: its files are others than when they were read: give weights (update_weights)",
                    param="tags",
                )
        else:
            weights = _given(served)
        return self._load(self._declare(None if self._is_own else weights), self._copies)

    def _checked(self, declared: Declaration) -> Declaration:
        """Raises `ConfigError` unless the engine can take the model as it is."""
        place, model = declared.source.place, declared.model
        if model.config != self._config:
            names = _differing(model.config, self._config)
            raise ConfigError(f"{place}: the weights are another model's than the engine's: {names} differ")
        for name, found, own in (
            ("their float type", model.dtype, self._dtype),
            ("their quantisation", model.quantization, self._quantization),
        ):
            if found != own:
                raise ConfigError(f"{place}: {name} is {found}, must be the engine's, {own}")
        if self._kinds is None:
            self._kinds = _kinds(self._declare(None).source)
        kinds = _kinds(declared.source)
        if other := [name for name in kinds if kinds[name] != self._kinds.get(name)]:
            one = other[0]
            raise ConfigError(
                f"{place}: {len(other)} matrices are stored otherwise than the engine's, such as {one!r}, which is"
                f" {kinds[one]}, not {self._kinds.get(one)}: store them as in the folder that it was started with"
            )
        if self._pages(model) != self._spec:
            raise ConfigError(f"{place}: the weights have pages of another form than the engine's")
        return declared


def _kinds(source: Checkpoint) -> dict[str, str]:
    """By tensor: its quantisation, "blocks" of a GGUF file, which may be of any type, or "floats"."""
    return {
        name: stored.quantized.name if stored.quantized is not None else "blocks" if stored.block_format else "floats"
        for name, stored in source.tensors.items()
    }


def _differing(found: object, own: object) -> str:
    return ", ".join(name for name, value in vars(own).items() if getattr(found, name, None) != value)


def _given(source: WeightSource) -> Checkpoint:
    if isinstance(source, SharedWeights):
        return shared_checkpoint(Path(source.path))
    assert isinstance(source, GivenArrays)
    return checkpoint_of_arrays(source.arrays)


def _copied(weights: Checkpoint) -> GivenArrays:
    """A copy of all tensors in the host's memory."""
    return GivenArrays({name: np.array(stored.array()) for name, stored in weights.tensors.items()})


def _signature(place: Path) -> tuple[tuple[object, ...], ...]:
    """The names, sizes and times of the files of a folder, or of a file."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    found = []
    for file in files:
        if file.is_file():
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return tuple(found)
