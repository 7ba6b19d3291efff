"""Builds a running engine from a model's name, for ``LLM``, the commands and the server."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from models.adapter_changes import ReadChanges, read_changes
from models.base import Model
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.hub import model_name, resolve_model
from models.configuration.generation_config import load_suppressed_ids
from models.configuration.preprocessing import read_patch_rule
from models.encoder import BothWays
from models.registry import Declaration, declare, declare_model
from models.sentence_transformers import read_layout, score_tokens
from runtime.communicator import RankCommunicator, ends_here
from runtime.device.device import Device
from runtime.device.gpu import Gpu
from runtime.device.host_copies import HostCopies
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.grammar.matcher import LazyVocabulary
from runtime.engine.limits import CPU_BATCHED_TOKENS, EngineLimits, available_memory_bytes, resolve
from runtime.engine.logits.processing import try_kernels
from runtime.engine.logits.processors import load_processors
from runtime.engine.logits.settings import LogitsSettings
from runtime.engine.making.drafters import (
    Draft,
    draft_bytes_per_block,
    draft_state_bytes,
    drafter_of,
    speculator_of,
)
from runtime.engine.making.engine_info import bytes_of_ranks, engine_info, reads_pictures
from runtime.engine.making.load_settings import (
    declared_rank,
    declared_settings,
    layers_of_stages,
    load_settings,
    settings_of_rank,
)
from runtime.engine.messages import EngineInfo
from runtime.engine.process.wire import RemoteRank
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.ranks.group import RankGroup, Shape, join, new_memory
from runtime.engine.ranks.messages import Loaded
from runtime.engine.scheduling.fresh_pages import FreshPages
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.steps.executor import Executor
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.engine.steps.pictures import PictureModel
from runtime.engine.weights.loader import Loader
from runtime.kv.cache import KVCache
from runtime.kv.page_bytes import PageBytes
from runtime.later import later
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadOptions, LoadSettings
from runtime.progress import SILENT, Reporter
from runtime.tensor.tensor import Tensor
from runtime.text.load import load_tokenizer, read_tokenizer

logger = logging.getLogger("xserv.engine")

_disk_prefixes = later("runtime.engine.disk_prefixes")  # few keep prefixes there


def build_engine(
    model: str | Path | None = None,
    **settings: Any,
) -> Engine:
    """`engine_of` the `EngineConfig` of these settings. Raises ``RequestError`` for several engines."""
    config = EngineConfig(**settings)
    if config.data_parallel_size > 1 or config.distributed_executor_backend != "mp":
        raise RequestError(
            f"data_parallel_size is {config.data_parallel_size}, distributed_executor_backend "
            f"{config.distributed_executor_backend!r}: here is one engine alone, in this process",
            param="data_parallel_size",
        )
    return engine_of(model, config)


def engine_of(
    model: str | Path | None, config: EngineConfig, reporter: Reporter = SILENT, *,
    most_open_steps: int | None = None, remote_ranks: Sequence[RemoteRank] = (),
) -> Engine:  # fmt: skip
    """Resolve the model (None for the bundled one), load it, size and allocate its KV cache; report the progress.

    ``most_open_steps`` applies to a model in stages, by default `EngineConfig.most_open_steps`. ``remote_ranks`` are
    ranks 1 and following, which wait for this one; without them they are started here, as processes.

    Raises ``ModelLoadError``, ``DeviceError``, ``RequestError``, ``OutOfMemoryError``.
    """
    LoadOptions.parse(**load_settings(config, *declared_rank(config)))  # raises before a model is downloaded
    processing = logits_settings(config)
    folder = resolve_model(None if model is None else str(model), reporter)
    if config.num_ranks == 1:
        loaded = loaded_model(folder, config, reporter)
        return engine_over(loaded, folder, config, model_name(model), processing=processing)
    declared = declared_model(folder, config, declared_settings(config, layers_of_stages(folder, config)))
    ranks = RankGroup(folder, config, remote_ranks)
    try:
        loaded = load_declared(declared, config, reporter, ranks.communicator)
        return engine_over(
            loaded, folder, config, model_name(model), ranks, most_open_steps or config.most_open_steps, processing
        )
    except BaseException:
        ranks.close()
        raise


def lone_rank(folder: Path, config: EngineConfig) -> Engine:
    """An engine over rank 0's part of a model in a folder, on a device that does nothing, without the other ranks.
    Raises as `engine_of`."""
    device, shape = Device.parse(config.device), Shape(config.tensor_parallel_size)
    memory = new_memory(device, shape)
    try:
        communicator = join(device, memory, [bytes(128)], 0, shape)
    finally:
        os.close(memory)
    loaded = loaded_model(folder, config, communicator=communicator)
    limits = limits_of(loaded, config)
    info = engine_info(loaded, folder, config, limits, folder.name, None, [loaded.weight_bytes] * config.num_ranks)
    vocabulary = LazyVocabulary(partial(load_tokenizer, folder), info.vocab_size, info.eos_token_ids)
    executor = executor_over(loaded, folder, config, limits, info.vocab_size, communicator)
    return Engine(executor, limits, info, config.seed, vocabulary, None)


def declared_model(
    folder: Path, config: EngineConfig, settings: LoadSettings, weights: Path | Checkpoint | None = None
) -> Declaration:
    """The model in a folder, or the part that the settings name, before it is loaded; perhaps with other weights. The
    config's seed is also that of dummy weights (0 for None). Raises as `declare`."""
    return declare(
        folder, load_format=config.load_format if weights is None else "auto", seed=config.seed or 0,
        max_model_len=config.max_model_len, weights=weights, **settings,
    )  # fmt: skip


def loaded_model(
    folder: Path, config: EngineConfig, reporter: Reporter = SILENT, communicator: RankCommunicator | None = None
) -> Model:
    """The model in a folder, or a rank's part of it. Raises as `declare`."""
    return load_declared(
        declared_model(folder, config, settings_of_rank(folder, config, communicator)), config, reporter
    )


def load_declared(
    declared: Declaration, config: EngineConfig, reporter: Reporter = SILENT,
    communicator: RankCommunicator | None = None,
) -> Model:  # fmt: skip
    """Loads a declared model, or a rank's part of it, which joins the others by this communicator. Tables of positions
    are as long as the longest sequence that could ever be served."""
    logger.info("loading %s on %s", declared.folder, declared.options.device)
    read_rule(declared.model, declared.folder, config.mmproj)
    limits = limits_of(declared.model, config)
    if (most := declared.model.kv_cache_spec(config.block_size).most_states(limits.pool_sizes)) is not None:
        logger.info("the recurrent states of %d sequences fit, those of cached prefixes included", most)
    return _with_numbers(declared, config, limits.max_model_len, reporter, communicator)


def _with_numbers(
    declared: Declaration, config: EngineConfig, max_model_len: int, reporter: Reporter,
    communicator: RankCommunicator | None, copies: HostCopies | None = None,
) -> Model:  # fmt: skip
    device, copying = declared.options.device, contextlib.ExitStack()
    if device.kind != "cpu":
        gpu = Gpu.of(device)
        copies = copies or HostCopies(gpu.pinned)
        copying.enter_context(gpu.uploading_from(copies))
    with copying:
        loaded = declared.load(
            max_model_len=max_model_len, reporter=reporter,
            communicator=communicator if communicator is not None and communicator.num_ranks > 1 else None,
            pipeline=communicator if communicator is not None and communicator.num_stages > 1 else None,
        )  # fmt: skip
    loaded.host_copies = copies
    read_rule(loaded, declared.folder, config.mmproj)
    if isinstance(maps := loaded.addends, LowRankMaps):
        maps.allocate(LoadOptions(device=loaded.device, dtype=loaded.dtype, exact=config.exact))
        logger.info("slots for adapters: %d of rank %d, %s bytes", maps.num_slots, maps.rank, f"{maps.size_bytes:,}")
    return loaded


def engine_over(
    loaded: Model, folder: Path, config: EngineConfig, name: str, ranks: RankGroup | None = None,
    most_open_steps: int = 1, processing: LogitsSettings | None = None,
) -> Engine:  # fmt: skip
    """An engine with its own KV cache over a model that is loaded from ``folder``; or over rank 0's part of it and the
    other ranks, which load theirs.

    Exact products and quantisation were chosen when the model was loaded. Raises ``RequestError``,
    ``OutOfMemoryError``, what a rank raises, and ``CommunicatorError``.
    """
    if ranks is not None and loaded.score_token_ids:
        raise RequestError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, pipeline_parallel_size "
            f"{config.pipeline_parallel_size}: a model that scores pairs by tokens' logits runs in one piece",
            param="tensor_parallel_size",
        )
    draft = drafter_of(config, loaded, folder)
    others: list[Loaded] = [] if ranks is None else ranks.wait_loaded()
    of_ranks = [loaded.weight_bytes, *(rank.weight_bytes for rank in others)]
    limits = limits_of(loaded, config, draft=draft, free_bytes=[rank.free_bytes for rank in others])
    info = engine_info(loaded, folder, config, limits, name, draft, of_ranks)
    vocabulary = LazyVocabulary(partial(load_tokenizer, folder), info.vocab_size, info.eos_token_ids)
    executor: Executor
    if ranks is None:
        executor = executor_over(loaded, folder, config, limits, info.vocab_size, processing=processing)
    else:
        ranks.allocate(limits, info.vocab_size)
        local = executor_over(loaded, folder, config, limits, info.vocab_size, ranks.communicator, processing)
        executor = ParallelExecutor(local, ranks, most_open_steps)
    # A request's own prediction is not tried if several steps are open.
    speculator = None if executor.depth > 1 else speculator_of(config, info.vocab_size, limits, draft, executor)
    engine = Engine(executor, limits, info, config.seed, vocabulary, speculator)
    if config.reads_hidden_states and isinstance(executor, LocalExecutor) and speculator is not None:
        engine.weights.new_drafter = partial(_new_drafter, config, info.vocab_size, limits, executor, folder)
    if isinstance(maps := loaded.addends, LowRankMaps):
        read = _adapters_of(maps, loaded, folder, config)
        engine.take_adapters(*read, config.most_kept_adapters)
    if config.prefix_cache_dir:
        assert isinstance(executor, LocalExecutor), "refused for several ranks"
        _disk_prefixes.store_on_disk(engine, executor, folder, config)
    if isinstance(executor, LocalExecutor) and info.device == "cpu" and info.pooling.generates:
        engine.fresh_pages = FreshPages(PageBytes(executor.kv_cache), engine.pool)
    return engine


def _new_drafter(
    config: EngineConfig, vocab_size: int, limits: EngineLimits, executor: LocalExecutor, folder: Path
) -> Speculator | None:
    """The drafter that the engine was started with, over the model that the executor runs now."""
    target = executor.model
    assert isinstance(target, Model), "it was loaded"
    return speculator_of(config, vocab_size, limits, drafter_of(config, target, folder), executor)


def _adapters_of(
    maps: LowRankMaps, loaded: Model, folder: Path, config: EngineConfig
) -> tuple[LowRankMaps, Callable[[Path], ReadChanges]]:
    """The maps that adapters are checked against, of all stages together, and what reads one. Its function raises as
    `read_changes`."""
    lone = replace(config, tensor_parallel_size=1, pipeline_parallel_size=1, pipeline_layers="")
    whole = lru_cache(1)(lambda: declared_model(folder, lone, load_settings(lone)))
    model: Model = loaded
    if config.pipeline_parallel_size > 1:
        model, maps = whole().model, cast("LowRankMaps", whole().model.addends)
    return maps, lambda path: read_changes(path, maps, model, lambda: whole().source)


def executor_over(
    loaded: Model, folder: Path, config: EngineConfig, limits: EngineLimits, vocab_size: int,
    communicator: RankCommunicator | None = None, processing: LogitsSettings | None = None,
) -> LocalExecutor:  # fmt: skip
    """An executor of a model from ``folder``, or of a rank's part of it, over its own pages; `logits_settings` of the
    config unless they are given. Raises ``OutOfMemoryError``."""
    _complete(loaded, folder, config, vocab_size)
    spec = loaded.kv_cache_spec(config.block_size)
    for size, num_bytes in zip(limits.pool_sizes, spec.block_bytes, strict=True):
        logger.info("allocating %d KV blocks of %d bytes", size, num_bytes)
    loader = loader_of(loaded, folder, config, limits, vocab_size, communicator)
    pages = KVCache(spec, limits.pool_sizes)
    processing = processing or logits_settings(config)
    if ends_here(communicator):
        try_kernels(processing.processors, loaded.device, vocab_size)
    return LocalExecutor(loaded, pages, limits, vocab_size, communicator, loader, processing)


def logits_settings(config: EngineConfig) -> LogitsSettings:
    """The logits processors that the config names, loaded, and what is told as a log probability. Raises
    ``RequestError``."""
    processors = load_processors(config.logits_processors, str(Device.parse(config.device)))
    return LogitsSettings(processors, config.logprobs_mode)


def _complete(loaded: Model, folder: Path, config: EngineConfig, vocab_size: int) -> None:
    """Reads what a model's other files say about its steps."""
    suppressed = [i for i in load_suppressed_ids(folder, config.hf_overrides) if i < vocab_size]
    if suppressed:
        loaded.suppressed_ids = Tensor.from_numpy(np.array(suppressed, np.int32)).to(loaded.device)
    if isinstance(loaded, PictureModel):
        reads_pictures(loaded, folder)


def loader_of(
    model: Model, folder: Path, config: EngineConfig, limits: EngineLimits, vocab_size: int,
    communicator: RankCommunicator | None,
) -> Loader:  # fmt: skip
    """Reads other weights of a model from ``folder`` that runs, or of a rank's part of it."""
    dtype = model.dtype

    def declared(weights: Path | Checkpoint | None) -> Declaration:
        settings = settings_of_rank(folder, config, communicator)
        if isinstance(weights, Checkpoint) and config.dtype == "auto" and weights.main_dtype() is not dtype:
            settings["dtype"] = dtype  # arrays are rounded to it
        made = declared_model(folder, config, settings, weights)
        read_rule(made.model, folder, config.mmproj)
        return made

    def load(declaration: Declaration, copies: HostCopies | None) -> Model:
        loaded = _with_numbers(declaration, config, limits.max_model_len, SILENT, communicator, copies)
        _complete(loaded, folder, config, vocab_size)
        return loaded

    is_gpu = model.device.kind != "cpu"
    return Loader(folder, model, declared, load, lambda each: each.kv_cache_spec(config.block_size), keeps_given=is_gpu)


def describe_engine(model: str | Path | None, config: EngineConfig) -> EngineInfo:
    """The `EngineInfo` of an engine of this config. Nothing is loaded: sizes come from the headers of the model's
    files. Raises as `engine_of`."""
    LoadOptions.parse(**load_settings(config, *declared_rank(config)))
    folder = resolve_model(None if model is None else str(model))
    layers = layers_of_stages(folder, config)
    stages = [
        declare_model(
            folder, load_format=config.load_format, max_model_len=config.max_model_len,
            **declared_settings(config, layers, stage),
        )
        for stage in range(config.pipeline_parallel_size)
    ]  # fmt: skip
    declared = stages[0]
    read_rule(declared, folder, config.mmproj)
    weight_bytes = [stage.weight_bytes for stage in stages]
    num_bytes = sum(weight_bytes) * config.tensor_parallel_size
    to_load = max(weight_bytes) if declared.device.kind == "cuda" else num_bytes  # on the fullest device
    draft = drafter_of(config, declared, folder, declares=True)
    draft_bytes = 0 if draft is None else draft.weight_bytes
    limits = limits_of(declared, config, num_bytes_to_load=to_load + draft_bytes, draft=draft)
    of_ranks = [size for size in weight_bytes for _ in range(config.tensor_parallel_size)]
    return engine_info(declared, folder, config, limits, model_name(model), draft, of_ranks)


def read_rule(model: Model, folder: Path, mmproj: str) -> None:
    """Reads how a model cuts images, if it does, and what follows its hidden states: its limits follow from it. Raises
    `ConfigError`."""
    layout = read_layout(folder)
    model.embedding_stages, model.max_text_tokens = layout.stages, layout.max_tokens
    if model.generates:
        model.score_token_ids = score_tokens(
            model.config, layout, folder, lambda text: read_tokenizer(folder).encode(text, False)
        )
    if isinstance(model, PictureModel):
        model.patch_rule = read_patch_rule(folder, model.patch_rule, mmproj)


def limits_of(
    model: Model, config: EngineConfig, *, num_bytes_to_load: int = 0, draft: Draft | None = None,
    free_bytes: Sequence[int] = (),
) -> EngineLimits:  # fmt: skip
    """The limits of an engine over the model, by the memory that is free now, less what is still to be loaded;
    ``free_bytes`` of other ranks' GPUs. Raises ``RequestError``.

    Ranks that share a memory have one block in it each; of several GPUs the one with least room for pages counts.
    """
    spec, has_own_memory = model.kv_cache_spec(config.block_size), model.device.kind == "cuda"
    of_ranks = bytes_of_ranks(model, config)
    free = max(0, free_memory_bytes(model.device) - num_bytes_to_load - draft_state_bytes(draft, config))
    bytes_per_block = [max(each) if has_own_memory else sum(each) for each in zip(*of_ranks, strict=True)]
    if has_own_memory:
        of_gpus = [free, *(free_bytes or [free] * (len(of_ranks) - 1))]
        free = min(
            mine * size // own
            for mine, sizes in zip(of_gpus, of_ranks, strict=True)
            for size, own in zip(bytes_per_block, sizes, strict=True)
            if own  # a stage may have no layer of a pool
        )
    max_positions = model.max_positions
    if not model.generates:
        max_positions = min(max_positions, model.max_text_tokens or max_positions)
        config = _without_answers(config, max_positions, len(spec.group_kinds), is_cut=not isinstance(model, BothWays))
    limits = resolve(
        config,
        max_position_embeddings=max_positions,
        bytes_per_block=bytes_per_block,
        draft_bytes_per_block=draft_bytes_per_block(draft, config),
        cache_kinds=spec.group_kinds,
        cache_pools=spec.group_pools,
        longrope_threshold=model.longrope_threshold,
        whole_tokens=model.whole_picture_tokens if isinstance(model, PictureModel) else None,
        available_bytes=free,
        is_gpu=model.device.kind != "cpu",
        has_own_memory=has_own_memory,
    )
    return replace(limits, block_bytes=of_ranks[0])  # what this rank moves, and times, when a block is swapped


def _without_answers(config: EngineConfig, max_positions: int, num_groups: int, *, is_cut: bool) -> EngineConfig:
    """The config of an engine that generates nothing: texts have pages of their own, so that it has those of one
    sequence alone; a text that may not be cut is computed in one step. Raises ``RequestError``."""
    longest = config.max_model_len or max_positions
    speculates = config.speculation not in ("off", "auto")
    unused = "speculation" if speculates else config.handing_option
    if unused is not None:
        message = f"{unused} is {getattr(config, unused)!r}, but the model generates nothing: leave it out"
        raise RequestError(message, param=unused)
    num_blocks, step = config.num_blocks, config.max_num_batched_tokens
    if num_blocks is None and config.kv_cache_bytes is None:
        num_blocks = num_groups * (2 - (-longest // config.block_size))
    if not is_cut and step is not None and step < longest:
        message = f"max_num_batched_tokens={step} is below max_model_len={longest}: an encoder takes a text in one step"
        raise RequestError(message, param="max_num_batched_tokens")
    if not is_cut and step is None:
        step = max(CPU_BATCHED_TOKENS, longest, config.max_num_seqs)
    return replace(
        config, num_blocks=num_blocks, max_num_batched_tokens=step, enable_prefix_caching=False, speculation="off"
    )


def free_memory_bytes(device: Device) -> int:
    """Free bytes of a device's memory. An emulated device's memory is the host's."""
    if device.kind == "cpu":
        return available_memory_bytes()
    free, _ = Gpu.of(device).context.call("cuMemGetInfo")
    return int(free) if device.kind == "cuda" else min(int(free), available_memory_bytes())
