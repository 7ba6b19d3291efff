"""Writes the results of tiny models' prediction layers for given hidden states, by transformers' layers.

    python -m tools.references.make_mtp_goldens          # needs torch and transformers

transformers skips these layers, but has their parts: a layer of the family after two norms and a map. Each case of
`tests/models/drafters/mtp_cases.py` becomes a file in `tests/models/drafters/mtp`: the hidden states after the model's
last layer, the tokens, and the logits of each step ahead. Weights are generated from their seeds.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.drafters.mtp_cases import CASES, FOLDER, NUM_STEPS, NUM_TOKENS, prediction_tensors
from tests.models.folders import Golden, golden_tensors, load_golden
from tests.models.golden_weights import named_tensors, stored_tensors

_AFTER = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_OF_TWO = ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        golden = load_golden(case)
        given = json.loads((golden.folder / "config.json").read_text(encoding="utf-8"))
        is_qwen, has_two = case.startswith("qwen3_5"), case.startswith("nemotron_h")
        kinds = "layers_block_type" if has_two else "layer_types"
        number, eps = golden_layers(golden), given["layer_norm_epsilon" if has_two else "rms_norm_eps"]
        if has_two:
            given[kinds] = [*given[kinds], "full_attention", "moe"]
            del given["time_step_limit"]  # an infinity, which this way of reading refuses
        else:
            given["num_hidden_layers"] = number + 1
            if "mlp_layer_types" in given:
                given["mlp_layer_types"].append("sparse")
        if is_qwen:
            given[kinds] = [*given[kinds], "full_attention"]
        config = AutoConfig.for_model(**given)
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        arrays = {**golden_tensors(golden), **prediction_tensors(case)}
        weights = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        names = _OF_TWO if has_two else _APART if is_qwen else _AFTER
        own = "mtp." if has_two or is_qwen else f"model.layers.{number}."
        layers = model.model.layers[number:]
        with torch.no_grad():
            for name, parameter in named_tensors(model):
                for stored, part in stored_tensors(name, parameter, given["model_type"]):
                    if stored.split(".")[1] == "layers" and (place := int(stored.split(".")[2]) - number) >= 0:
                        rest = stored.split(".", 3)[3]
                        part.copy_(weights[f"{own}{f'layers.{place}.' if own == 'mtp.' else ''}{rest}"])
        head = weights["lm_head.weight"]
        table, norm = (
            next(weights[each] for each in weights if each.endswith(ends))
            for ends in (("embed_tokens.weight", "backbone.embeddings.weight"), ("model.norm.weight", "norm_f.weight"))
        )

        def normed(x: Any, weight: Any, eps: float = eps, offset: int = int(is_qwen)) -> Any:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)

        def run(ids: Any, hidden: Any, layers: Any = layers, model: Any = model, table: Any = table,
                parts: Any = tuple(weights[f"{own}{name}.weight"] for name in names)) -> Any:  # fmt: skip
            x = torch.cat([normed(table[ids], parts[0]), normed(hidden, parts[1])], -1)
            x = (x @ parts[2].T)[None]
            positions = torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
            rotary = getattr(model.model, "rotary_emb", None)
            turned = {} if rotary is None else {"position_embeddings": rotary(x, positions)}
            for layer in layers:
                made = layer(x, attention_mask=mask, position_ids=positions, **turned)
                x = made[0] if isinstance(made, tuple) else made
            return normed(x[0], parts[3])

        torch.manual_seed(golden.seed)
        states = torch.randn(NUM_TOKENS, given["hidden_size"]) * 2
        ids = torch.randint(0, given["vocab_size"], (NUM_TOKENS,))
        logits = np.full((NUM_STEPS, NUM_TOKENS, given["vocab_size"]), np.nan, np.float32)
        with torch.no_grad():
            read = normed(states, norm)
            for column in range(NUM_TOKENS):
                hidden = read[: column + 1]
                for step in range(min(NUM_STEPS, NUM_TOKENS - column)):
                    read_last = run(ids[: column + step + 1], hidden)[-1:]
                    logits[step, column] = (read_last @ head.T)[0].numpy()
                    hidden = torch.cat([hidden, read_last])
        np.savez_compressed(
            FOLDER / f"{case}.npz", states=states.numpy(), token_ids=ids.numpy().astype(np.int32), logits=logits
        )
        print(case, (FOLDER / f"{case}.npz").stat().st_size, "bytes")


def golden_layers(golden: Golden) -> int:
    """How many layers the model has."""
    return 1 + max(int(name.split(".")[2]) for name in golden.shapes if name.split(".")[1] == "layers")


if __name__ == "__main__":
    main()
