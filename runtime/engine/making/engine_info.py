"""`EngineInfo` of an engine over a model, with the parts that are read from its folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.base import Model
from models.configuration.generation_config import load_end_ids
from models.configuration.preprocessing import read_line_ends
from models.sentence_transformers import pooling_info, read_layout
from runtime.engine.config import EngineConfig
from runtime.engine.limits import EngineLimits
from runtime.engine.logits.processors import shown
from runtime.engine.making.drafters import Draft, draft_bytes_per_block
from runtime.engine.messages import CacheGroupInfo, EngineInfo, ImageSupport, PoolInfo, RankInfo
from runtime.engine.steps.pictures import PictureModel, RotatingModel

logger = logging.getLogger("xserv.engine")


KEPT_PICTURE_BYTES = 512 << 20
"""Device memory for the embeddings of images, those of open requests included."""


def engine_info(
    model: Model, folder: Path, config: EngineConfig, limits: EngineLimits, name: str, draft: Draft | None,
    of_ranks: Sequence[int],
) -> EngineInfo:  # fmt: skip
    """`of_ranks` are the bytes of each rank's weights."""
    spec = model.kv_cache_spec(config.block_size)
    draft_bytes = draft_bytes_per_block(draft, config)
    block_bytes = [sum(each) + draft_bytes for each in zip(*bytes_of_ranks(model, config), strict=True)]
    pools = tuple(map(PoolInfo, limits.pool_sizes, block_bytes))
    return EngineInfo(
        model_name=name,
        model_path=str(folder),
        architecture=model.config.architecture,
        device=str(model.device),
        dtype=model.dtype.name,
        quantization=model.quantization,
        kv_cache_dtype=spec.dtype.name,
        vocab_size=model.config.vocab_size,
        # An encoder needs none, and its tokenizer may be half of its start.
        eos_token_ids=_eos_token_ids(folder, config.hf_overrides, model.config.vocab_size) if model.generates else (),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_waiting=limits.max_waiting,
        max_waiting_tokens=limits.max_waiting_tokens,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        kv_cache_bytes=sum(pool.num_blocks * pool.block_bytes for pool in pools),
        weight_bytes=sum(of_ranks) + (0 if draft is None else draft.weight_bytes),
        mapped_bytes=model.mapped_bytes,
        scheduling_policy=config.scheduling_policy,
        cache_groups=tuple(
            CacheGroupInfo(group.kind, len(group.layers), group.num_padding, group.pool)
            for group in replace(spec, own_layers=None).groups
        ),
        pools=pools,
        images=_image_support(model, folder, limits),
        longrope_threshold=limits.longrope_threshold,
        ranks=_ranks(model, config, limits, of_ranks),
        pooling=pooling_info(model, folder, read_layout(folder)),
        exact=config.exact,
        logits_processors=tuple(map(shown, config.logits_processors)),
        logprobs_mode=config.logprobs_mode,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
    )


def _ranks(model: Model, config: EngineConfig, limits: EngineLimits, of_ranks: Sequence[int]) -> tuple[RankInfo, ...]:
    """The part of each of several ranks."""
    if config.num_ranks == 1:
        return ()
    stages = model.stages or (model.own_layers,)
    places = [(stage, own) for stage, own in enumerate(stages) for _ in range(config.tensor_parallel_size)]
    return tuple(
        RankInfo(
            number,
            stage,
            own.start,
            own.stop,
            weight_bytes,
            sum(count * size for count, size in zip(limits.pool_sizes, sizes, strict=True)),
        )
        for number, ((stage, own), weight_bytes, sizes) in enumerate(
            zip(places, of_ranks, bytes_of_ranks(model, config), strict=True)
        )
    )


def bytes_of_ranks(model: Model, config: EngineConfig) -> list[tuple[int, ...]]:
    """Bytes of one block of each pool in the memory of each rank; the model may be of any stage."""
    spec = model.kv_cache_spec(config.block_size)
    of_stages = [replace(spec, own_layers=own).block_bytes for own in model.stages] or [spec.block_bytes]
    return [sizes for sizes in of_stages for _ in range(config.tensor_parallel_size)]


def reads_pictures(model: PictureModel, folder: Path) -> bool:
    """Reads the tokens that end lines of a model's images; returns whether it accepts images. Raises `ConfigError`."""
    if model.line_ends is None:
        return True
    model.line_ends = read_line_ends(folder, model.line_ends)
    return model.line_ends is not None


def _image_support(model: Model, folder: Path, limits: EngineLimits) -> ImageSupport | None:
    """How the model reads images, or None if it does not."""
    if not isinstance(model, PictureModel) or not reads_pictures(model, folder):
        return None
    return ImageSupport(
        token_id=model.image_token_id,
        rule=model.patch_rule,
        max_tokens=max(1, KEPT_PICTURE_BYTES // model.bytes_per_picture_token),
        has_axes=isinstance(model, RotatingModel),
        frame=model.frame,
        frame_sign=model.frame_sign,
        line_ends=model.line_ends,
        most_whole=limits.most_whole,
    )


def _eos_token_ids(folder: Path, overrides: str, vocab_size: int) -> tuple[int, ...]:
    """The model's end-of-sequence ids, without those outside its vocabulary, which are never sampled."""
    given = load_end_ids(folder, overrides)
    kept = tuple(token_id for token_id in given if token_id < vocab_size)
    if kept != given:
        outside = [token_id for token_id in given if token_id not in kept]
        logger.warning(
            "eos_token_id %s of %s: not in the vocabulary of %d tokens, left out", outside, folder, vocab_size
        )
    return kept
