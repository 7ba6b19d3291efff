"""`train_demo_model --hybrid`: the demo model's tasks for a small Qwen3.5, of whose four layers three keep a recurrent
state (Gated DeltaNet, https://arxiv.org/abs/2412.06464) and one attends."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

SIZES: dict[str, Any] = {
    "vocab_size": 640, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip


def make_model(end_id: int, pad_id: int) -> Any:
    """The model before training."""
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, eos_token_id=end_id, pad_token_id=pad_id, bos_token_id=None))
