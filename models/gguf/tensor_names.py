"""Tensor names of a layer in GGUF, and their names in safetensors, by family.

Names with "{expert}" are stacks of all experts in GGUF, "{keys}" and "{values}" the two parts of one map of each head.
"""

from __future__ import annotations

ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {
    "attn_norm": "input_layernorm",
    **{name: f"self_attn.{ours}" for name, ours in ATTENTION.items()},
    "ffn_norm": "post_attention_layernorm",
    **MLP,
}
BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA = {**LLAMA, "ffn_norm": "pre_feedforward_layernorm", **BEHIND}
OLMO2 = {name: ours for name, ours in {**LLAMA, **HEAD_NORMS}.items() if name not in ("attn_norm", "ffn_norm")}
GLM4 = {
    **LLAMA, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
PHI3 = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj", "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3", "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}  # fmt: skip
GPT_OSS = {
    **LLAMA, **EXPERTS, "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip


GLM4_MOE = {
    **{name: ours for name, ours in {**LLAMA, **HEAD_NORMS, **ROUTER, **EXPERTS}.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}  # fmt: skip
DEEPSEEK2 = {
    **LLAMA, **ROUTER, **EXPERTS, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj.{keys}", "attn_v_b": "self_attn.kv_b_proj.{values}",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}  # fmt: skip
STARCODER2 = {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
HUNYUAN = {
    **LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"
}  # fmt: skip
APERTUS = {
    **LLAMA, **HEAD_NORMS, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm",
}  # fmt: skip
GRANITE_MOE = {
    **LLAMA, "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{name: ours.replace("mlp", "block_sparse_moe") for name, ours in EXPERTS.items()},
    "ffn_gate_shexp": "shared_mlp.gate_proj", "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
ERNIE_MOE = {
    **LLAMA, **ROUTER, **EXPERTS, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
GPT_NEOX = {
    "attn_norm": "input_layernorm", **{f"attn_{name}": f"attention.{name}_proj" for name in "qkv"},
    "attn_output": "attention.dense", "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm", "blk": "model.layers"}
SEED_OSS = {
    **{name: ours for name, ours in LLAMA.items() if name != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip

FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Tensors that hold the rows of others, one's after another's, where an architecture has them not as such: of some
families, and of any if the converter is asked to."""
