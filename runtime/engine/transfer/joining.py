"""Lets an engine hand requests over to others, and take theirs."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from numba_kernels.cache_files import cache_root
from numba_kernels.cpu.target import TILES
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.fingerprint import fingerprint, fingerprint_of_source
from runtime.engine.messages import TransferSettings
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.ranks.pages import RankPages
from runtime.engine.scheduling.stored_prefixes import BlockBytes, StoredPrefixes
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.transfer.arrivals import Arrivals
from runtime.engine.transfer.identity import Identity
from runtime.engine.transfer.nixl_transport import NixlTransport
from runtime.engine.transfer.sockets import SharedMemoryTransport, TcpTransport
from runtime.engine.transfer.transport import Transport
from runtime.engine.weights.commands import WeightSource
from runtime.errors import XservError
from runtime.kv.layer_copies import LayerCopies, has_free_core
from runtime.kv.page_bytes import PageBytes
from runtime.kv.page_store import PageStore
from runtime.version import release

logger = logging.getLogger("xserv.engine")


def join_others(engine: Engine, config: EngineConfig, settings: TransferSettings) -> None:
    """To be called before the first request; `EngineInfo` has the engine's addresses then. Raises `RequestError` if one
    cannot be used."""
    before, executor = engine.scheduler.stored, engine.executor
    local = executor.local if isinstance(executor, ParallelExecutor) else executor
    assert isinstance(local, LocalExecutor), "it has pages"
    pages: BlockBytes
    if before is not None:
        pages = before.pages
    elif isinstance(executor, ParallelExecutor):
        pages = RankPages(executor)
    else:
        pages = PageBytes(local.kv_cache)
    spec = local.kv_cache.spec
    notes = cache_root("digests")
    try:
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = fingerprint(Path(engine.info.model_path), config, spec, notes)
    except OSError as error:
        raise RequestError(f"the model's digest cannot be made: {error}", param="kv_transfer") from None
    info = engine.info
    facts = {
        "release": release(),
        "model": info.model_name,
        "architecture": info.architecture,
        "device": info.device.partition(":")[0],
        "processor": TILES if info.device == "cpu" else "gpu",
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
        "block_size": str(info.block_size),
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.pipeline_parallel_size),
        "kv_transfer_library": settings.library,
    }
    identity = Identity(facts, digest, pages.page_bytes)
    transports: dict[str, Transport] = {}
    try:
        if settings.secret:
            shared = transports["unix"] = SharedMemoryTransport(settings.secret, identity, settings.most_bytes)
            shared.sends_at_once = info.device == "cpu" and not has_free_core()
        if settings.host:
            secret = settings.foreign_secret or settings.secret
            kind = NixlTransport if settings.library == "nixl" else TcpTransport
            transports["tcp"] = kind(settings.host, settings.port, secret, identity, settings.most_bytes)
    except XservError as error:
        for transport in transports.values():
            transport.close()
        raise RequestError(str(error), param="kv_transfer") from None
    num_planes = [len(each) for each in pages.page_bytes]
    arrivals = Arrivals(transports, settings.most_bytes, num_planes, None if before is None else before.store)
    weights = engine.weights
    open_backing = weights.open_store

    def open_store(name: str) -> PageStore:
        for transport in transports.values():
            transport.use(identity._replace(fingerprint=name))
        arrivals.back_with(None if open_backing is None else open_backing(name))
        return arrivals

    def fingerprint_of(source: WeightSource) -> str:
        return fingerprint_of_source(source, digest, config, spec, notes)

    weights.open_store, weights.fingerprint_of = open_store, weights.fingerprint_of or fingerprint_of
    picture_of = None if engine.pictures is None else engine.pictures.keys.known_digest
    stored = StoredPrefixes(engine.pool, pages, arrivals, digest, picture_of)
    if executor is local:  # else a rank's planes go with the others'
        local.layer_copies = LayerCopies(local.kv_cache, PageBytes(local.kv_cache))
    engine.hand_over(stored, transports, arrivals, local.layer_copies, has_fleet=bool(settings.secret))
    addresses = tuple(each.address for each in transports.values())
    engine.info = msgspec.structs.replace(info, transfer_addresses=addresses, identity=identity)
    logger.info("requests are handed over by %s", ", ".join(addresses))
