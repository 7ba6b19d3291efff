"""The drafter that a config names, loaded or declared: its bytes, and the speculator over it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from models.base import Model
from models.checkpoints.hub import resolve_model
from models.drafters.hidden_state_drafter import BlockDrafter, PageDrafter, PairDrafter
from models.drafters.mtp import load_mtp
from models.gguf.mmproj import NONE as NO_MMPROJ
from models.registry import declare
from runtime.engine.config import DFLASH_PREFIX, EAGLE3_PREFIX, MTP_PREFIX, OWN_DRAFTER, EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.limits import EngineLimits
from runtime.engine.making.load_settings import load_settings
from runtime.engine.speculation.draft_model import MOST_STATES, PAGES_OF_STATE, DraftModelDrafter
from runtime.engine.speculation.drafter import Drafter
from runtime.engine.speculation.ngram import NgramDrafter, SuffixDrafter
from runtime.engine.speculation.page_proposer import PageProposer
from runtime.engine.speculation.speculator import Speculator
from runtime.engine.speculation.state_proposer import StateProposer
from runtime.engine.steps.executor import Executor
from runtime.engine.steps.local_executor import LocalExecutor
from runtime.kv.kinds import State
from runtime.later import later
from runtime.linear.options import LoadSettings

logger = logging.getLogger("xserv.engine")


_dflash, _eagle3 = later("models.drafters.dflash"), later("models.drafters.eagle3")
_assistants = later("models.drafters.gemma4_assistant")  # it imports a family


Draft = Model | PairDrafter | BlockDrafter | PageDrafter
"""A drafter with weights of its own, and pages, unless it is an assistant."""


def drafter_of(config: EngineConfig, target: Model, folder: Path, *, declares: bool = False) -> Draft | None:
    """The drafter that the config names, loaded or declared, or None if it has no weights. Raises as `load_model` and
    the loader of drafters, and ``RequestError`` if it does not fit the target of that folder."""
    if config.draft_model is not None:
        return draft_model(config, target, folder, declares=declares)
    if not config.reads_hidden_states:
        return None
    settings = _settings_of_another_model(config)
    settings["quantization"], settings["kv_cache_dtype"], settings["kv_cache_dtype_skip_layers"] = "none", "auto", ""
    how: dict[str, Any] = {
        "max_model_len": config.max_model_len, "load_format": config.load_format, "seed": config.seed or 0,
        "declares": declares, **settings,
    }  # fmt: skip
    if config.speculation == "mtp":
        return load_mtp(folder, target, **{**how, "mmproj": config.mmproj})
    if config.speculation.startswith(DFLASH_PREFIX):
        drafter_folder = resolve_model(config.speculation.removeprefix(DFLASH_PREFIX))
        block_drafter: BlockDrafter = _dflash.load_dflash(drafter_folder, target, **how)
        return block_drafter
    if config.speculation.startswith(MTP_PREFIX):
        folder = resolve_model(config.speculation.removeprefix(MTP_PREFIX))
        assistant: PageDrafter = _assistants.load_assistant(folder, target, **how)
        return assistant
    if config.speculation != "eagle3":
        drafter = resolve_model(config.speculation.removeprefix(EAGLE3_PREFIX))
    elif not (drafter := folder / OWN_DRAFTER).is_dir():
        raise RequestError(
            f"speculation is 'eagle3', but {folder} has no folder {OWN_DRAFTER!r}: name one, {EAGLE3_PREFIX}FOLDER",
            param="speculation",
        )
    pair_drafter: PairDrafter = _eagle3.load_eagle3(drafter, target, **how)
    return pair_drafter


def _settings_of_another_model(config: EngineConfig) -> LoadSettings:
    """`load_settings` of a drafter: overrides apply to the model's own config alone, and a drafter reads text."""
    settings = load_settings(config)
    del settings["hf_overrides"]
    settings["pending_tokens"], settings["state_dtype"] = 0, "float32"
    settings["mmproj"] = NO_MMPROJ
    return settings


def draft_model(config: EngineConfig, target: Model, folder: Path, *, declares: bool) -> Model:
    """The draft model that the config names, for a target of that folder; without its weights if it is only declared.
    Raises as `load_model`, and ``RequestError`` if the vocabularies differ."""
    draft_folder = resolve_model(config.draft_model)
    settings = _settings_of_another_model(config)
    declared = declare(draft_folder, load_format=config.load_format, seed=config.seed or 0, **settings)
    check_draft(declared.model, draft_folder, target, folder)
    if declares:
        return declared.model
    length = min(declared.model.max_positions, config.max_model_len or target.max_positions)
    logger.info("loading the draft model %s on %s", draft_folder, settings["device"])
    return declared.load(max_model_len=length)


def check_draft(draft: Model, draft_folder: Path, target: Model, folder: Path) -> None:
    """Raises ``RequestError`` unless both models have the same vocabulary."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"speculation: the draft model {draft_folder} has a vocabulary of {sizes[0]} tokens, {folder} has "
            f"{sizes[1]}: both must have the same",
            param="speculation",
        )
    files = draft_folder / "tokenizer.json", folder / "tokenizer.json"
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    vocabularies = [json.loads(file.read_bytes()).get("model", {}).get("vocab") for file in files]
    if vocabularies[0] != vocabularies[1]:
        raise RequestError(
            f"speculation: the draft model {draft_folder} has other tokens than {folder}, in a vocabulary of the same "
            f"size, {sizes[0]}",
            param="speculation",
        )


def draft_bytes_per_block(draft: Draft | None, config: EngineConfig) -> int:
    """A draft model has as many pages as the target in each of its cache groups."""
    if draft is None or isinstance(draft, PageDrafter):
        return 0
    spec = draft.kv_cache_spec(config.block_size)
    return spec.bytes_per_token * spec.block_size


def draft_state_bytes(draft: Draft | None, config: EngineConfig) -> int:
    """A draft model's recurrent states lie beside the blocks."""
    if draft is None or isinstance(draft, PageDrafter):
        return 0
    num_bytes = draft.kv_cache_spec(config.block_size).state_bytes
    return num_bytes * PAGES_OF_STATE * min(MOST_STATES, config.max_num_seqs)


def speculator_of(
    config: EngineConfig, vocab_size: int, limits: EngineLimits, draft: Draft | None, executor: Executor
) -> Speculator | None:
    """The proposer of draft tokens that the config names, or None."""
    if config.speculation == "off" or (State() in limits.cache_kinds and not config.pending_tokens):
        return None
    drafter: Drafter | None = None
    if isinstance(draft, PageDrafter):
        assert isinstance(executor, LocalExecutor), "the config was checked"
        pages, tables = executor.kv_cache, executor.rows.tables
        drafter = PageProposer(draft, pages, tables, limits, config.num_speculative_tokens)
    elif draft is not None and not isinstance(draft, Model):
        drafter = StateProposer(draft, limits, limits.num_blocks, config.num_speculative_tokens)
    elif draft is not None:
        rejects = config.speculation_acceptance == "rejection"
        drafter = DraftModelDrafter(
            draft, draft.max_positions, draft.longrope_threshold, limits, limits.num_blocks, rejects=rejects
        )
    elif config.speculation != "auto":
        drafter = NgramDrafter() if config.speculation == "ngram" else SuffixDrafter()
    return Speculator(drafter, config.num_speculative_tokens, vocab_size)
