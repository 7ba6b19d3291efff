"""Tiny DFlash and DSpark drafters, and the Qwen3 that they are for (`tools/references/make_dflash_goldens.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.folders import Array, write_safetensors
from tests.models.golden_weights import golden_tensor

FOLDER = Path(__file__).parent / "dflash"
NUM_TOKENS = 11
"""Hidden states of an expectation: as many contexts have a block behind them."""

HIDDEN, VOCAB, TARGET_SEED = 16, 40, 7

_SIZES: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 100.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32",
}  # fmt: skip
TARGET: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], **_SIZES, "num_hidden_layers": 4}
_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], **_SIZES, "block_size": 5, "num_target_layers": 4, "use_cache": True,
}  # fmt: skip
_OWN: dict[str, Any] = {"mask_token_id": 39, "target_layer_ids": [0, 2]}

CASES: dict[str, dict[str, Any]] = {
    "dflash": {**_DFLASH, "dflash_config": _OWN, "attention_bias": True},
    "dflash_swa": {**_DFLASH, "dflash_config": {**_OWN, "use_swa": True, "swa_window_size": 4}},
    "dflash_causal": {
        **_DFLASH, "dflash_config": _OWN, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True,
        "sliding_window": 6,
    },
    "dspark": {
        **_SIZES, "architectures": ["Qwen3DSparkModel"], "num_target_layers": 4, "block_size": 4, "mask_token_id": 38,
        "target_layer_ids": [-1, 1, 2], "num_anchors": 8, "markov_rank": 8, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    },
}  # fmt: skip
"""Their configs, as z-lab and DeepSpec write them."""

LAYERS = {"dflash": (1, 3), "dflash_swa": (1, 3), "dflash_causal": (1, 3), "dspark": (0, 2, 3)}


def _layers(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(config["num_hidden_layers"]):
        maps = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        own: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": shape for name, shape in maps.items()}
        if config.get("attention_bias"):
            own |= {f"self_attn.{name}.bias": shape[:1] for name, shape in maps.items()}
        own |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        own |= {f"mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        own |= {"mlp.down_proj.weight": (hidden, inner)}
        own |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}layers.{index}.{name}": shape for name, shape in own.items()}
    return shapes


def target_tensors(config: dict[str, Any] = TARGET) -> dict[str, Array]:
    shapes = _layers("model.", config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes |= {"model.norm.weight": (hidden,), "model.embed_tokens.weight": (vocab, hidden)}
    shapes["lm_head.weight"] = vocab, hidden
    return {name: golden_tensor(name, shape, TARGET_SEED) for name, shape in shapes.items()}


def draft_tensors(config: dict[str, Any]) -> dict[str, Array]:
    """What its checkpoint has: DeepSpec's have a table and a head of their own."""
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config.get("markov_rank", 0)
    ids = config.get("dflash_config", config)["target_layer_ids"]
    shapes = _layers("", config)
    shapes |= {"fc.weight": (hidden, hidden * len(ids)), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    return {name: golden_tensor(name, shape, 3) for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """A folder of both."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_target(folder: Path) -> Path:
    return write(folder, TARGET, target_tensors())


def write_drafter(folder: Path, case: str) -> Path:
    return write(folder, CASES[case], draft_tensors(CASES[case]))


def given(case: str) -> tuple[Array, Array]:
    """Hidden states behind each layer that the case reads, side by side, and the token behind each of them."""
    states = golden_tensor(f"{case}.states.given", (NUM_TOKENS, HIDDEN * len(LAYERS[case])), 5)
    raw = np.random.PCG64(sorted(CASES).index(case)).random_raw(NUM_TOKENS)
    return 4.0 * states, (raw % np.uint64(VOCAB)).astype(np.int32)


CYCLE = 32
"""Tokens of the text that `write_cycle` goes on with."""


def write_cycle(folder: Path) -> tuple[Path, Path]:
    """A model that counts, token t + 1 behind t and 0 behind the last one, and a drafter for it that has learnt nothing
    of that: it says what stood a cycle before. It is right where positions are, and the context is long enough."""
    sizes = {**_SIZES, "vocab_size": CYCLE, "hidden_size": CYCLE, "num_attention_heads": 1, "head_dim": CYCLE}
    config = {**sizes, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3}
    tensors = target_tensors(config)
    one = np.eye(CYCLE, dtype=np.float32)
    for name, array in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[:] = 0.0
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = one, np.roll(one, 1, 0)
    tensors["model.norm.weight"][:] = 1.0
    draft = {
        **sizes, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "block_size": 8, "attention_bias": True,
        "dflash_config": {"mask_token_id": CYCLE - 1, "target_layer_ids": [0]},
    }  # fmt: skip
    own = draft_tensors(draft)
    for name, array in own.items():
        array[:] = 1.0 if name.endswith("norm.weight") else 0.0
    own["fc.weight"] = own["layers.0.self_attn.v_proj.weight"] = own["layers.0.self_attn.o_proj.weight"] = one
    # A key is turned by its position s, a query by its own p less this distance: they agree most where s is that.
    angles = (CYCLE + 1) * 100.0 ** (-np.arange(CYCLE // 2) / (CYCLE // 2))
    own["layers.0.self_attn.k_proj.bias"][:] = 1.0
    turned = np.cos(angles) + np.sin(angles), np.cos(angles) - np.sin(angles)
    own["layers.0.self_attn.q_proj.bias"][:] = np.concatenate(turned)
    own["layers.0.self_attn.q_norm.weight"][:] = 40.0
    return write(folder / "model", config, tensors), write(folder / "drafter", draft, own)
