"""Names the operation that is missing for a model of an unknown architecture, by the fields of its config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_BY_FIELDS = {
    r"linear_attn_config": "a delta rule with a decay for each channel (KDA)",
    r"mamba_dt_rank": "state-space layers before Mamba-2 (Mamba-1)",
    r"attention_hidden_size|rescale_every": "recurrent layers (RWKV)",
    r"index_(topk|n_heads|head_dim)": "sparse attention to keys that an indexer chooses (DSA)",
    r"sparse_attention_config": "block-sparse attention",
    r"compress_ratios": "attention to compressed keys",
    r"hc_mult": "several residual streams (hyper-connections)",
    r"attn_res_block_size": "attention over the residuals of earlier layers",
    r"attention_chunk_size": "attention within chunks",
    r"swa_(head_dim|num_.*)": "layers whose heads differ in number or size",
    r"altup_num_inputs": "several residual streams that predict each other (AltUp)",
    r"block_configs": "layers that differ in shape, or have no attention",
    r"is_encoder_decoder": "attention of a decoder to an encoder",
    r"alibi": "positions as a slope of scores (ALiBi)",
    r"audio_config": "an encoder of sounds",
}
_BY_NAME = {
    r".*For((Sequence|Token)Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction)|"
    r".*(Reward|Reranking).*": "a head that classifies",
    r".*ForMaskedLM|.*(?i:bert|electra|mpnet).*": "an encoder of its kind",
}


def missing_operations(config: Mapping[str, Any]) -> str:
    """A sentence that names what is not implemented, for a message, without its full stop."""
    if "backbone_hidden_size" in config:
        return "It is a drafter: give its model, and --speculation mtp:FOLDER with this folder"
    found = list(dict.fromkeys(_found(config)))
    if found:
        return f"Not implemented here: {'; '.join(found)}"
    if config.get("vision_config"):
        return "Not implemented here: a picture tower of its kind (vision_config)"
    return (
        "Not implemented here: its family, though its config names no missing operation. If it is a supported model"
        ' under another name, name that: --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\''
    )


def _found(config: Mapping[str, Any]) -> Iterator[str]:
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        for pattern, operation in _BY_FIELDS.items():
            if any(value and re.fullmatch(pattern, name) for name, value in fields.items()):
                yield operation
    for pattern, operation in _BY_NAME.items():
        if any(re.fullmatch(pattern, str(name)) for name in config.get("architectures") or ()):
            yield operation
