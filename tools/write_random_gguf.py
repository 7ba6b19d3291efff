"""Writes a GGUF file of a model with seeded random weights, for `bench peers --gguf`: a folder of bfloat16, which
llama.cpp's own converter reads.

    python -m tools.write_random_gguf qwen3.5-0.8b FILE --llama-cpp SOURCE --python PYTHON
    python -m tools.write_random_gguf qwen3.5-4b FILE --share 4 --llama-cpp SOURCE --python PYTHON
    python -m tools.write_random_gguf deepseek-v2-lite FILE --llama-cpp SOURCE --python PYTHON
    llama-quantize FILE QUANTISED Q4_K_M
    python -m tools.write_random_gguf qwen3-1.7b FILE --share 7 --importance TABLE --llama-cpp SOURCE --python PYTHON
    llama-quantize --pure --imatrix TABLE FILE QUANTISED IQ2_S

DeepSeek-V2-Lite has 8 experts of 352 instead of 64 of 1,408, and a vocabulary of 16,384.

SOURCE is llama.cpp's, PYTHON one with the converter's packages. With `--share N` there are an N-th of the layers and of
the vocabulary, so that the head keeps its share. The file has no tokenizer. TABLE has the same importance for every
column; llama-quantize writes some types only with such a table.

Token embeddings are ten times as large as other weights. Activations that are rounded to 8 bits otherwise move the
logits by a third of the largest: the first layers of such weights add as much as they get.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from models.gguf.reader import GgufFile, GgufTensor
from models.registry import declare

DEVIATION = 0.02
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 256, "attention_bias": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "vocab_size": 248_320,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "attn_output_gate": True, "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        **QWEN3_5, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16,
    },
    "qwen3.5-4b": {
        **QWEN3_5, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 352, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 16_384, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu",
        "tie_word_embeddings": False, "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "attention_bias": False, "dtype": "bfloat16", "n_group": 1,
        "topk_group": 1, "head_dim": 64,
    },
}  # fmt: skip
"""The published shapes as `config.json` has them."""
FUSED = re.compile("in_proj_[qkv]\\b")
CONVERT = """
import runpy, sys
source = sys.argv[1]
sys.path[:0] = [source, source + "/gguf-py"]
import importlib
def set_vocab(self):
    self.gguf_writer.add_tokenizer_model("none")
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])
getattr(importlib.import_module("conversion." + sys.argv[4]), sys.argv[5]).set_vocab = set_vocab
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "bf16", *sys.argv[6:]]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""


CONVERTERS = {
    "qwen3": ("qwen", "Qwen3Model"), "qwen3_5_text": ("qwen", "Qwen3_5TextModel", "--no-mtp"),
    "deepseek_v2": ("deepseek", "DeepseekV2Model"),
}  # fmt: skip
"""The module, the class and the options of llama.cpp's converter, by model_type."""


def config_of(shape: str, share: int) -> dict[str, Any]:
    """config.json's fields, with an n-th of the layers and of the vocabulary."""
    config = dict(SHAPES[shape])
    config["num_hidden_layers"] //= share
    config["vocab_size"] //= share
    if "full_attention_interval" in config:
        kinds = ("linear_attention",) * 3 + ("full_attention",)
        config["layer_types"] = [kinds[layer % 4] for layer in range(config["num_hidden_layers"])]
    config |= dict.fromkeys(("bos_token_id", "eos_token_id"), config["vocab_size"] - 1)
    return config


def write_folder(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """config.json and one file of tensors for each layer."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    stored: dict[str, tuple[int, ...]] = {}
    for name, each in declare(folder, load_format="dummy", device="cpu").source.tensors.items():
        whole = FUSED.sub("in_proj_qkv", name).replace("q_proj.gate", "q_proj").replace("q_proj.query", "q_proj")
        stored[whole] = (stored.get(whole, (0,))[0] + each.shape[0], *each.shape[1:])
    generator, files = np.random.default_rng(seed), {}
    added = DEVIATION / float(np.sqrt(2 * config["num_hidden_layers"]))  # of the terms added to the residual
    parts: dict[str, list[str]] = {}
    for name in sorted(stored):
        parts.setdefault(name.split(".")[2] if ".layers." in name else "others", []).append(name)
    for part, names in parts.items():
        tensors = {}
        for name in names:
            values = generator.standard_normal(stored[name], dtype=np.float32)
            is_added = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            values *= np.float32(10 * DEVIATION if "embed_tokens" in name else added if is_added else DEVIATION)
            tensors[name], files[name] = values.astype(ml_dtypes.bfloat16), f"model-{part}.safetensors"
        save_file(tensors, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")


def write_importance(file: Path, stored: Mapping[str, GgufTensor]) -> None:
    """llama-quantize's table, in its first form: of each matrix its name, a number of calls, and its columns' ones."""
    matrices = {name: each.shape[-1] for name, each in stored.items() if len(each.shape) > 1}
    parts = [struct.pack("<i", len(matrices))]
    for name, columns in matrices.items():
        parts += struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", 1, columns)
        parts.append(np.ones(columns, np.float32).tobytes())
    file.write_bytes(b"".join(parts))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--share", type=int, default=1, help="how many such files would make the whole model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--importance", type=Path, help="where to write a table of importance for llama-quantize")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the folder of its source")
    parser.add_argument("--python", type=Path, required=True, help="one with the converter's packages")
    given = parser.parse_args()
    config = config_of(given.shape, given.share)
    with tempfile.TemporaryDirectory(prefix="xserv-random-", dir=given.file.parent) as name:
        write_folder(Path(name), config, given.seed)
        arguments = [str(each) for each in (given.llama_cpp, name, given.file, *CONVERTERS[config["model_type"]])]
        subprocess.run([str(given.python), "-c", CONVERT, *arguments], check=True)
    if given.importance is not None:
        write_importance(given.importance, GgufFile(given.file).tensors)


if __name__ == "__main__":
    main()
