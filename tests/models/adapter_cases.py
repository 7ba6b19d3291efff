"""Adapters for the golden models: their configs as PEFT reads them, and their tensors, made again from a seed.

`tools/references/make_adapter_goldens.py` gives both to PEFT, whose logits are in `adapters/<case>.npz`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.folders import Array, Golden, load_golden, write_safetensors
from tests.models.golden_weights import golden_tensor

FOLDER = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Case:
    """An adapter of a golden model; the others are fields of PEFT's `LoraConfig`."""

    golden: str
    r: int = 4
    lora_alpha: float = 12
    target_modules: Any = "all-linear"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `adapter_config.json`, without those that PEFT adds."""
        given = {"r": self.r, "lora_alpha": self.lora_alpha, "target_modules": self.target_modules, **self.more}
        return {"peft_type": "LORA", "task_type": "CAUSAL_LM", **given}


_EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}

CASES: dict[str, Case] = {
    "llama": Case("llama_llama3_odd"),
    "llama_root": Case("llama_llama3_odd", r=3, more={"use_rslora": True}),
    "llama_bias": Case("llama_default", r=2, more={"lora_bias": True}),
    "qwen2_patterns": Case(
        "qwen2_odd", r=5,
        more={"rank_pattern": {r"layers\.1\.self_attn.*": 3, "down_proj": 7}, "alpha_pattern": {"mlp.up_proj": 30}},
    ),
    "gpt2": Case("gpt2_gelu_new", more={"fan_in_fan_out": True}),
    "phi3": Case("phi3_window_odd"),
    "gemma3": Case("gemma3_odd", target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]),
    "qwen3_moe": Case("qwen3_moe_odd", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "qwen3_5": Case("qwen3_5_odd"),
    "granite_hybrid": Case("granite_hybrid_odd", target_modules=["q_proj", "o_proj", "input_linear", "in_proj"]),
    "qwen3_moe_experts": Case("qwen3_moe_odd", target_modules=["q_proj"], more=_EXPERTS),
    "mixtral_experts": Case(
        "mixtral_odd", r=2, target_modules=[], more={**_EXPERTS, "rank_pattern": {"experts.down_proj": 3}}
    ),
    "gpt_oss_experts": Case("gpt_oss_odd", target_modules=["o_proj"], more=_EXPERTS),
    "tables": Case("qwen3_odd", target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "tied_tables": Case("gemma_odd", target_modules=["v_proj", "embed_tokens"], more={"ensure_weight_tying": True}),
    "saved_tables": Case("qwen2_odd", target_modules=["q_proj"], more={"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved_table": Case("llama_tied_gqa4", target_modules=["q_proj"], more={"modules_to_save": ["embed_tokens"]}),
    "tokens": Case("llama_tied_gqa4", target_modules=["o_proj"], more={"trainable_token_indices": [1, 7, 20]}),
    "many_tokens": Case(
        "qwen3_odd", target_modules=["o_proj"], r=2,
        more={"trainable_token_indices": {"embed_tokens": [*range(30)], "lm_head": [1, 3]}},
    ),
    "biases": Case("starcoder2_odd", target_modules=["q_proj", "c_fc"], more={"bias": "lora_only"}),
    "saved_map": Case("llama_default", r=2, target_modules=["q_proj"], more={"modules_to_save": ["down_proj"]}),
    "latent": Case("deepseek_v3_odd", target_modules=r".*self_attn\.(q|kv|o)_.*proj.*"),
    "latent_scaled": Case("mistral4_odd", r=5, target_modules=["kv_b_proj", "o_proj"], more={"lora_bias": True}),
    "layer_inputs": Case("gemma4_inputs_odd"),
    "lfm2": Case("lfm2_odd", target_modules=r".*\.(in_proj|out_proj|w1|w2|q_proj)"),
}  # fmt: skip


def adapter_tensor(name: str, shape: tuple[int, ...], case: str) -> Array:
    """A tensor of an adapter by its name in the file; a copy of a table is the model's."""
    base = name.removeprefix("base_model.model.").replace(".base_layer.weight", ".weight")
    if ".base_layer.weight" in name:
        golden = load_golden(CASES[case].golden)
        base = base if base in golden.shapes else next(each for each in golden.shapes if "embed_tokens" in each)
        return golden_tensor(base, shape, golden.seed)
    if CASES[case].more.get("ensure_weight_tying") and name.startswith("base_model.model.lm_head.lora_"):
        table = "base_model.model.model.embed_tokens.lora_embedding_" + ("B" if "lora_A" in name else "A")
        return adapter_tensor(table, shape[::-1], case).T.copy()  # one tensor of both
    return golden_tensor(name, shape, load_golden(CASES[case].golden).seed + 1) * np.float32(0.3)


@dataclass(frozen=True)
class AdapterGolden:
    """PEFT's logits of the golden's prompt, and the adapter's tensors by name, with their shapes."""

    golden: Golden
    logits: Array
    shapes: dict[str, tuple[int, ...]]


def load_adapter_golden(case: str) -> AdapterGolden:
    with np.load(FOLDER / f"{case}.npz") as stored:
        shapes = json.loads(bytes(stored["shapes"]).decode())
        logits = stored["logits"]
    return AdapterGolden(load_golden(CASES[case].golden), logits, {name: tuple(each) for name, each in shapes.items()})


def write_adapter(
    folder: Path, case: str, *, config: dict[str, Any] | None = None, tensors: dict[str, Array] | None = None,
    is_alone: bool = False,
) -> Path:  # fmt: skip
    """The case's folder as PEFT writes it, with other fields or tensors; or with these alone."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**CASES[case].fields, "base_model_name_or_path": "base", **(config or {})}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    shapes = load_adapter_golden(case).shapes
    made = {} if is_alone else {name: adapter_tensor(name, shape, case) for name, shape in shapes.items()}
    write_safetensors(folder / "adapter_model.safetensors", {**made, **(tensors or {})})
    return folder
