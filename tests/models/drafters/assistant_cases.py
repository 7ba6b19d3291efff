"""Assistants of golden Gemma 4 models, and their folders (`tools/references/make_assistant_goldens.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.folders import Array, golden_tensors, load_golden, write_safetensors
from tests.models.golden_weights import golden_tensor

FOLDER = Path(__file__).parent / "assistant"
TARGETS = {"keys": "gemma4_keys_odd", "inputs": "gemma4_inputs_odd", "groups": "gemma4_inputs_odd"}
"""The golden model of each case: whose values are its keys; whose last layers use others' pages; the same, with a head
that asks groups of tokens."""

NUM_STEPS, SEED = 4, 11
LENGTHS = (2, 3, 4, 5, 6, 13, 20)
"""Known tokens of which each expectation drafts on; windows have 4."""

_WINDOW, _FULL = "sliding_attention", "full_attention"


def target_config(case: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((load_golden(TARGETS[case]).folder / "config.json").read_text(encoding="utf-8"))
    return config


def assistant_config(case: str) -> dict[str, Any]:
    """As transformers writes it."""
    return config_for(target_config(case), num_groups=61 if case == "groups" else 0)


def config_for(target: dict[str, Any], num_groups: int = 0) -> dict[str, Any]:
    """The config of an assistant for a decoder with this one."""
    names = (
        "vocab_size", "head_dim", "num_key_value_heads", "sliding_window", "attention_k_eq_v", "rope_parameters",
        "global_head_dim", "num_global_key_value_heads",
    )  # fmt: skip
    sizes, count = {name: target[name] for name in names if name in target}, 4
    if "per_layer_config" in target:
        sizes["per_layer_config"] = {str(count - 1): target["per_layer_config"]["1"]}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "dtype": "float32",
        "backbone_hidden_size": target["hidden_size"], "use_ordered_embeddings": num_groups > 0,
        "num_centroids": num_groups or 2048, "centroid_intermediate_top_k": 9, "tie_word_embeddings": True,
        "text_config": {
            **sizes, "model_type": "gemma4_text", "hidden_size": 24, "intermediate_size": 37,
            "num_hidden_layers": count, "num_attention_heads": 4, "num_kv_shared_layers": count,
            "layer_types": [_WINDOW, _WINDOW, _WINDOW, _FULL], "max_position_embeddings": 128,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "final_logit_softcapping": None,
        },
    }  # fmt: skip


def assistant_tensors(case: str) -> dict[str, Array]:
    """What its checkpoint has."""
    return tensors_of(assistant_config(case))


def tensors_of(config: dict[str, Any]) -> dict[str, Array]:
    """What the checkpoint of an assistant with this config has."""
    text = config["text_config"]
    hidden, inner, width = text["hidden_size"], text["intermediate_size"], config["backbone_hidden_size"]
    vocab, heads = text["vocab_size"], text["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * width), "post_projection.weight": (width, hidden),
    }  # fmt: skip
    for index in range(text["num_hidden_layers"]):
        size = text.get("per_layer_config", {}).get(str(index), text)["head_dim"]
        if "global_head_dim" in text and text["layer_types"][index] == _FULL:
            size = text["global_head_dim"]
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (heads * size, hidden), "self_attn.q_norm.weight": (size,),
            "self_attn.o_proj.weight": (hidden, heads * size), "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner), "layer_scalar": (1,),
        }  # fmt: skip
        norms = "input", "post_attention", "pre_feedforward", "post_feedforward"
        own |= {f"{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    tensors = {name: golden_tensor(name, shape, SEED) for name, shape in shapes.items()}
    if config["use_ordered_embeddings"]:
        groups = config["num_centroids"]
        name = "masked_embedding.centroids.weight"
        tensors[name] = golden_tensor(name, (groups, hidden), SEED)
        tensors["masked_embedding.token_ordering"] = np.arange(vocab)[::-1] * 7 % vocab
    return tensors


def write_assistant(folder: Path, case: str, **changes: Any) -> Path:
    """A drafter's folder; ``changes`` are of its tensors, `...` for one that is left out."""
    return _write(folder, assistant_config(case), {**assistant_tensors(case), **changes})


def write_assistant_for(folder: Path, model: Path) -> Path:
    """A drafter's folder, for the model in another."""
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config_for(fields.get("text_config", fields))
    return _write(folder, config, tensors_of(config))


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", {name: x for name, x in tensors.items() if x is not ...})
    return folder


def write_copies(folder: Path, case: str, *, share: float = 0.0) -> tuple[Path, Path]:
    """A model whose layers add nothing, so that the last token says the next one, and an assistant that says the
    same. ``share``: both's layers add so much of what they would, so that it is wrong now and then."""
    golden, config = load_golden(TARGETS[case]), assistant_config(case)
    tensors, own = golden_tensors(golden), assistant_tensors(case)
    width = config["backbone_hidden_size"]
    config["text_config"]["hidden_size"] = width
    for name, array in tensors.items():
        if name.endswith(("_layernorm.weight", "post_per_layer_input_norm.weight")):
            is_before = ".input_layernorm" in name or ".pre_feedforward" in name
            array *= 1.0 if is_before else share
        elif name.endswith("layer_scalar"):
            array[:] = 1.0
    for name, array in list(own.items()):
        shape = tuple(width if size == 24 else size for size in array.shape)
        own[name] = array = golden_tensor(name, shape, SEED) if array.dtype == np.float32 else array
        if "post_" in name and name.endswith("_layernorm.weight"):
            array *= share
        elif name.endswith("layer_scalar"):
            array[:] = 1.0
    table = tensors["model.embed_tokens.weight"]
    own["model.embed_tokens.weight"], own["model.norm.weight"] = table, tensors["model.norm.weight"]
    own["pre_projection.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    if config["use_ordered_embeddings"]:  # a group a token
        own["masked_embedding.centroids.weight"] = table[own["masked_embedding.token_ordering"]]
    return _write(folder / "model", target_config(case), tensors), _write(folder / "drafter", config, own)


def write_wide(folder: Path) -> tuple[Path, Path]:
    """Configs of a model with heads as long as the published ones, of 256 in layers with windows and 512 in others, the
    last of which use pages of earlier ones; and of its assistant. Weights are dummies."""
    target = target_config("inputs")
    wide = {key: {"head_dim": 512} for key in target["per_layer_config"]}
    target |= {"head_dim": 256, "sliding_window": 24, "per_layer_config": wide, "num_attention_heads": 4}
    for name, config in (("model", target), ("drafter", config_for(target))):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "model", folder / "drafter"
