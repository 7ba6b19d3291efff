"""Writes what transformers' `generate` answers greedily with its own logits processors, for the bundled model.

python -m tools.references.make_processor_goldens [--output FILE]     # needs torch and transformers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    __version__,
)

from tests.runtime.engine.logits.cases import EOS, GOLDENS, MIN_TOKENS, MODEL, NUM_TOKENS, PENALTY, PROMPTS, TOP_K


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=GOLDENS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found: dict[str, list[list[int]]] = {}
    for name in ("repetition_penalty", "min_length", "no_repeat_ngram", "top_k", "none"):
        found[name] = []
        for prompt in PROMPTS:
            processors = {
                "repetition_penalty": [RepetitionPenaltyLogitsProcessor(PENALTY)],
                "min_length": [MinNewTokensLengthLogitsProcessor(len(prompt), MIN_TOKENS, EOS)],
                "no_repeat_ngram": [NoRepeatNGramLogitsProcessor(2)],
                "top_k": [TopKLogitsWarper(TOP_K), RepetitionPenaltyLogitsProcessor(PENALTY)],
                "none": [],
            }[name]
            ids = torch.tensor([prompt])
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS,
                eos_token_id=EOS, pad_token_id=EOS, logits_processor=LogitsProcessorList(processors),
            )  # fmt: skip
            found[name].append(answer[0, len(prompt) :].tolist())
    given.output.write_text(json.dumps({"transformers": __version__, "answers": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
