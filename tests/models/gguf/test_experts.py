"""Experts in GGUF: quantised files beside their dequantised twins, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.errors import ConfigError, ModelLoadError, WeightsError
from models.experts import Experts
from models.registry import declare_model, load_model
from runtime.linear.format import GGML_FORMATS
from tests.models.driver import logits_of, relative_error
from tests.models.folders import golden_tensors, load_golden, write_safetensors
from tests.models.gguf.files import Array, random_blocks, write_gguf
from tests.models.products import check_products

COUNT, HIDDEN, INNER = 5, 256, 512
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "num_experts_per_tok": 2, "num_experts": COUNT,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "sliding_window": None},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": INNER, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": INNER, "norm_topk_prob": True},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "norm_topk_prob": False},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "sliding_window": 8,
        "rope_parameters": {
            "rope_theta": 150000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": INNER, "n_routed_experts": COUNT,
        "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "use_qk_norm": False, "num_nextn_predict_layers": 0,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": COUNT, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 6.0,
    },
}  # fmt: skip


def matrices(kind: str) -> dict[str, tuple[int, ...]]:
    """Quantised matrices of a layer and their shapes."""
    under, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if kind == "mixtral":
        under, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (256, HIDDEN), "self_attn.k_proj": (128, HIDDEN), "self_attn.v_proj": (128, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 256),
    }  # fmt: skip
    if kind == "granitemoe":
        stacks = {"input_linear": (COUNT, 2 * INNER, HIDDEN), "output_linear": (COUNT, HIDDEN, INNER)}
        return found | {f"block_sparse_moe.{name}": shape for name, shape in stacks.items()}
    for expert in range(COUNT):
        found |= {f"{under}.experts.{expert}.{name}": (INNER, HIDDEN) for name in (gate, up)}
        found[f"{under}.experts.{expert}.{down}"] = (HIDDEN, INNER)
    if kind == "qwen2_moe":
        found |= {f"mlp.shared_expert.{name}_proj": (256, HIDDEN) for name in ("gate", "up", "down")}
    return found


def floats_of(kind: str, rng: np.random.Generator) -> dict[str, Array]:
    """Routers, norms, biases and sinks of a layer."""
    router = {
        "mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router", "granitemoe": "block_sparse_moe.router.layer",
    }.get(kind, "mlp.gate")  # fmt: skip
    found = {f"{router}.weight": rng.standard_normal((COUNT, HIDDEN))}
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
    if kind in ("qwen3_moe", "olmoe"):
        sizes = (64, 64) if kind == "qwen3_moe" else (256, 128)
        for name, size in zip("qk", sizes, strict=True):
            found[f"self_attn.{name}_norm.weight"] = rng.uniform(0.5, 1.5, size)
    if kind == "qwen2_moe":
        found["mlp.shared_expert_gate.weight"] = rng.standard_normal((1, HIDDEN)) / 16
    biased = ("q", "k", "v", "o") if kind == "gpt_oss" else ("q", "k", "v") if kind == "qwen2_moe" else ()
    for name in biased:
        found[f"self_attn.{name}_proj.bias"] = rng.uniform(-0.2, 0.2, matrices(kind)[f"self_attn.{name}_proj"][0])
    if kind == "gpt_oss":
        found |= {"self_attn.sinks": rng.uniform(-1, 1, 4), f"{router}.bias": rng.uniform(-1, 1, COUNT)}
        for name, shape in matrices(kind).items():
            if ".experts." in name:
                found[f"{name}.bias"] = rng.uniform(-0.2, 0.2, shape[0])
    return {name: array.astype(np.float32) for name, array in found.items()}


def write_twins(folder: Path, kind: str, type_of: Callable[[str], Ggml]) -> tuple[Path, Path]:
    """A quantised GGUF file, and a folder of the floats that it stands for, by the `gguf` package. `type_of` gets a
    matrix' name in the folder."""
    rng, config = np.random.default_rng(7), {**CONFIG, **KINDS[kind], "model_type": kind}
    blocks: dict[str, Array] = {}
    floats: dict[str, Array] = {"model.norm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)}
    shapes = {"model.embed_tokens": (96, HIDDEN)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in matrices(kind).items()}
        floats |= {f"model.layers.{layer}.{name}": array for name, array in floats_of(kind, rng).items()}
    for name, shape in shapes.items():
        blocks[f"{name}.weight"] = random_blocks(rng, type_of(name), shape, scale=0.02)
        floats[f"{name}.weight"] = gguf.dequantize(blocks[f"{name}.weight"], type_of(name))
    twin = folder / "twin"
    twin.mkdir()
    (twin / "config.json").write_text(json.dumps(config))
    write_safetensors(twin / "model.safetensors", floats)

    def stored_type_of(name: str) -> Ggml:
        ours = {"ffn_down_exps": ".experts.0.down_proj", "ffn_gate_exps": ".experts.0.gate_proj"}
        return type_of(next((theirs for part, theirs in ours.items() if part in name), name))

    path = write_gguf(folder / "model.gguf", config, {**floats, **blocks}, type_of=stored_type_of)
    return path, twin


def all_of(ggml: Ggml) -> Callable[[str], Ggml]:
    return lambda name: ggml


def as_published(name: str) -> Ggml:
    """gpt-oss: experts in MXFP4, all else in Q8_0."""
    return Ggml.MXFP4 if "exps" in name or "experts" in name else Ggml.Q8_0


def mixed(name: str) -> Ggml:
    """As Q4_K_M has them: down in another type than gate and up."""
    return Ggml.Q6_K if "experts" in name and "down_proj" in name else Ggml.Q4_K


QUANTISED = [("gpt_oss", as_published)]
RARELY = [
    ("olmoe", all_of(Ggml.Q2_K)),
    ("qwen3_moe", all_of(Ggml.Q4_0)), ("qwen2_moe", mixed),
    ("mixtral", all_of(Ggml.Q8_0)), ("mixtral", all_of(Ggml.Q4_1)), ("qwen3_moe", all_of(Ggml.Q5_K)),
    ("olmoe", all_of(Ggml.Q5_1)), ("qwen3_moe", all_of(Ggml.Q5_0)), ("olmoe", all_of(Ggml.IQ4_NL)),
    ("granitemoe", all_of(Ggml.Q5_0)),
]  # fmt: skip
"""Their kernels take seconds to compile."""


def cases() -> list[Any]:
    return [
        pytest.param(
            kind, type_of, id=f"{kind}-{type_of('.experts.').name}",
            marks=[pytest.mark.exhaustive] if (kind, type_of) in RARELY else [],
        )
        for kind, type_of in QUANTISED + RARELY
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "type_of"), cases())
@pytest.mark.exhaustive_cases("gpt_oss")
def test_quantised_is_its_dequantised_twin(tmp_path: Path, kind: str, type_of: Callable[[str], Ggml]) -> None:
    path, folder = write_twins(tmp_path, kind, type_of)
    ids = list(range(3, 24))
    twin = logits_of(load_model(folder), ids)
    np.testing.assert_array_equal(logits_of(load_model(path, dtype="float32"), ids), twin)
    kept = load_model(path)
    assert declare_model(path).weight_bytes == kept.weight_bytes
    ggml = type_of(".experts.0.up_proj").name
    if ggml not in GGML_FORMATS:
        np.testing.assert_array_equal(logits_of(kept, ids), twin)
        return
    for layer in kept.layers:  # type: ignore[attr-defined]
        assert isinstance(layer.mlp, Experts)
        parts = layer.mlp.gate_up.parts
        assert {part.format.name for each in parts for part in each} == {ggml}
    check_products(kept, ids, twin)
    errors = [relative_error(row, other) for row, other in zip(logits_of(kept, ids), twin, strict=True)]
    assert 0 < np.median(errors) < 0.15  # activations are rounded; where two experts are as good, another is chosen
    whole, alone = logits_of(kept, ids), logits_of(kept, ids, [1] * len(ids))
    np.testing.assert_array_equal(whole, alone)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kind", "type_of"),
    [pytest.param("qwen3_moe", all_of(Ggml.Q4_0), marks=pytest.mark.exhaustive), ("gpt_oss", as_published)],
)
@pytest.mark.exhaustive
def test_on_a_gpu_experts_become_floats(tmp_path: Path, kind: str, type_of: Callable[[str], Ggml]) -> None:
    path, folder = write_twins(tmp_path, kind, type_of)
    ids = list(range(3, 12))
    found = logits_of(load_model(path, device="emulated:sm_90a", dtype="float32"), ids)
    assert relative_error(found, logits_of(load_model(folder), ids)) < 1e-4


WRONG: list[tuple[dict[str, Any], type[ModelLoadError], str]] = [
    ({"qwen3moe.expert_count": 12}, WeightsError, r"'blk.0.ffn_\w+_exps.weight' is \[11, .*\], but expert_count is 12"),
    ({"qwen3moe.expert_count": None}, ConfigError, "qwen3moe.expert_count is missing"),
    ({"qwen3moe.expert_used_count": 12}, ConfigError, "num_experts_per_tok = 12 must be at most num_experts = 11"),
    ({"qwen3moe.expert_used_count": 0}, ConfigError, "qwen3moe.expert_used_count must be from 1 to"),
    ({"qwen3moe.expert_feed_forward_length": 8}, WeightsError, "'blk.0.ffn_gate_exps.weight' is .* asks for"),
    ({"qwen3moe.expert_group_count": 2}, ConfigError, "qwen3moe.expert_group_count = 2 is not supported"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[case[2][:40] for case in WRONG])
def test_what_does_not_fit_is_refused_by_key_or_tensor(
    tmp_path: Path, changes: dict[str, Any], error: type[ModelLoadError], message: str
) -> None:
    golden = load_golden("qwen3_moe_odd")
    config = json.loads((golden.folder / "config.json").read_text())
    path = write_gguf(tmp_path / "model.gguf", config, golden_tensors(golden), add_metadata=changing(changes))
    with pytest.raises(error, match=message):
        declare_model(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As in published files of GLM-4.5, whose `block_count` counts them; others were written without."""
    golden = load_golden("glm4_moe_groups")
    config, tensors = json.loads((golden.folder / "config.json").read_text()), golden_tensors(golden)
    layer, hidden = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    further = {name.replace("layers.2", "layers.3"): array for name, array in tensors.items() if "layers.2" in name}
    assert all(name.startswith(layer) for name in further)
    further[f"{layer}.eh_proj.weight"] = np.zeros((hidden, 2 * hidden), np.float32)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        further[f"{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    for name in ("embed_tokens", "shared_head.head"):
        further[f"{layer}.{name}.weight"] = np.zeros((config["vocab_size"], hidden), np.float32)
    whole = write_gguf(tmp_path / "whole.gguf", config, {**tensors, **further})
    alone = write_gguf(tmp_path / "alone.gguf", config, tensors)
    ids = golden.prompt_ids
    np.testing.assert_array_equal(logits_of(load_model(whole), ids), logits_of(load_model(alone), ids))


WRONG_GLM: list[tuple[dict[str, Any], str]] = [
    ({"glm4moe.expert_gating_func": 1}, "glm4moe.expert_gating_func = 1 is not supported"),
    ({"glm4moe.nextn_predict_layers": 4}, "glm4moe.nextn_predict_layers = 4 must be below block_count 4"),
    ({"glm4moe.expert_group_count": 4}, "n_group = 4 must divide n_routed_experts = 9"),
    ({"glm4moe.expert_shared_count": None}, "glm4moe.expert_shared_count is missing"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_GLM, ids=[case[1][:40] for case in WRONG_GLM])
def test_glms_keys_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    golden = load_golden("glm4_moe_groups")
    config = json.loads((golden.folder / "config.json").read_text())
    path = write_gguf(tmp_path / "model.gguf", config, golden_tensors(golden), add_metadata=changing(changes))
    with pytest.raises(ConfigError, match=message):
        declare_model(path)


def changing(changes: dict[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    """What sets these keys once the others are there; None leaves one out."""

    def change(writer: gguf.GGUFWriter) -> None:
        keys = writer.kv_data[0]
        for key, value in changes.items():
            keys.pop(key, None)
            if value is not None:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return change


def test_a_damaged_expert_is_named(tmp_path: Path) -> None:
    path, _ = write_twins(tmp_path, "qwen3_moe", all_of(Ggml.Q8_0))
    raw = gguf.GGUFReader(path, "r+")
    stored = next(each for each in raw.tensors if each.name == "blk.1.ffn_up_exps.weight")
    stored.data[3, 10, 34:36] = 0xFF  # a scale of NaN
    raw.data.flush()
    with pytest.raises(WeightsError, match=r"'blk.1.ffn_up_exps.weight': expert 3, block 81 has a scale"):
        load_model(path)
