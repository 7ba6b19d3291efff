"""Keeps small GGUF files of newer families, made by llama.cpp's converter, and llama.cpp's logits of them.

    python tools/references/make_hybrid_gguf.py LLAMA_CPP LLAMA_PYTHON [NAME ...]  # needs transformers, tokenizers

`LLAMA_CPP` is a checkout, whose `convert_hf_to_gguf.py` runs here; `LLAMA_PYTHON` has `llama_cpp`.
`tests/models/gguf/hybrids` gets `NAME.gguf.xz` and `logits.npz`, which has ids and logits of each. Weights are
multiples of 1 / 64, so that the files pack well. Dense Granite and dense Nemotron-H are not among them: llama.cpp
refuses these files. Mistral 4's queries have no scale by position, which its converter does not write. Gemma 4's logits
in llama.cpp are of a GELU from a table of float16.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "models" / "gguf" / "hybrids"
LOGITS = Path(__file__).with_name("llama_logits.py")
CONVERT = """
import sys
source = sys.argv[1]
sys.path[:0] = [source + "/gguf-py", source]
import transformers
from conversion import base
transformers.AutoTokenizer.from_pretrained = transformers.PreTrainedTokenizerFast.from_pretrained
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # else known by a published tokenizer's ids
from conversion import gemma, glm
gemma.Gemma4Model.set_vocab = glm.Glm4MoeLiteModel.set_vocab = base.TextModel._set_vocab_gpt2
import convert_hf_to_gguf
sys.argv = ["convert", *sys.argv[2:]]
convert_hf_to_gguf.main()
"""
VOCAB, NUM_TOKENS = 40, 33
TRIED_SEEDS = range(1, 9)
"""Seeds of weights; the best conditioned is kept: a delta rule's norm divides by outputs that may cancel."""

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "max_position_embeddings": 256}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DELTA: dict[str, Any] = {
    **_COMMON, **_HEADS, "num_hidden_layers": 4, "head_dim": 16, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_M_ROPE = {**_DELTA["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_STATE, _ATTENTION, _WINDOW = "linear_attention", "full_attention", "sliding_attention"
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GEMMA4: dict[str, Any] = {
    **_COMMON, **_HEADS, **_SPECIAL, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 7,
    "intermediate_size": 40, "layer_types": [_WINDOW, _ATTENTION] * 2, "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "rope_parameters": {
        _ATTENTION: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        _WINDOW: {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_COMMON, **_SPECIAL, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
    "intermediate_size": 40, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
    "v_head_dim": 16, "moe_intermediate_size": 8, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 8,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen35": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM",
               {**_DELTA, "intermediate_size": 40, "rope_parameters": _M_ROPE}),
    "qwen35moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_DELTA, **_SHARED, "rope_parameters": _M_ROPE}),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_DELTA, **_SHARED, "norm_topk_prob": True}),
    "nemotron_h_moe": ("NemotronHConfig", "NemotronHForCausalLM", {
        **_COMMON, **_HEADS, "head_dim": 8, "intermediate_size": 40, "ssm_state_size": 8, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "use_conv_bias": True,
        "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 16, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
        "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "eos_token_id": 2,
        "layers_block_type": [_STATE, "moe", _ATTENTION, "moe", _STATE],
    }),
    "granitehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {
        **_COMMON, **_HEADS, "intermediate_size": 8, "shared_intermediate_size": 16, "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_d_head": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "tie_word_embeddings": True,
        "layer_types": [_STATE, _ATTENTION, _STATE], "eos_token_id": 2, "pad_token_id": 0, "num_local_experts": 6,
        "num_experts_per_tok": 2, "position_embedding_type": None,
    }),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {
        **_COMMON, **_HEADS, "num_hidden_layers": 4, "norm_eps": 1e-5, "conv_L_cache": 3, "eos_token_id": 2,
        "layer_types": ["conv", _ATTENTION, "conv", "conv"], "intermediate_size": 60, "block_multiple_of": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }),
    "lfm2moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", {
        **_COMMON, **_HEADS, **_EXPERTS, "num_hidden_layers": 4, "norm_eps": 1e-5, "conv_L_cache": 3,
        "eos_token_id": 2, "layer_types": ["conv", _ATTENTION, "conv", "conv"], "intermediate_size": 40,
        "num_dense_layers": 1, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", {
        **_GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "enable_moe_block": False,
    }),
    "gemma4_experts": ("Gemma4TextConfig", "Gemma4ForCausalLM", {
        **_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
        "moe_intermediate_size": 8,
    }),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {
        **_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "mistral4": ("Mistral3Config", "Mistral3ForConditionalGeneration", {
        "text_config": {"model_type": "mistral4", **_LATENT, "first_k_dense_replace": 0, "rope_parameters": _YARN},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1,
            "intermediate_size": 8, "image_size": 28, "patch_size": 14,
        },
        "image_token_index": VOCAB - 1, "spatial_merge_size": 1, "tie_word_embeddings": False,
    }),
}  # fmt: skip


def main() -> None:
    source, python, *names = sys.argv[1:]
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    kept: dict[str, Any] = {}
    if names:
        with np.load(FOLDER / "logits.npz") as stored:
            kept |= stored
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or CASES:
            config_class, model_class, fields = CASES[name]
            folder, made = Path(scratch) / name, Path(scratch) / f"{name}.gguf"
            ids = torch.randint(3, VOCAB, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(7))
            config = getattr(transformers, config_class)(**fields)
            config._attn_implementation = "eager"
            model = best_conditioned(getattr(transformers, model_class), config, ids)
            with torch.no_grad():
                theirs = model(input_ids=ids, use_cache=False).logits[0].numpy()
            model.save_pretrained(folder)
            save_tokenizer(folder)
            name_as_published(folder / "config.json")
            command = [sys.executable, "-c", CONVERT, source, str(folder), "--outfile", str(made), "--outtype", "f32"]
            command += ["--no-mtp"] if name.startswith("qwen3") else []
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            request = json.dumps({"path": str(made), "ids": ids[0].tolist()})
            done = subprocess.run([python, str(LOGITS)], input=request, capture_output=True, encoding="utf-8")
            if done.returncode:
                sys.exit(f"{name}: {done.stderr[-1000:]}")
            logits = np.array(json.loads(done.stdout), np.float32)
            error = np.abs(logits - theirs).max() / np.abs(theirs).max()
            print(f"{name}: llama.cpp differs from transformers by {error:.1e}", flush=True)
            (FOLDER / f"{name}.gguf.xz").write_bytes(lzma.compress(made.read_bytes(), preset=9))
            kept |= {f"{name} ids": ids[0].numpy().astype(np.int32), f"{name} logits": logits}
    np.savez_compressed(FOLDER / "logits.npz", **kept)


def best_conditioned(model_class: Any, config: Any, ids: Any) -> Any:
    """The model whose logits move least, of some seeds, if its weights move by 2**-14."""
    found = []
    for seed in TRIED_SEEDS:
        model = randomised(model_class, config, seed)
        with torch.no_grad():
            exact = model(input_ids=ids, use_cache=False).logits
            for parameter in model.parameters():
                parameter.mul_(1 + 2**-14 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
            moved = (model(input_ids=ids, use_cache=False).logits - exact).abs().max() / exact.abs().max()
        found.append((float(moved), seed))
    return randomised(model_class, config, min(found)[1])


def randomised(model_class: Any, config: Any, seed: int) -> Any:
    """A model of weights that are multiples of 1 / 64."""
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    drawn = torch.Generator().manual_seed(seed)
    biases = [
        (name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name or "expert_bias" in name
    ]
    for name, place in [*model.named_parameters(), *biases]:
        with torch.no_grad():
            uniform, normal = torch.rand(place.shape, generator=drawn), torch.randn(place.shape, generator=drawn)
            if name.endswith("A_log"):
                value = torch.log(0.5 + 7.5 * uniform)
            elif name.endswith("dt_bias"):
                value = 3 * uniform - 2
            elif name.endswith(".D"):
                value = 0.5 + uniform
            elif place.ndim == 1 and "norm" in name:
                value = place + 0.4 * (uniform - 0.5)
            elif place.ndim == 1:
                value = 0.3 * normal
            else:
                value = normal / (place[0].numel() if "conv" in name else place.shape[-1]) ** 0.5
            place.copy_(torch.round(64 * value) / 64)
    return model


def name_as_published(path: Path) -> None:
    """Fields that the converter reads as published folders of Nemotron-H, Granite and GLM-4.7-Flash have them."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if head_dim := config.get("mamba_head_dim", config.get("mamba_d_head")):
        config["d_head"] = head_dim
    if config["model_type"] == "granitemoehybrid":
        names = {_STATE: "mamba", _ATTENTION: "attention"}
        config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
    if config["model_type"] == "glm4_moe_lite":
        config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
        config["scoring_func"] = "sigmoid"  # which llama.cpp knows of the published sizes alone
    path.write_text(json.dumps(config), encoding="utf-8")


def save_tokenizer(folder: Path) -> None:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 6]:
        vocabulary[letter] = len(vocabulary)
    vocabulary |= {"a": VOCAB - 3, "b": VOCAB - 2, "ab": VOCAB - 1} if "a" not in vocabulary else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
