"""Writes a GGUF file of a mixture of experts with seeded random weights, for `bench peers --gguf`.

    python -m tools.write_moe_gguf qwen3moe FILE --layers 8     Qwen3-30B-A3B's layers, matrices in Q4_0
    python -m tools.write_moe_gguf gpt-oss FILE --layers 4      gpt-oss-20b's layers, experts in MXFP4, others in Q8_0

Layers have the published sizes; there are fewer of them, and fewer tokens in the vocabulary (32,768), so that the head
keeps about its share. Blocks are random bytes, with scales for a deviation of some hundredths: nothing is quantised.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Ggml

VOCAB_SIZE = 32_768
DEVIATION = 0.02
EMBEDDING_DEVIATION = 4.0  # between two equal experts rounding chooses, which then changes little
SHAPES: dict[str, dict[str, int]] = {
    "qwen3moe": {
        "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "inner": 6144, "expert": 768, "experts": 128,
        "used": 8,
    },
    "gpt-oss": {
        "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "inner": 2880, "expert": 2880, "experts": 32,
        "used": 4,
    },
}  # fmt: skip


class Writer:
    """A `gguf.GGUFWriter` of random tensors."""

    def __init__(self, path: Path, architecture: str, seed: int) -> None:
        self.to, self.rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(seed)

    def floats(self, name: str, *shape: int, mean: float = 0.0, scale: float = DEVIATION) -> None:
        """Normal float32."""
        self.to.add_tensor(name, (self.rng.standard_normal(shape, np.float32) * np.float32(scale)) + np.float32(mean))

    def matrix(self, name: str, ggml: Ggml, *shape: int, scale: float = DEVIATION) -> None:
        """Blocks whose numbers are uniform, with about this deviation."""
        elements, size = gguf.GGML_QUANT_SIZES[ggml]
        blocks = self.rng.integers(0, 256, (int(np.prod(shape)) // elements, size), np.uint8)
        if ggml is Ggml.MXFP4:  # e2m1's deviation is 2.9, and exponents are 127 above their value
            blocks[:, 0] = round(float(np.log2(scale / 2.9))) + 127
        else:
            deviation = {Ggml.Q4_0: 4.6, Ggml.Q8_0: 74.0}[ggml]
            blocks[:, :2] = np.frombuffer(np.float16(scale / deviation).tobytes(), np.uint8)
        self.to.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=ggml)

    def close(self) -> None:
        """Writes the file."""
        self.to.write_header_to_file()
        self.to.write_kv_data_to_file()
        self.to.write_tensors_to_file()
        self.to.close()


def write(
    path: Path, architecture: str, num_layers: int, seed: int, *, shape: Mapping[str, int] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> None:  # fmt: skip
    """Writes the whole file; `shape` None is that of the published model."""
    shape = shape or SHAPES[architecture]
    writer, is_gpt_oss = Writer(path, architecture, seed), architecture == "gpt-oss"
    _add_keys(writer.to, shape, num_layers, vocab_size, is_gpt_oss)
    hidden, expert, count, head_dim = (shape[name] for name in ("hidden", "expert", "experts", "head_dim"))
    plain, in_experts = (Ggml.Q8_0, Ggml.MXFP4) if is_gpt_oss else (Ggml.Q4_0, Ggml.Q4_0)
    added = DEVIATION / float(np.sqrt(2 * num_layers))  # of the terms added to the residual
    writer.matrix("token_embd.weight", plain, vocab_size, hidden, scale=EMBEDDING_DEVIATION)
    writer.matrix("output.weight", plain, vocab_size, hidden)
    writer.floats("output_norm.weight", hidden, mean=1.0)
    for layer in range(num_layers):
        at = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm" if is_gpt_oss else "ffn_norm"):
            writer.floats(f"{at}{name}.weight", hidden, mean=1.0)
        queries, keys = shape["heads"] * head_dim, shape["kv_heads"] * head_dim
        rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_output": hidden}
        for name, width in rows.items():
            depth, scale = (queries, added) if name == "attn_output" else (hidden, DEVIATION)
            writer.matrix(f"{at}{name}.weight", plain, width, depth, scale=scale)
            if is_gpt_oss:
                writer.floats(f"{at}{name}.bias", width)
        if is_gpt_oss:
            writer.floats(f"{at}attn_sinks.weight", shape["heads"], scale=1.0)
            writer.floats(f"{at}ffn_gate_inp.bias", count)
        else:
            for name in ("attn_q_norm", "attn_k_norm"):
                writer.floats(f"{at}{name}.weight", head_dim, mean=1.0)
        writer.floats(f"{at}ffn_gate_inp.weight", count, hidden)
        for name, width, depth in (("gate", expert, hidden), ("up", expert, hidden), ("down", hidden, expert)):
            scale = added if name == "down" else DEVIATION
            writer.matrix(f"{at}ffn_{name}_exps.weight", in_experts, count, width, depth, scale=scale)
            if is_gpt_oss:
                writer.floats(f"{at}ffn_{name}_exps.bias", count, width)
    writer.close()


def _add_keys(to: Any, shape: Mapping[str, int], num_layers: int, vocab_size: int, is_gpt_oss: bool) -> None:
    to.add_block_count(num_layers)
    to.add_context_length(4096)
    to.add_embedding_length(shape["hidden"])
    to.add_feed_forward_length(shape["inner"])
    to.add_head_count(shape["heads"])
    to.add_head_count_kv(shape["kv_heads"])
    to.add_key_length(shape["head_dim"])
    to.add_value_length(shape["head_dim"])
    to.add_expert_count(shape["experts"])
    to.add_expert_used_count(shape["used"])
    to.add_expert_feed_forward_length(shape["expert"])
    to.add_layer_norm_rms_eps(1e-5 if is_gpt_oss else 1e-6)
    to.add_rope_freq_base(150_000.0 if is_gpt_oss else 1_000_000.0)
    to.add_vocab_size(vocab_size)
    to.add_tokenizer_model("none")
    if is_gpt_oss:
        to.add_sliding_window(128)
        to.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        to.add_rope_scaling_factor(32.0)
        to.add_rope_scaling_orig_ctx_len(4096)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.file, given.architecture, given.layers, given.seed)


if __name__ == "__main__":
    main()
