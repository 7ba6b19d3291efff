"""Random adapters for `fuzz_adapters.py`: models of `cases.py`, stored in some format, with adapters of PEFT.

A case is that of `cases.py` with `stored` (a name of `FORMATS`, or of a type of GGUF) and `adapters`, each
`{"fields": those of peft.LoraConfig, "seed"}`. Its runs have a type of activations each (`dtype`).
"""

from __future__ import annotations

import random
import re
from typing import Any

from tools.comparing.fuzzing.cases import Case, draw_case
from tools.comparing.fuzzing.draw import Fields

FAMILIES = (
    "qwen3", "gpt2", "gemma3", "qwen3_moe", "granite_hybrid", "llama", "mixtral", "qwen3_5", "gpt_oss", "phi3",
    "gemma4", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4",
)  # fmt: skip
WITH_CODES = {"llama": ("gptq", "awq", "packed", "rows", "blocks"), "qwen3": ("gptq", "awq", "blocks", "modelopt"),
              "qwen3_moe": ("gptq", "rows", "blocks"), "gemma3": ("awq", "rows")}  # fmt: skip
"""Formats of safetensors that a family's maps are stored in."""
OF_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "F16")
WITH_GGUF = ("llama", "qwen3", "qwen3_moe", "gemma3", "phi3")
MOST_RANK = 64


def draw_stored(rng: random.Random, family: str, emulated: list[str], *, is_small: bool = False) -> Case:
    """A case without its adapters."""
    case = draw_case(rng, family, emulated, is_small=is_small)
    case["notes"], case["texts"] = {}, []
    rope = case["fields"].get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":  # its factors are those of the longest prompt of a batch
        case["fields"]["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    stored = "dense"
    if family in WITH_CODES and rng.random() < 0.35:
        stored = rng.choice(WITH_CODES[family])
    elif family in WITH_GGUF and rng.random() < 0.4:
        stored = rng.choice(OF_GGUF)
    if stored != "dense":
        case |= {"dtype": "float32", "fuses_experts": False, "fields": _divided(case["fields"], stored)}
    if stored in OF_GGUF:  # files have no such windows, and their writer knows few scalings
        case["fields"] = {name: value for name, value in case["fields"].items() if name != "use_sliding_window"}
        if "rope_parameters" in case["fields"]:
            case["fields"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        if family in ("qwen3", "gemma3"):  # nor layers of any kind
            case["fields"].pop("layer_types", None)
        if "query_pre_attn_scalar" in case["fields"]:  # which llama.cpp and we derive from the sizes
            case["fields"]["query_pre_attn_scalar"] = case["fields"]["head_dim"]
        if family == "qwen3_moe":  # in files these models always divide the chosen experts' weights by their sum
            case["fields"]["norm_topk_prob"] = True
    case["stored"] = stored
    for run in case["runs"]:
        run["dtype"] = case["dtype"]
        if stored != "dense" and rng.random() < 0.5:
            run["dtype"] = "bfloat16"  # weights stay as they are stored
    return case


def _divided(fields: Fields, stored: str) -> Fields:
    """The fields with sizes that groups and blocks divide."""
    width = 256 if stored.endswith("_K") else 128 if stored == "blocks" else 64
    own: Fields = {
        "hidden_size": width, "intermediate_size": 2 * width, "moe_intermediate_size": width, "head_dim": 32,
        "num_attention_heads": width // 32, "num_key_value_heads": 1 if width == 64 else 2, "n_embd": width,
        "n_head": 4, "n_inner": 2 * width, "num_hidden_layers": 2, "n_layer": 2,
    }  # fmt: skip
    own |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    changed: Fields = {name: own.get(name, value) for name, value in fields.items()}
    if "layer_types" in changed:
        changed["layer_types"] = [changed["layer_types"][at % len(changed["layer_types"])] for at in range(2)]
    if "no_rope_layers" in changed:
        changed["no_rope_layers"] = changed["no_rope_layers"][:1] * 2
    return changed


def draw_adapters(rng: random.Random, case: Case, made: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Adapters of a model whose maps, tables and parameters the oracle has named."""
    return [{"fields": _AdapterDraw(rng, case, made).fields(), "seed": rng.randrange(1 << 16)} for _ in range(count)]


class _AdapterDraw:
    """Draws the fields of one adapter."""

    def __init__(self, rng: random.Random, case: Case, made: dict[str, Any]) -> None:
        self.rng, self.case = rng, case
        self.maps = [name for name in made["maps"] if "lm_head" not in name]
        self.leaves = sorted({name.rpartition(".")[2] for name in self.maps})
        self.parameters = sorted({".".join(name.split(".")[-2:]) for name in made["parameters"]})
        self.table = next(name for name in made["tables"] if name.endswith(("embed_tokens", "wte")))
        text = case["fields"].get("text_config", case["fields"])
        self.is_tied = bool(case["fields"].get("tie_word_embeddings", case["family"] == "gpt2"))
        self.vocab_size, self.num_layers = text["vocab_size"], text.get("num_hidden_layers", text.get("n_layer"))

    def flip(self, chance: float) -> bool:
        return self.rng.random() < chance

    def some(self, names: list[str]) -> list[str]:
        """At least one of them."""
        return sorted(self.rng.sample(names, self.rng.randint(1, len(names))))

    def rank(self) -> int:
        return self.rng.choice((1, 2, 3, 4, 8, 16, self.rng.randint(1, MOST_RANK)))

    def alpha(self, rank: int, *, has_root: bool) -> int:
        return max(1, round(self.rng.choice((0.5, 1, 2, 4)) * (rank**0.5 if has_root else rank)))

    def fields(self) -> Fields:
        """Those of `LoraConfig`."""
        rank, has_root = self.rank(), self.flip(0.3)
        fields: Fields = {
            "r": rank, "lora_alpha": self.alpha(rank, has_root=has_root), "use_rslora": has_root,
            "task_type": "CAUSAL_LM", "init_lora_weights": False, **self._modules(),
        }  # fmt: skip
        if self.case["family"] == "gpt2":
            fields["fan_in_fan_out"] = True
        if self.flip(0.4):
            fields["rank_pattern"] = {name: self.rank() for name in self._patterns()}
        if self.flip(0.4):
            fields["alpha_pattern"] = {name: self.rng.randint(1, 2 * rank) for name in self._patterns()}
        if self.parameters and self.flip(0.7):
            fields["target_parameters"] = self.some(self.parameters)
            is_list = isinstance(fields["target_modules"], list)  # else PEFT adds patterns of its own
            named = fields["target_parameters"] if is_list and self.flip(0.5) else []
            fields["rank_pattern"] = {name: self.rank() for name in named}
        elif self.flip(0.2):
            fields["lora_bias"] = True
        elif self.flip(0.2):
            fields["bias"] = "lora_only"
        self._add_tables(fields)
        for name in ("rank_pattern", "alpha_pattern"):  # in the order in which PEFT saves them
            fields[name] = dict(sorted(fields.get(name, {}).items()))
        return fields

    def _modules(self) -> Fields:
        """The modules that are adapted."""
        excluded: Fields = {}
        kind = self.rng.choice(("list", "list", "regex", "all-linear", "places"))
        if kind == "all-linear":
            more = self.some(self.leaves)
            if self.flip(0.3) and len(more) < len(self.leaves):
                excluded = {"exclude_modules": more}
            return {"target_modules": kind, **excluded}
        if kind == "regex":
            leaves = self.some(self.leaves)
            layer = self.rng.choice((r"\d+", str(self.rng.randrange(self.num_layers))))
            pattern = rf".*\.(layers|h)\.{layer}\..*({'|'.join(map(re.escape, leaves))})"
            if not any(re.fullmatch(pattern, name) for name in self.maps):
                pattern = rf".*({'|'.join(map(re.escape, leaves))})"
            if self.flip(0.3) and len(leaves) > 1:
                excluded = {"exclude_modules": rf".*\.{re.escape(leaves[0])}"}
            return {"target_modules": pattern, **excluded}
        if kind == "places":
            return {"target_modules": self.some(self.maps), **excluded}
        leaves = self.some(self.leaves)
        names = [".".join(name.split(".")[-2:]) for name in self.maps if name.rpartition(".")[2] in leaves]
        fields: Fields = {"target_modules": sorted(set(names)) if self.flip(0.3) else leaves, **excluded}
        if self.flip(0.4):
            layers = self.rng.randrange(self.num_layers)
            found = [name for name in self.maps if re.search(rf"\.{layers}\.", name) and name.endswith(tuple(leaves))]
            if found:
                fields["layers_to_transform"] = self.rng.choice((layers, [layers]))
                if self.flip(0.5):
                    fields["layers_pattern"] = "h" if self.case["family"] == "gpt2" else "layers"
        return fields

    def _patterns(self) -> list[str]:
        some = self.some(self.leaves)
        layer = self.rng.randrange(self.num_layers)
        return [rf".*\.{layer}\..*{some[0]}", *some[1:]] if self.flip(0.5) else some

    def _add_tables(self, fields: Fields) -> None:
        table, is_list = self.table.rpartition(".")[2], isinstance(fields["target_modules"], list)
        kind = self.rng.choice(("none", "none", "none", "pair", "saved", "tokens", "both", "map"))
        if kind == "pair" and is_list and "layers_to_transform" not in fields:
            fields["target_modules"].append(table)
            if not self.is_tied and self.flip(0.5):
                fields["target_modules"].append("lm_head")
            elif self.is_tied and self.case["family"] != "gpt2":
                fields["ensure_weight_tying"] = self.flip(0.5)
        elif kind == "saved":
            fields["modules_to_save"] = [table] if self.is_tied else self.some([table, "lm_head"])
        elif kind in ("tokens", "both"):
            ids = sorted(self.rng.sample(range(self.vocab_size), self.rng.randint(1, self.vocab_size // 2)))
            fields["trainable_token_indices"] = ids if kind == "tokens" else {table: ids[:3]}
            if kind == "both" and not self.is_tied:
                fields["trainable_token_indices"]["lm_head"] = ids[-3:]
        elif kind == "map" and is_list and "layers_to_transform" not in fields:
            left = [name for name in self.leaves if not any(each.endswith(name) for each in fields["target_modules"])]
            if left:
                fields["modules_to_save"] = [self.rng.choice(left)]
