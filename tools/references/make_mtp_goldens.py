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
from tests.models.folders import golden_tensors, load_golden
from tests.models.golden_weights import named_tensors, stored_tensors

_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        golden = load_golden(case)
        given = json.loads((golden.folder / "config.json").read_text(encoding="utf-8"))
        number, eps = given["num_hidden_layers"], given["rms_norm_eps"]
        is_apart = case.startswith("qwen3_5")
        if is_apart:
            given["layer_types"] = [*given["layer_types"], "full_attention"]
        config = AutoConfig.for_model(**{**given, "num_hidden_layers": number + 1})
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        arrays = {**golden_tensors(golden), **prediction_tensors(case)}
        weights = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        own, last = ("mtp.", f"model.layers.{number}.") if is_apart else (f"model.layers.{number}.",) * 2
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm") if is_apart else _NAMES
        with torch.no_grad():
            for name, parameter in named_tensors(model):
                if name.startswith(last):
                    for stored, part in stored_tensors(name, parameter, given["model_type"]):
                        part.copy_(weights[stored.replace(last, "mtp.layers.0.") if is_apart else stored])
        layer, head, table = model.model.layers[number], weights["lm_head.weight"], weights["model.embed_tokens.weight"]

        def normed(x: Any, name: str, weights: Any = weights, eps: float = eps, offset: int = int(is_apart)) -> Any:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weights[f"{name}.weight"] + offset)

        def run(ids: Any, hidden: Any, own: str = own, layer: Any = layer, model: Any = model, table: Any = table,
                weights: Any = weights, names: Any = names) -> Any:  # fmt: skip
            x = torch.cat([normed(table[ids], own + names[0]), normed(hidden, own + names[1])], -1)
            x = (x @ weights[f"{own}{names[2]}.weight"].T)[None]
            positions = torch.arange(len(ids))[None]
            mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
            turned = model.model.rotary_emb(x, positions)
            made = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            return (made[0] if isinstance(made, tuple) else made)[0]

        torch.manual_seed(golden.seed)
        states = torch.randn(NUM_TOKENS, given["hidden_size"]) * 2
        ids = torch.randint(0, given["vocab_size"], (NUM_TOKENS,))
        logits = np.full((NUM_STEPS, NUM_TOKENS, given["vocab_size"]), np.nan, np.float32)
        with torch.no_grad():
            read = normed(states, "model.norm")
            for column in range(NUM_TOKENS):
                hidden = read[: column + 1]
                for step in range(min(NUM_STEPS, NUM_TOKENS - column)):
                    x = run(ids[: column + step + 1], hidden)
                    read_last = normed(x[-1:], own + names[3])
                    logits[step, column] = (read_last @ head.T)[0].numpy()
                    hidden = torch.cat([hidden, read_last])
        np.savez_compressed(
            FOLDER / f"{case}.npz", states=states.numpy(), token_ids=ids.numpy().astype(np.int32), logits=logits
        )
        print(case, (FOLDER / f"{case}.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
