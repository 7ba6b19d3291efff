"""GGUF files of families with recurrent states, by the rules of llama.cpp's converter, against their twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from models.registry import load_config, load_model
from tests.models.driver import logits_of, relative_error
from tests.models.folders import change_config, golden_tensors, load_golden, write_model
from tests.models.gguf.files import stacked_experts

Array = np.ndarray[Any, Any]
ARCHITECTURES = {
    "lfm2_odd": "lfm2", "lfm2_moe_odd": "lfm2moe", "granite_hybrid_odd": "granitehybrid",
    "granite_hybrid_moe_odd": "granitehybrid", "nemotron_h_odd": "nemotron_h_moe",
    "nemotron_h_moe_latent": "nemotron_h_moe",
}  # fmt: skip
_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def known_name(name: str) -> str:
    """The name under which the converter looks a tensor up."""
    under, _, rest = name.partition(".experts.")
    if rest:  # all experts' in one
        part = rest.removesuffix(".weight")
        layer = ".".join(under.split(".")[:3]).replace("backbone", "model")
        return f"{layer}.mlp.experts.{_EXPERTS.get(part, part)}.weight"
    name = name.replace("dt_bias", "dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    return name.replace("expert_bias", "expert_bias.bias")


def converted(case: str) -> dict[str, Array]:
    """A golden's tensors by GGUF's names."""
    golden = load_golden(case)
    config = json.loads((golden.folder / "config.json").read_text())
    tensors, num_layers = stacked_experts(golden_tensors(golden)), len(golden.shapes)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[case])
    names = gguf.get_tensor_name_map(arch, num_layers)
    groups = config.get("n_groups", config.get("mamba_n_groups"))
    found: dict[str, Array] = {}
    for name, array in tensors.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("A_log"):
            array = -np.exp(array)[:, None]
        elif name.endswith(".D"):
            array = array[:, None]
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            array = array[:, 0]
        elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            array = array.reshape(groups, -1)
        elif "granite" in case and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if "input_linear" in name or "output_linear" in name:
            kind = "_exps" if "block_sparse" in name else "_shexp" if config["num_local_experts"] else ""
            parts = ("gate", "up") if "input" in name else ("down",)
            for part, half in zip(parts, np.split(array, len(parts), axis=array.ndim - 2), strict=True):
                found[f"blk.{layer}.ffn_{part}{kind}.weight"] = half
            continue
        stored = names.get_name(known_name(name), try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found[stored] = array
    return found


def write(path: Path, case: str) -> None:
    config, writer = json.loads((load_golden(case).folder / "config.json").read_text()), None
    arch = ARCHITECTURES[case]
    writer = gguf.GGUFWriter(path, arch)
    kinds = config.get("layers_block_type", config.get("layer_types"))
    kv_heads = config["num_key_value_heads"]
    writer.add_block_count(len(kinds))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    if arch.startswith("nemotron"):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    has_experts = bool(config.get("num_experts", config.get("num_local_experts", config.get("n_routed_experts", 0))))
    if "rope_parameters" in config:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if arch.startswith("lfm2"):
        size = config["intermediate_size"]
        if arch == "lfm2":
            size = -(-int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)) // config["block_multiple_of"])
            size *= config["block_multiple_of"]
        writer.add_feed_forward_length(size)
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        is_granite = arch == "granitehybrid"
        heads = config["mamba_n_heads" if is_granite else "mamba_num_heads"]
        head_dim = config["mamba_d_head" if is_granite else "mamba_head_dim"]
        writer.add_ssm_conv_kernel(config["mamba_d_conv" if is_granite else "conv_kernel"])
        writer.add_ssm_state_size(config["mamba_d_state" if is_granite else "ssm_state_size"])
        writer.add_ssm_group_count(config["mamba_n_groups" if is_granite else "n_groups"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * head_dim)
    if arch == "granitehybrid":
        writer.add_feed_forward_length(config["intermediate_size" if has_experts else "shared_intermediate_size"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        if has_experts:
            writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if arch.startswith("nemotron"):
        size = config["intermediate_size"]
        writer.add_feed_forward_length([size if kind == "mlp" else 0 for kind in kinds])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        if config["moe_latent_size"]:
            writer.add_uint32(f"{arch}.moe_latent_size", config["moe_latent_size"])
    if has_experts:
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        writer.add_expert_count(next(config[name] for name in names if name in config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if has_experts and arch != "granitehybrid":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    for name, array in converted(case).items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_file_is_its_twin(tmp_path: Path, case: str) -> None:
    """Steps of a state have no limits in GGUF."""
    golden = load_golden(case)
    write(tmp_path / "model.gguf", case)
    ids = list(golden.prompt_ids)
    logits = logits_of(load_model(tmp_path / "model.gguf"), ids)
    twin = change_config(write_model(tmp_path / "twin", golden), time_step_limit=None)
    assert relative_error(logits, logits_of(load_model(twin), ids)) < 1e-5


@pytest.mark.parametrize("is_said", [True, False])
def test_granite_has_positions_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_said: bool
) -> None:
    case = "granite_hybrid_moe_odd"  # without positions
    if not is_said:
        monkeypatch.setattr(gguf.GGUFWriter, "add_rope_scaling_finetuned", lambda *_: None)
    write(tmp_path / "model.gguf", case)
    config: Any = load_config(tmp_path / "model.gguf")
    assert [rope is None for rope in config.layer_ropes] == [is_said] * config.num_layers


def test_a_multiplier_that_is_absent_or_nought_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp reads files of Granite: scores are divided by the root of a head's size."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_attention_scale", lambda *_: None)
    for name in ("embedding", "residual"):
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}_scale", lambda self, _, name=name: self.add_float32(
            f"granitehybrid.{name}_scale", 0.0))  # fmt: skip
    write(tmp_path / "model.gguf", "granite_hybrid_odd")
    config: Any = load_config(tmp_path / "model.gguf")
    assert config.embedding_multiplier == config.residual_multiplier == 1.0
    assert set(config.attention_scales) == {config.head_dim**-0.5}
