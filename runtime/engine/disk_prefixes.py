"""The folder in which an engine keeps prefixes: each weights' pages have their own place there, by a digest."""

from __future__ import annotations

import threading
from pathlib import Path

from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.fingerprint import fingerprint, fingerprint_of_source
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.weights.commands import WeightSource
from runtime.errors import InvalidArgumentError
from runtime.kv.page_bytes import PageBytes
from runtime.kv.page_store import DiskPages, make_private


def store_on_disk(engine: Engine, executor: LocalExecutor, folder: Path, config: EngineConfig) -> None:
    """Let an engine keep prefixes on the disk. Raises ``RequestError`` if the folder cannot be used."""
    root = Path(config.prefix_cache_dir).expanduser()

    def open_store(name: str) -> DiskPages:
        return DiskPages(root, name, config.prefix_cache_disk_bytes, pages.page_bytes)

    def fingerprint_of(source: WeightSource) -> str:
        return fingerprint_of_source(source, own, config, executor.kv_cache.spec, root)

    try:
        make_private(root)
        own = name = fingerprint(folder, config, executor.kv_cache.spec, root)
        pages = PageBytes(executor.kv_cache)
        store = open_store(name)
    except InvalidArgumentError as error:
        raise RequestError(str(error), param="prefix_cache_dir") from None
    except OSError as error:
        raise RequestError(
            f"prefix_cache_dir {root}: the model's digest cannot be made: {error}", param="prefix_cache_dir"
        ) from None
    threading.Thread(target=pages.allocate, args=[store.num_pages()], name="xserv-allocate", daemon=True).start()
    engine.store_prefixes(pages, store, name)
    engine.weights.fingerprint_of, engine.weights.open_store = fingerprint_of, open_store
