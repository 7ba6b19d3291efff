"""Writes tiny EAGLE-3 drafters saved by `speculators`, and its own model's results for given hidden states.

    python -m tools.references.make_eagle3_goldens          # needs speculators, transformers and torch

Each case of `tests/models/drafters/eagle3_cases.py` becomes a folder in `tests/models/drafters/eagle3`: the checkpoint,
and `expected.npz` with the given hidden states and tokens, and the logits of each step ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

from tests.models.drafters.eagle3_cases import CASES, FOLDER, NUM_STEPS, NUM_TOKENS, TARGET_LAYERS


def main() -> None:
    for seed, (case, (layer, own)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**layer)
        config._attn_implementation = "eager"
        proposals = SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=[]),
        )  # fmt: skip
        model: Any = Eagle3DraftModel(
            Eagle3SpeculatorConfig(transformer_layer_config=config, speculators_config=proposals, **own)
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.3 if parameter.ndim > 1 else 0.2
                values = torch.randn(parameter.shape) * scale + (parameter.ndim == 1)
                parameter.copy_(values.bfloat16().float())
        vocab, known = layer["vocab_size"], own["draft_vocab_size"]
        if known < vocab:
            chosen = torch.randperm(vocab)[:known].sort().values
            is_known = torch.zeros(vocab, dtype=torch.bool)
            is_known[chosen] = True
            model.load_vocab_mappings(is_known, chosen - torch.arange(known))
        states = torch.randn(1, NUM_TOKENS, len(TARGET_LAYERS) * layer["hidden_size"])
        ids = torch.randint(0, vocab, (1, NUM_TOKENS))
        steps: list[Any] = []
        model.lm_head.register_forward_hook(lambda module, given, made, steps=steps: steps.append(made[0].numpy()))
        with torch.no_grad():
            model(states, ids, torch.zeros(1, NUM_TOKENS, dtype=torch.long), ttt_steps=NUM_STEPS)
        folder = FOLDER / case
        model.bfloat16().save_pretrained(folder)
        np.savez_compressed(
            folder / "expected.npz", states=states[0].numpy(), token_ids=ids[0].numpy().astype(np.int32),
            logits=np.stack(steps),
        )  # fmt: skip
        (folder / "config.py").unlink(missing_ok=True)
        print(case, sorted(path.name for path in folder.iterdir()), np.stack(steps).shape)


if __name__ == "__main__":
    main()
