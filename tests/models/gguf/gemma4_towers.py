"""Gemma 4's files of text and tower, by the rules of llama.cpp's converter, of the tiny models with pictures."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.gguf.files import Array, write_gguf
from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import IMAGE, SEED, load_golden
from tests.models.vision.gemma4_cases import BEGIN, CASES, END

FRAME = {IMAGE: "<|image|>", BEGIN: "<|image>", END: "<image|>"}
_LANGUAGE = "model.language_model."


def golden_tensors(case: str) -> dict[str, Array]:
    return {name: golden_tensor(name, shape, SEED) for name, shape in load_golden(case).shapes.items()}


def write_text(path: Path, case: str, *, tokens: dict[int, str] = FRAME) -> Path:
    """The model's own file; `tokens` are those of its vocabulary that have names."""
    text = dict(CASES[case]["text_config"])
    full = {"head_dim": text["global_head_dim"]}
    if text.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = text["num_global_key_value_heads"]
    text |= {
        "model_type": "gemma4_text", "rms_norm_eps": 1e-6, "enable_moe_block": False,
        "hidden_size_per_layer_input": text.get("hidden_size_per_layer_input", 0),
        "num_kv_shared_layers": text.get("num_kv_shared_layers", 0),
        "use_double_wide_mlp": text.get("use_double_wide_mlp", False),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "per_layer_config": {
            str(layer): full for layer, kind in enumerate(text["layer_types"]) if kind == "full_attention"
        },
    }  # fmt: skip
    tensors = {
        name.replace(_LANGUAGE, "model."): each
        for name, each in golden_tensors(case).items()
        if name.startswith(_LANGUAGE) or (name == "lm_head.weight" and not CASES[case]["tie_word_embeddings"])
    }
    names = [tokens.get(index, f"<{index}>") for index in range(text["vocab_size"])]

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(names)
        writer.add_token_types([3 if index in tokens else 1 for index in range(len(names))])
        writer.add_token_merges([])
        writer.add_pad_token_id(text["pad_token_id"])

    return write_gguf(path, text, tensors, add_metadata=add_vocabulary)


def write_tower(path: Path, case: str, **changes: Any) -> Path:
    """The tower's file; `changes` replace keys, None leaves one out. The converter writes no `scale_factor`, since all
    published towers have 3; here it is 2."""
    vision, width = CASES[case]["vision_config"], CASES[case]["text_config"]["hidden_size"]
    is_map = "mm_embed_dim" in vision
    keys: dict[str, Any] = {
        "general.type": "mmproj", "clip.has_vision_encoder": True, "clip.vision.projection_dim": width,
        "clip.vision.image_size": 224, "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["mm_embed_dim" if is_map else "hidden_size"],
        "clip.vision.feed_forward_length": vision.get("intermediate_size", 0),
        "clip.vision.block_count": vision.get("num_hidden_layers", 0),
        "clip.vision.attention.head_count": vision.get("num_attention_heads", 0),
        "clip.vision.image_mean": [0.0] * 3, "clip.vision.image_std": [1.0] * 3,
        "clip.vision.projector_type": "gemma4uv" if is_map else "gemma4v",
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.has_audio_encoder": True,
        "clip.audio.projector_type": "gemma4ua", "clip.audio.block_count": 0,
        "clip.vision.projector.scale_factor": vision["pooling_kernel_size"], **changes,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    side = vision["patch_size"] * (vision["pooling_kernel_size"] if is_map else 1)
    for name, array in golden_tensors(case).items():
        if not name.startswith((_LANGUAGE, "lm_head")):
            writer.add_tensor(*(_of_map if is_map else _of_tower)(name, array, side))
    writer.add_tensor("mm.a.input_projection.weight", np.zeros((width, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _names() -> Any:
    """The names that llama.cpp's converter gives a tower's tensors."""
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)


def _of_tower(name: str, array: Array, side: int) -> tuple[str, Array]:
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("patch_embedder.input_proj.weight"):
        array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    bounds = tuple(f".{kind}_{end}" for kind in ("input", "output") for end in ("min", "max"))
    known = _names().get_name(name, try_suffixes=(".weight", ".bias", *bounds))
    assert known is not None, name
    return known, np.ascontiguousarray(np.atleast_1d(array))


def _of_map(name: str, array: Array, side: int) -> tuple[str, Array]:
    """By the published names, which differ from those of transformers' class."""
    if name.endswith("pos_embedding"):
        return "v.position_embd.weight", np.ascontiguousarray(array.swapaxes(0, 1))
    if re.search(r"patch_(dense\.weight|ln1\.)", name):  # pixels of a plane together
        array = np.ascontiguousarray(array.reshape(-1, side * side, 3).swapaxes(1, 2)).reshape(array.shape)
    stored = {
        "patch_dense": "v.patch_embd", "patch_ln1": "v.patch_norm.1", "patch_ln2": "v.patch_norm.2",
        "pos_norm": "v.patch_norm.3", "embedding_projection": "mm.input_projection",
    }  # fmt: skip
    part, kind = name.split(".")[-2:]
    return f"{stored[part]}.{kind}", array
