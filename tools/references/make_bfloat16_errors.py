"""Writes the error of transformers' own bfloat16 logits for some models, over seeds of their weights.

    python tools/references/make_bfloat16_errors.py          # needs transformers and torch

`tests/models/goldens/bfloat16_errors.json` has, for each case, max|a - b| / max|b| of its prompt's logits, where b are
those of the same weights, rounded to bfloat16, in float32 arithmetic; a seed each. One seed says little: such errors
differ by a factor of five, as a gated norm divides by a head's result, which may be near 0. In models with experts
only rows that both types send to the same experts are compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.models.golden_weights import golden_tensor, named_tensors, rounded_to_bfloat16, stored_tensors  # noqa: E402
from tests.models.states_in_bfloat16 import CASES, ERRORS, GOLDENS, NUM_SEEDS, seed_of  # noqa: E402


def logits_of(case: str, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and the experts `[T, k]` that each router chose, in order of their numbers."""
    config = transformers.AutoConfig.from_pretrained(GOLDENS / case)
    model_class = getattr(transformers, config.architectures[0])  # "Auto" classes lack some
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class._from_config(config, dtype=dtype, **eager).eval()
    routes: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _module, _given, found: routes.append(found[-1].sort(1)[0]))
    prompt = json.loads((GOLDENS / case / "golden.json").read_text(encoding="utf-8"))["prompt_ids"]
    with torch.no_grad():
        for name, parameter in named_tensors(model):
            for stored, place in stored_tensors(name, parameter, config.model_type):
                place.copy_(torch.from_numpy(rounded_to_bfloat16(golden_tensor(stored, tuple(place.shape), seed))))
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0].float()
    return logits, routes


def main() -> None:
    found: dict[str, list[float]] = {}
    for case in CASES:
        found[case] = []
        for index in range(NUM_SEEDS):
            (exact, theirs), (rounded, routes) = (
                logits_of(case, seed_of(case, index), each) for each in (torch.float32, torch.bfloat16)
            )
            alike = torch.ones(len(exact), dtype=torch.bool)
            for ids, wanted in zip(routes, theirs, strict=True):
                alike &= (ids == wanted).all(1)
            error = (rounded - exact)[alike].abs().max() / exact[alike].abs().max()
            found[case].append(round(float(error), 5))
        print(case, found[case])
    ERRORS.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
