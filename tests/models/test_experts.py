"""Mixtures of experts at their extremes, and checkpoints that do not fit.

A mixture whose experts are all one dense model's MLP is that model, however many experts there are and are chosen, if
their weights add up to 1; so is one whose tokens all go to the one expert that has this MLP, while the others hold NaN.
So transformers' logits of dense models are the reference here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.weight_files import open_checkpoint
from models.errors import ConfigError, WeightsError
from models.registry import declare_model, fit_model, load_config, load_model, parse_config
from tests.models.driver import logits_of, relative_error
from tests.models.folders import Array, Golden, golden_tensors, load_golden, write_safetensors, write_shards

DENSE = load_golden("mistral_full")
APART = (
    "mixtral_odd", "qwen2_moe_shared", "qwen3_moe_odd", "olmoe_odd", "glm4_moe_groups", "deepseek_v2_odd",
    "deepseek_v3_odd",
)  # fmt: skip
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_mixtral(folder: Path, count: int, top_k: int) -> Path:
    """Mixtral with so many copies of a Mistral's MLP, and any router."""
    config = json.loads((DENSE.folder / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": count,
        "num_experts_per_tok": top_k,
    }  # fmt: skip
    tensors, rng = golden_tensors(DENSE), np.random.default_rng(count)
    for name in [name for name in tensors if ".mlp." in name]:
        layer, part = name.split(".mlp.")
        array = tensors.pop(name)
        stem = part.removesuffix(".weight")
        for expert in range(count):
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{MIXTRAL[stem]}.weight"] = array
        router = rng.standard_normal((count, config["hidden_size"]), np.float32)
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = router
    return written(folder, config, tensors)


def write_glm(folder: Path, chosen: int, count: int) -> Path:
    """GLM-4.5's rule over a Llama's layers: the correction sends all tokens to one expert, the others hold NaN."""
    golden = load_golden("llama_default")
    config = json.loads((golden.folder / "config.json").read_text())
    config |= {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": count,
        "num_experts_per_tok": 1, "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "moe_intermediate_size": config["intermediate_size"],
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    config["rope_parameters"]["partial_rotary_factor"] = 1.0
    config.pop("mlp_bias", None)
    tensors = golden_tensors(golden)
    for name in [name for name in tensors if ".mlp." in name]:
        layer, part = name.split(".mlp.")
        array = tensors.pop(name)
        for expert in range(count):
            held = array if expert == chosen else np.full_like(array, np.nan)
            tensors[f"{layer}.mlp.experts.{expert}.{part}"] = held
        tensors[f"{layer}.mlp.gate.weight"] = np.zeros((count, config["hidden_size"]), np.float32)
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = np.eye(count, dtype=np.float32)[chosen]
    return written(folder, config, tensors)


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


DEVICES = ["cpu", pytest.param("emulated:sm_90a", marks=pytest.mark.emulator)]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]
)
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (5, 1), (5, 5), (9, 4)])
def test_equal_experts_are_the_dense_model(tmp_path: Path, device: str, count: int, top_k: int) -> None:
    model = load_model(write_mixtral(tmp_path, count, top_k), device=device, dtype="float32")
    for chunks in (None, [1] * len(DENSE.prompt_ids)):
        found = logits_of(model, DENSE.prompt_ids, chunks)
        assert relative_error(found, DENSE.logits["float32"][: len(found)]) < 1e-4


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("emulated:sm_90a", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]
)
@pytest.mark.parametrize(("chosen", "count"), [(0, 3), (6, 7)])
def test_all_tokens_to_one_expert_and_none_to_the_others(tmp_path: Path, device: str, chosen: int, count: int) -> None:
    golden = load_golden("llama_default")
    model = load_model(write_glm(tmp_path, chosen, count), device=device, dtype="float32")
    for chunks in (None, [1] * len(golden.prompt_ids)):
        found = logits_of(model, golden.prompt_ids, chunks)
        assert relative_error(found, golden.logits["float32"][: len(found)]) < 1e-4


def fields_of(case: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((load_golden(case).folder / "config.json").read_text()), **changes}


REFUSED = [
    ("mixtral_odd", {"num_experts_per_tok": 4}, "num_experts_per_tok = 4 must be at most num_local_experts = 3"),
    ("mixtral_odd", {"num_local_experts": 0}, "num_local_experts must be from 1 to"),
    ("gpt_oss_odd", {"swiglu_limit": 3.0}, "swiglu_limit = 3.0 is not supported"),
    ("deepseek_v2_odd", {"num_key_value_heads": 1}, "num_key_value_heads = 1 must be num_attention_heads = 3"),
    ("deepseek_v2_odd", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    ("deepseek_v2_groups", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 must be at most .* = 4"),
    ("deepseek_v3_odd", {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even for rotary positions, not 3"),
    ("glm4_moe_lite_odd", {"qk_head_dim": 16}, "qk_head_dim = 16 is not supported.* must be 17"),
    ("glm4_moe_lite_odd", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    (
        "glm4_moe_lite_odd",
        {"mlp_layer_types": ["dense"]},
        r"mlp_layer_types = \['dense'\] must have dense or",
    ),
    ("glm4_moe_lite_odd", {"first_k_dense_replace": 2}, r"mlp_layer_types has dense \[0\], but first_k_dense_re"),
    ("mistral4_odd", {"head_dim": 8}, "head_dim = 8 is not supported.* must be 16"),
    (
        "mistral4_odd",
        {"qk_nope_head_dim": 24, "head_dim": 32, "qk_head_dim": 32},
        "rotates 16 of a head's 32",
    ),
    ("mistral4_odd", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
    ("mistral4_odd", {"rope_parameters": {"rope_theta": 1e4}}, "rope_type 'default' is not supported.* are yarn"),
    ("glm4_moe_groups", {"n_group": 9}, "n_group = 9 leaves 1 expert in a group.*limit 4 for n_routed_experts = 9"),
    ("glm4_moe_groups", {"n_group": 2}, "n_group = 2 must divide n_routed_experts = 9"),
    ("glm4_moe_groups", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 must be at most .* = 6"),
]


@pytest.mark.parametrize(("case", "changes", "words"), REFUSED, ids=[f"{r[0]}-{next(iter(r[1]))}" for r in REFUSED])
def test_rules_that_cannot_be_are_refused_by_name(case: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(fields_of(case, **changes))


def in_two_shards(folder: Path, golden: Golden, tensors: dict[str, Array]) -> Path:
    """The first layer in one, the others in another."""
    (folder / "config.json").write_text((golden.folder / "config.json").read_text())
    first = {name: array for name, array in tensors.items() if ".layers.0." in name}
    rest = {name: array for name, array in tensors.items() if name not in first}
    write_shards(folder, {"model-1.safetensors": first, "model-2.safetensors": rest})
    return folder


ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.mark.parametrize("load", [load_model, declare_model])
def test_a_router_of_the_wrong_size(tmp_path: Path, load: Any) -> None:
    golden = load_golden("qwen3_moe_odd")
    tensors = golden_tensors(golden)
    tensors[ROUTER] = tensors[ROUTER][:-1]
    with pytest.raises(WeightsError) as caught:
        load(in_two_shards(tmp_path, golden, tensors))
    assert caught.value.problems == (
        f"model-2.safetensors: tensor '{ROUTER}' is [10, 44], but the config asks for [11, 44]",
    )


def test_experts_missing_from_a_shard_are_named_before_memory_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = load_golden("qwen3_moe_odd")
    tensors = golden_tensors(golden)
    gone = [f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")]
    shapes = [list(tensors.pop(name).shape) for name in gone]
    monkeypatch.setattr("models.registry.LoadingMaker", None)  # nothing is made
    with pytest.raises(WeightsError) as caught:
        load_model(in_two_shards(tmp_path, golden, tensors))
    assert caught.value.problems == tuple(
        f"model.safetensors.index.json: tensor '{name}' {shape} is missing"
        for name, shape in zip(gone, shapes, strict=True)
    )


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("case", APART)
def test_experts_as_transformers_saves_them_in_its_own_format(tmp_path: Path, case: str, suffix: str) -> None:
    """`save_pretrained(save_original_format=False)` writes a layer's `mlp.experts.gate_up_proj [E, 2 I, H]` and
    `mlp.experts.down_proj [E, H, I]`; of Mixtral, the router is `mlp.gate`, too."""
    apart = golden_tensors(load_golden(case))
    fused: dict[str, Array] = {}
    kinds = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
    found: dict[str, dict[int, list[Array]]] = {}
    for name, array in apart.items():
        under, experts, rest = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
        if not experts:
            fused[under] = array
            continue
        number, kind, _ = rest.split(".")
        found.setdefault(f"{under}.experts", {}).setdefault(int(number), [array] * 3)[kinds[kind]] = array
    assert found
    for under, numbered in found.items():
        ordered = [numbered[number] for number in range(len(numbered))]
        fused[f"{under}.gate_up_proj{suffix}"] = np.stack([np.concatenate(parts[:2]) for parts in ordered])
        fused[f"{under}.down_proj{suffix}"] = np.stack([parts[2] for parts in ordered])
    folder = written(tmp_path, fields_of(case), fused)
    checkpoint = open_checkpoint(folder)
    fit_model(checkpoint, load_config(folder))
    assert set(checkpoint.tensors) == set(apart)
    for name, array in apart.items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)


def test_maps_that_stand_one_after_another(tmp_path: Path) -> None:
    """Queries, keys and values of a layer, and an expert's gate and up."""
    apart, fused = golden_tensors(load_golden("qwen3_moe_odd")), {}
    for name, array in apart.items():
        under, _, part = name.removesuffix(".weight").rpartition(".")
        if part in ("q_proj", "gate_proj"):
            whole, others = ("qkv", ("k_proj", "v_proj")) if part == "q_proj" else ("gate_up", ("up_proj",))
            rows = [array, *(apart[f"{under}.{each}.weight"] for each in others)]
            fused[f"{under}.{whole}_proj.weight"] = np.concatenate(rows)
        elif part not in ("k_proj", "v_proj", "up_proj"):
            fused[name] = array
    folder = written(tmp_path, fields_of("qwen3_moe_odd"), fused)
    checkpoint = open_checkpoint(folder)
    fit_model(checkpoint, load_config(folder))
    assert set(checkpoint.tensors) == set(apart)
    for name, array in apart.items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)


def test_a_stack_with_too_few_experts(tmp_path: Path) -> None:
    golden = load_golden("gpt_oss_odd")
    tensors, name = golden_tensors(golden), "model.layers.0.mlp.experts.down_proj"
    experts, inputs, outputs = tensors[name].shape
    tensors[name] = tensors[name][:-1]
    with pytest.raises(WeightsError) as caught:
        load_model(in_two_shards(tmp_path, golden, tensors))
    assert caught.value.problems == (
        f"model-1.safetensors: tensor '{name}' is {[4, inputs, outputs]}, but the config asks for "
        f"{[experts, inputs, outputs]} or {[experts, outputs, inputs]}",
    )


@pytest.mark.parametrize(("said", "stored", "is_passed_over"), [(1, 3, True), (1, 46, False), (0, 3, False)])
def test_layers_that_predict_further_tokens_stand_behind_the_others(
    tmp_path: Path, said: int, stored: int, is_passed_over: bool
) -> None:
    golden = load_golden("glm4_moe_groups")
    config = fields_of("glm4_moe_groups", num_nextn_predict_layers=said)
    tensors, name = golden_tensors(golden), f"model.layers.{stored}.eh_proj.weight"
    tensors[name] = np.ones((2, 2), np.float32)
    folder = written(tmp_path, config, tensors)
    if is_passed_over:
        declare_model(folder)
        return
    with pytest.raises(WeightsError, match=f"tensor '{name}' is left over"):
        declare_model(folder)
