"""Models in GGUF beside their twins in safetensors: the same config, and the same logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.checkpoints.model_files import open_model
from models.errors import ConfigError, ModelLoadError, WeightsError
from models.gguf.formats import block_values
from models.gguf.reader import GgufFile
from models.registry import declare_model, load_config, load_model
from numba_kernels.blocks import BLOCKS
from runtime.dtype import bfloat16, float16, float32
from runtime.linear.format import GGML_FORMATS
from tests.models.driver import logits_of, relative_error
from tests.models.folders import golden_tensors, load_golden, write_safetensors
from tests.models.gguf.files import Array, random_blocks, write_gguf
from tests.models.gguf.test_formats import dequantised
from tests.models.products import check_products

# Cases, and what the converter leaves out of its files: their twins have what llama.cpp takes instead.
CASES: dict[str, dict[str, Any]] = {
    "llama_default": {},
    "llama_linear_gqa2": {},
    "llama_llama3_gqa4": {},
    "llama_llama3_odd": {},
    "llama_tied_gqa4": {},
    "mistral_window": {},
    "qwen2_odd": {},
    "qwen2_tied": {},
    "qwen3_gqa2_linear": {},
    "qwen3_odd": {},
    "qwen3_tied_gqa4": {},
    "gemma2_odd": {"query_pre_attn_scalar": 16},
    "gemma3_odd": {"query_pre_attn_scalar": 16},
    "gemma4_inputs_odd": {},
    "gemma4_keys_odd": {},
    "gemma4_moe_odd": {},
    "phi3_longrope": {},
    "phi3_longrope_crossing": {},
    "phi3_window_odd": {},
    "granite_multipliers": {},
    "smollm3_odd": {"no_rope_layers": [1, 1, 1, 0]},
    "olmo2_odd": {},
    "olmo3_windows": {},
    "glm4_odd": {},
    "mixtral_odd": {},
    "mixtral_all": {},
    "qwen2_moe_shared": {},
    "qwen3_moe_odd": {},
    "qwen3_moe_one": {"norm_topk_prob": True},
    "olmoe_odd": {},
    "gpt_oss_odd": {},
    "glm4_moe_groups": {},
    "gemma_odd": {},
    "seed_oss_odd": {},
    "exaone4_full": {},
    "ernie_odd": {},
    "starcoder2_odd": {"sliding_window": None},
    "cohere_norms": {},
    "cohere2_windows": {},
    "gpt_neox_odd": {},
    "gpt2_gelu_new": {},
    "olmo_clipped": {},
    "phimoe_odd": {"router_jitter_noise": 0.01},
    "granite_moe_shared": {},
    "granite_moe_square": {},
    "ernie_moe_odd": {},
    "hunyuan_alpha": {},
    "apertus_odd": {},
    "ministral3_positions": {},
    "glm_odd": {},
    "qwen3_5_odd": {},
    "qwen3_5_moe_odd": {},
    "qwen3_next_odd": {},
}
TEXTS = {"qwen2_odd": "qwen2_vl", "qwen3_odd": "qwen3_vl", "qwen3_moe_odd": "qwen3_vl_moe"}
"""What the text of models that read pictures computes, and what they are called."""
FUSED = ("llama_linear_gqa2", "qwen2_odd", "cohere_norms", "qwen3_moe_odd")


def twin_of(folder: Path, case: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Array], list[int]]:
    """The config, the tensors and a prompt of a golden model; both are written into the folder."""
    golden = load_golden(case)
    config = {**json.loads((golden.folder / "config.json").read_text()), **changes}
    tensors = golden_tensors(golden)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return config, tensors, golden.prompt_ids


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_twin(tmp_path: Path, case: str) -> None:
    config, tensors, ids = twin_of(tmp_path / "twin", case, **CASES[case])
    path = write_gguf(tmp_path / "model.gguf", config, tensors)
    ours, twin = load_config(path), load_config(tmp_path / "twin")
    has_factors = "llama3" in case or "apertus" in case
    assert comparable(ours, has_factors) == comparable(twin, has_factors)
    logits, expected = logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids)
    if has_factors or "stored_as" in ours.__dataclass_fields__:
        # The file has each pair's factor in float32, not the rule; or value heads in another order.
        assert relative_error(logits, expected) < 1e-5
    else:
        np.testing.assert_array_equal(logits, expected)


def test_gpt_oss_whose_positions_are_not_scaled(tmp_path: Path) -> None:
    """The converter then writes no key of scaling; config.json has to say so."""
    changes = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    config, tensors, ids = twin_of(tmp_path / "twin", "gpt_oss_odd", **changes)
    path = write_gguf(tmp_path / "model.gguf", config, tensors)
    assert comparable(load_config(path), False) == comparable(load_config(tmp_path / "twin"), False)
    np.testing.assert_array_equal(logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids))


def comparable(config: Any, has_factors: bool) -> Any:
    """A config without what the file has no keys for here; ropes with numbers in float32."""
    told: dict[str, Any] = {"dtype": None, "bos_token_id": None, "eos_token_ids": (), "pad_token_id": None}
    if hasattr(config, "stored_as"):
        told["stored_as"] = ""
    if hasattr(config, "layer_ropes"):
        ropes = [] if has_factors else [rope for rope in config.layer_ropes if rope]
        told["layer_ropes"] = tuple(
            dataclasses.replace(rope, attention_factor=np.float32(rope.attention_factor), theta=np.float32(rope.theta))
            for rope in ropes
        )
    return dataclasses.replace(config, **told)


def test_rows_of_each_layers_inputs_stay_in_the_file(tmp_path: Path) -> None:
    """They are read as they are stored; the twin has their numbers as floats."""
    config, tensors, ids = twin_of(tmp_path / "twin", "gemma4_inputs_odd")
    table = "per_layer_token_embd.weight"
    path = write_gguf(
        tmp_path / "model.gguf", config, tensors, type_of=lambda name: Ggml.Q8_0 if name == table else Ggml.F32
    )
    own = "model.embed_tokens_per_layer.weight"
    tensors[own] = gguf.dequantize(gguf.quantize(tensors[own], Ggml.Q8_0), Ggml.Q8_0)
    write_safetensors(tmp_path / "twin" / "model.safetensors", tensors)
    model, twin = load_model(path), load_model(tmp_path / "twin")
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(twin, ids))
    assert model.weight_bytes == twin.weight_bytes
    assert (model.mapped_bytes, twin.mapped_bytes) == (tensors[own].size * 34 // 32, tensors[own].nbytes)


def test_internlm2_is_llama_there(tmp_path: Path) -> None:
    """Its converter takes queries, keys and values apart, and rotates neighbours."""
    config, tensors, ids = twin_of(tmp_path / "twin", "llama_linear_gqa2")
    path = write_gguf(tmp_path / "model.gguf", {**config, "model_type": "internlm2"}, tensors)
    np.testing.assert_array_equal(logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids))


@pytest.mark.parametrize("case", TEXTS)
def test_texts_of_models_that_read_pictures(tmp_path: Path, case: str) -> None:
    """Their tower is another file; a text's tokens have one position on all axes."""
    config, tensors, ids = twin_of(tmp_path / "twin", case)
    path = write_gguf(tmp_path / "model.gguf", {**config, "model_type": TEXTS[case]}, tensors)
    np.testing.assert_array_equal(logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids))


@pytest.mark.parametrize("case", FUSED)
def test_maps_in_one_tensor(tmp_path: Path, case: str) -> None:
    config, tensors, ids = twin_of(tmp_path / "twin", case)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, is_fused=True)
    assert "blk.0.attn_qkv.weight" in GgufFile(path).tensors
    np.testing.assert_array_equal(logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids))


@pytest.mark.parametrize("case", ["llama_linear_gqa2", "mixtral_odd"])
def test_sizes_of_one_that_the_quantiser_leaves_out(tmp_path: Path, case: str) -> None:
    """A gate and an up of one row, or a layer's only expert, are in the file without their first size."""
    golden = load_golden(case)
    has_experts = case == "mixtral_odd"
    changes = {"num_local_experts": 1, "num_experts_per_tok": 1} if has_experts else {"intermediate_size": 1}
    config = json.loads((golden.folder / "config.json").read_text()) | changes
    tensors = {}
    for name, array in golden_tensors(golden).items():
        if ".gate." in name or ".gate_proj." in name or ".up_proj." in name:
            array = array[:1]
        elif ".down_proj." in name:
            array = array[:, :1]
        if ".experts." not in name or ".experts.0." in name:
            tensors[name] = np.ascontiguousarray(array)
    whole, cut = (write_gguf(tmp_path / f"{drops}.gguf", config, tensors, drops_ones=drops) for drops in (False, True))
    ranks = [{name: len(each.shape) for name, each in GgufFile(path).tensors.items()} for path in (whole, cut)]
    fewer = {name.split(".")[-2] for name in ranks[0] if ranks[1][name] < ranks[0][name]}
    experts = {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
    assert fewer == (experts if has_experts else {"ffn_gate", "ffn_up"})
    logits = [logits_of(load_model(path), golden.prompt_ids) for path in (cut, whole)]
    np.testing.assert_array_equal(*logits)


def test_numbers_of_layers(tmp_path: Path) -> None:
    """Apertus' activations stand in the metadata: one for each layer, or one for all."""
    config, tensors, ids = twin_of(tmp_path / "twin", "apertus_odd")
    for values, is_right in (([0.5], True), ([0.5, 0.5], True), ([0.5] * 3, False), (["x", "y"], False)):

        def change(writer: gguf.GGUFWriter, values: list[Any] = values) -> None:
            writer.kv_data[0].pop("xielu.beta", None)
            writer.add_array("xielu.beta", values)

        given = {name: array for name, array in tensors.items() if not name.endswith("act_fn.beta")}
        path = write_gguf(tmp_path / "model.gguf", config, given, add_metadata=change)
        if not is_right:
            with pytest.raises(WeightsError, match=r"model.gguf: xielu.beta must have a number for each of 2 layers"):
                load_model(path)
            continue
        for layer in range(2):
            given[f"model.layers.{layer}.mlp.act_fn.beta"] = np.array(0.5, np.float32)
        write_safetensors(tmp_path / "twin" / "model.safetensors", given)
        assert relative_error(logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids)) < 1e-5


QUANTISED = [Ggml.Q8_0, Ggml.Q4_0, Ggml.Q4_1, Ggml.Q5_0, Ggml.Q5_1, Ggml.Q2_K, Ggml.Q3_K, Ggml.Q4_K, Ggml.Q5_K]
QUANTISED += [Ggml.Q6_K, Ggml.IQ4_NL, Ggml.IQ4_XS, Ggml.MXFP4]
RARELY = [Ggml.Q4_1, Ggml.Q5_0, Ggml.Q5_1, Ggml.Q5_K, Ggml.IQ4_NL, Ggml.IQ4_XS]
"""Their kernels take seconds to compile."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


def quantised_tensors(type_of: Any, seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    """Blocks of a small Llama by safetensors' names, and the floats that they stand for, by the `gguf` package.

    Rows of queries and keys are not in the file's order yet: a writer permutes rows of bytes as it does rows of floats.
    """
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (96, 256)}
    for layer in range(2):
        rows = {"self_attn.q_proj": 256, "self_attn.k_proj": 128, "self_attn.v_proj": 128, "self_attn.o_proj": 256}
        rows |= {"mlp.gate_proj": 512, "mlp.up_proj": 512, "mlp.down_proj": 256}
        for name, count in rows.items():
            shapes[f"model.layers.{layer}.{name}"] = (count, 512 if name == "mlp.down_proj" else 256)
    blocks, floats = {}, {}
    for name, shape in shapes.items():
        ggml = type_of(name)
        blocks[f"{name}.weight"] = random_blocks(rng, ggml, shape, scale=0.02)
        floats[f"{name}.weight"] = gguf.dequantize(blocks[f"{name}.weight"], ggml)
    for name in ("input_layernorm", "post_attention_layernorm"):
        for layer in range(2):
            floats[f"model.layers.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, 256).astype(np.float32)
    floats["model.norm.weight"] = rng.uniform(0.5, 1.5, 256).astype(np.float32)
    return {**floats, **blocks}, floats


@pytest.mark.parametrize(
    "ggml",
    [pytest.param(each, marks=[pytest.mark.exhaustive] * (each in RARELY), id=each.name) for each in QUANTISED],
)
@pytest.mark.exhaustive_cases("IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
def test_quantised_is_its_dequantised_twin(tmp_path: Path, ggml: Ggml) -> None:
    blocks, floats = quantised_tensors(lambda name: ggml)
    path = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: ggml)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", floats)
    ids = list(range(3, 24))
    for dtype in ("float32", "bfloat16"):
        model, twin = load_model(path, dtype=dtype), load_model(tmp_path, dtype=dtype)
        assert model.dtype is (bfloat16 if dtype == "bfloat16" else float32)
        np.testing.assert_array_equal(logits_of(model, ids), logits_of(twin, ids))
    kept, twin = load_model(path, kv_cache_dtype="float32"), load_model(tmp_path)
    if ggml.name in GGML_FORMATS:
        assert kept.lm_head.format is GGML_FORMATS[ggml.name]
        assert kept.weight_bytes < twin.weight_bytes / 2
        assert declare_model(path).weight_bytes == kept.weight_bytes
        expected = logits_of(twin, ids)
        check_products(kept, ids, expected)
        # Activations are rounded; scores of such random weights are large: a position may attend to another one.
        errors = [relative_error(row, other) for row, other in zip(logits_of(kept, ids), expected, strict=True)]
        assert 0 < np.median(errors) < 0.06
        assert max(errors) < 0.3
    else:
        np.testing.assert_array_equal(logits_of(kept, ids), logits_of(twin, ids))
    stored = open_model(path).checkpoint().bytes_by_format()
    assert stored == {ggml.name: sum(a.nbytes for a in blocks.values() if a.ndim == 2), "F32": 5 * 4 * 256}


def test_mixed_types(tmp_path: Path) -> None:
    """As Q4_K_M has them: within one fused map, too."""

    def type_of(name: str) -> Ggml:
        return Ggml.Q6_K if "embd" in name or "embed" in name or name.endswith(("v_proj", "down_proj")) else Ggml.Q4_K

    def stored_type_of(name: str) -> Ggml:
        return Ggml.Q6_K if any(part in name for part in ("embd", "attn_v", "ffn_down")) else Ggml.Q4_K

    blocks, floats = quantised_tensors(type_of, seed=3)
    path = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=stored_type_of)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", floats)
    ids = list(range(40, 70))
    expected = logits_of(load_model(tmp_path), ids)
    np.testing.assert_array_equal(logits_of(load_model(path, dtype="float32"), ids), expected)
    np.testing.assert_array_equal(logits_of(load_model(path, activations="float"), ids), expected)
    check_products(load_model(path, kv_cache_dtype="float32"), ids, expected)
    assert relative_error(logits_of(load_model(path), ids), expected) < 0.15
    assert list(open_model(path).checkpoint().bytes_by_format()) == ["Q4_K", "Q6_K", "F32"]


def test_types_that_the_user_leaves_open(tmp_path: Path) -> None:
    """Blocks name no type: pages of 16 bits on a CPU, floats of 16 bits on a GPU."""
    blocks, floats = quantised_tensors(lambda name: Ggml.Q8_0)
    path = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: Ggml.Q8_0)
    plain = write_gguf(tmp_path / "plain.gguf", CONFIG, floats, type_of=lambda name: Ggml.F32)

    def types(file: Path, **settings: Any) -> tuple[Any, Any]:
        model = declare_model(file, **settings)
        return model.dtype, model.kv_cache_spec(16).dtype

    gpu = "emulated:sm_90a"
    assert types(path) == (float32, bfloat16)
    assert types(path, device=gpu) == (bfloat16, bfloat16)
    assert types(path, device=gpu, dtype="float32") == (float32, float32)
    assert types(path, kv_cache_dtype="float32") == (float32, float32)
    assert types(path, dtype="bfloat16") == (bfloat16, bfloat16)
    assert types(path, activations="float") == (float32, float32)
    assert types(plain) == (float32, float32)
    assert types(plain, device=gpu) == (float32, float32)


PLACES = (
    "embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "blk.1.ffn_down"
)  # fmt: skip
MIXES = {
    "few bits": "IQ2_S IQ2_XXS TQ2_0 NVFP4 IQ3_S IQ1_M IQ3_XXS Q2_K IQ4_XS",
    "blocks of 256": "Q3_K IQ1_S IQ2_XS TQ1_0 Q6_K Q4_K Q5_K IQ3_S Q2_K",
    "blocks of 32": "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 Q3_K IQ2_S",
}
"""The types of `PLACES`."""
OURS = {
    "embed": "embd", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "1.mlp.down_proj": "blk.1.ffn_down",
}  # fmt: skip


def types_of(mix: str) -> dict[str, Ggml]:
    return dict(zip(PLACES, (Ggml[name] for name in MIXES[mix].split()), strict=True))


def write_mix(folder: Path, mix: str = "few bits") -> Path:
    """A model of nine types, and its dequantised twin in the folder."""
    types = types_of(mix)

    def type_of(name: str) -> Ggml:
        return [types[each] for each in types if each in name][-1]

    def type_by_name(name: str) -> Ggml:
        return [types[part] for each, part in OURS.items() if each in name][-1]

    blocks, floats = quantised_tensors(type_by_name, seed=4)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", floats)
    return write_gguf(folder / "model.gguf", CONFIG, blocks, type_of=type_of)


@pytest.mark.parametrize("mix", MIXES)
def test_nine_types_in_one_file(tmp_path: Path, mix: str) -> None:
    path, ids = write_mix(tmp_path, mix), list(range(40, 70))
    assert set(open_model(path).checkpoint().bytes_by_format()) == {*MIXES[mix].split(), "F32"}
    expected = logits_of(load_model(tmp_path), ids)
    np.testing.assert_array_equal(logits_of(load_model(path, dtype="float32"), ids), expected)
    np.testing.assert_array_equal(logits_of(load_model(path, activations="float"), ids), expected)


def test_matrices_of_nvfp4_have_a_factor_each(tmp_path: Path) -> None:
    blocks, floats = quantised_tensors(lambda name: Ggml.NVFP4, seed=6)
    names = {name: f"blk.{name.split('.')[2]}.{OURS[name.split('.')[4]]}" for name in blocks if "_proj" in name}
    for number, (name, stored) in enumerate(names.items(), 1):
        blocks[f"{stored}.scale"] = np.array([number / 7], np.float32)
        blocks[f"{stored}.input_scale"] = np.array([0.1], np.float32)
        floats[name] = floats[name] * np.float32(number / 7)
    path = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: Ggml.NVFP4)
    checkpoint = open_model(path).checkpoint()
    assert set(checkpoint.tensors) == set(floats)
    for name in names:
        if "q_proj" not in name and "k_proj" not in name:  # whose rows are permuted
            np.testing.assert_array_equal(checkpoint[name].array(), floats[name])
            kept = block_values(BLOCKS["nvfp4"], checkpoint[name].blocks().view(BLOCKS["nvfp4"].fields).reshape(-1))
            np.testing.assert_allclose(kept.reshape(floats[name].shape), floats[name], rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mix", MIXES)
def test_nine_types_multiplied_as_stored(tmp_path: Path, mix: str) -> None:
    path, ids = write_mix(tmp_path, mix), list(range(40, 70))
    kept, twin = load_model(path), load_model(tmp_path)
    assert kept.weight_bytes < twin.weight_bytes / 6
    assert declare_model(path).weight_bytes == kept.weight_bytes
    whole = logits_of(kept, ids)
    np.testing.assert_array_equal(whole, logits_of(kept, ids, [1] * len(ids)))
    check_products(kept, ids, logits_of(twin, ids))
    # The worst of 30 rows; of 12 seeds of the second mix, 0.31 at most, and 0.36 in llama.cpp.
    assert relative_error(whole, logits_of(twin, ids)) < (0.35 if mix == "blocks of 256" else 0.15)


@pytest.mark.exhaustive
def test_one_bit_is_multiplied_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "dequantize", dequantised)  # the package does not read this type
    blocks, floats = quantised_tensors(lambda name: Ggml.Q1_0, seed=5)
    path = write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: Ggml.Q1_0)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", floats)
    ids, kept, twin = list(range(40, 70)), load_model(path), load_model(tmp_path)
    assert kept.lm_head.format is GGML_FORMATS["Q4_0"]
    np.testing.assert_array_equal(logits_of(load_model(path, dtype="float32"), ids), logits_of(twin, ids))
    check_products(kept, ids, logits_of(twin, ids))


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_nine_types_on_a_gpu(tmp_path: Path) -> None:
    path, ids = write_mix(tmp_path), list(range(40, 49))
    found = logits_of(load_model(path, device="emulated:sm_90a", dtype="float32"), ids)
    assert relative_error(found, logits_of(load_model(tmp_path), ids)) < 1e-4


@pytest.mark.parametrize(
    "ggml", [pytest.param(Ggml.F16, marks=pytest.mark.exhaustive), Ggml.BF16], ids=lambda ggml: ggml.name
)
def test_floats_of_sixteen_bits_are_kept(tmp_path: Path, ggml: Ggml) -> None:
    config, tensors, ids = twin_of(tmp_path / "twin", "llama_default")
    path = write_gguf(tmp_path / "model.gguf", config, tensors, type_of=lambda name: ggml)
    numpy = np.float16 if ggml == Ggml.F16 else ml_dtypes.bfloat16
    rounded = {name: array.astype(numpy) if array.ndim == 2 else array for name, array in tensors.items()}
    write_safetensors(tmp_path / "twin" / "model.safetensors", rounded)
    model, twin = load_model(path), load_model(tmp_path / "twin")
    assert model.dtype is (float16 if ggml == Ggml.F16 else bfloat16)
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(twin, ids))


def shards(folder: Path) -> tuple[Path, Path]:
    """The first of several shards, and the same model in one file."""
    config, tensors, _ = twin_of(folder / "twin", "qwen3_odd")
    whole = write_gguf(folder / "whole.gguf", config, tensors)
    return write_gguf(folder / "model.gguf", config, tensors, num_tensors_per_shard=7), whole


def test_shards(tmp_path: Path) -> None:
    first, whole = shards(tmp_path)
    assert first.name == "model-00001-of-00004.gguf"
    ids = [3, 1, 4, 1, 5]
    np.testing.assert_array_equal(logits_of(load_model(first), ids), logits_of(load_model(whole), ids))


def test_shards_that_do_not_fit(tmp_path: Path) -> None:
    first, _ = shards(tmp_path)
    with pytest.raises(WeightsError, match="is shard 1 of 4, counted from 0: give the first, model-00001"):
        load_model(tmp_path / "model-00002-of-00004.gguf")
    (tmp_path / "other.gguf").write_bytes(first.read_bytes())
    with pytest.raises(WeightsError, match=r"split.count is 4: the file must be called NAME-00001-of-00004.gguf"):
        load_model(tmp_path / "other.gguf")
    third = tmp_path / "model-00003-of-00004.gguf"
    content = third.read_bytes()
    third.write_bytes((tmp_path / "model-00002-of-00004.gguf").read_bytes())
    with pytest.raises(WeightsError, match=r"model-00003-of-00004.gguf: split.no and split.count are 1 and 4"):
        load_model(first)
    third.unlink()
    with pytest.raises(WeightsError, match=r"shards are missing:\n  model-00003-of-00004.gguf: the file is missing"):
        load_model(first)
    third.write_bytes(content)
    load_model(first)


WRONG: list[tuple[dict[str, Any], type[ModelLoadError], str]] = [
    ({"general.architecture": "mamba"}, ConfigError, "general.architecture 'mamba' is not supported; supported are"),
    ({"general.type": "mmproj"}, ConfigError, "general.type is 'mmproj': give the file of the model itself"),
    ({"llama.block_count": None}, ConfigError, "llama.block_count is missing"),
    ({"llama.block_count": 0}, ConfigError, "llama.block_count must be from 1 to"),
    ({"llama.embedding_length": "x"}, ConfigError, "llama.embedding_length must be an integer, not 'x'"),
    ({"llama.attention.head_count_kv": [2, 4]}, ConfigError, "llama.attention.head_count_kv must be an integer, not"),
    ({"llama.attention.value_length": 8}, ConfigError, "llama.attention.value_length = 8 is not supported for llama"),
    ({"llama.expert_count": 8}, ConfigError, "llama.expert_used_count is missing"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, ConfigError, "layer_norm_rms_epsilon must be finite"),
    ({"llama.rope.scaling.type": "dynamic"}, ConfigError, "llama.rope.scaling.type 'dynamic' is not supported"),
    ({"llama.rope.dimension_count": 6}, ConfigError, "partial_rotary_factor = 0.375 is not supported"),
    ({"llama.new_feature": 3}, ConfigError, "llama.new_feature = 3 is not supported for llama"),
    ({"llama.block_count": 3}, WeightsError, r"9 tensors do not fit the config:\n  model.gguf: tensor"),
    ({"llama.feed_forward_length": 8}, WeightsError, "tensor 'blk.0.ffn_gate.weight' is .*, but the config asks for"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[case[2][:40] for case in WRONG])
def test_what_does_not_fit_is_refused_by_key_or_tensor(
    tmp_path: Path, changes: dict[str, Any], error: type[ModelLoadError], message: str
) -> None:
    config, tensors, _ = twin_of(tmp_path / "twin", "llama_default")

    def change(writer: gguf.GGUFWriter) -> None:
        keys = writer.kv_data[0]
        for key, value in changes.items():
            keys.pop(key, None)
            if value is not None:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    path = write_gguf(tmp_path / "model.gguf", config, tensors, add_metadata=change)
    with pytest.raises(error, match=f"model.gguf: .*{message}" if error is ConfigError else message):
        load_model(path)


def test_granite_without_positions_is_refused(tmp_path: Path) -> None:
    """Only hybrids of it have none: the key is a switch there."""
    config, tensors, _ = twin_of(tmp_path / "twin", "granite_multipliers")
    path = write_gguf(
        tmp_path / "model.gguf", config, tensors, add_metadata=lambda writer: writer.add_rope_scaling_finetuned(False)
    )
    with pytest.raises(ConfigError, match=r"granite.rope.scaling.finetuned = False is not supported"):
        load_model(path)


def test_a_tensor_that_no_family_has(tmp_path: Path) -> None:
    config, tensors, _ = twin_of(tmp_path / "twin", "llama_default")
    tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)
    path = write_gguf(tmp_path / "model.gguf", config, tensors)
    with pytest.raises(WeightsError, match=r"model.gguf: tensor 'blk.0.attn_sinks.weight' is left over"):
        load_model(path)


def test_a_list_with_one_number_for_each_layer(tmp_path: Path) -> None:
    config, tensors, _ = twin_of(tmp_path / "twin", "llama_default")

    def as_list(writer: gguf.GGUFWriter) -> None:
        count = writer.kv_data[0].pop("llama.feed_forward_length").value
        writer.add_feed_forward_length([count] * config["num_hidden_layers"])

    path = write_gguf(tmp_path / "model.gguf", config, tensors, add_metadata=as_list)
    assert load_config(path).intermediate_size == config["intermediate_size"]
