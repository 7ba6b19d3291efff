"""Writes transformers' results for the tiny models of `llava_cases.py`, `pixtral_cases.py` and `gemma3_cases.py` of
`tests/models/vision`.

    python -m tools.references.make_llava_goldens [CASE]          # needs transformers and torch
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers

from tests.models.driver import mean_relative_error, relative_error
from tests.models.golden_weights import golden_tensor
from tests.models.vision import gemma3_cases, llava_cases, pixtral_cases
from tests.models.vision.cases import FOLDER, IMAGE, SEED

NUM_NEW = 6
"""Tokens sampled after Gemma's prompt."""


def main() -> None:
    for module in (llava_cases, pixtral_cases, gemma3_cases):
        for case in module.CASES:
            if sys.argv[1:] in ([], [case]):
                make_case(module, case)


def make_case(module: ModuleType, case: str) -> None:
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(module.CASES[case])))
    config._attn_implementation = "eager"
    model: Any = transformers.AutoModelForImageTextToText.from_config(config).eval()
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shapes[name] = tuple(parameter.shape)
            parameter.copy_(torch.from_numpy(golden_tensor(name, shapes[name], SEED)))
        sizes = {}
        if module is pixtral_cases:
            batch, each = module.batch_of(case)
            pixels, sizes = torch.from_numpy(batch), {"image_sizes": torch.tensor(each)}
        else:
            pixels = torch.from_numpy(module.pixels_of(case))
        names = ("vision_feature_layer", "vision_feature_select_strategy")
        choices = {name: getattr(config, name) for name in names if hasattr(config, name)}
        made = model.model.get_image_features(pixels, **choices, **sizes)
        ids = module.prompt_of(case)[0]
        found: dict[str, Any] = {}
        logits = logits_of(model, ids, pixels, **sizes)
        if module is gemma3_cases:
            found["greedy"] = []
            for _ in range(NUM_NEW):
                found["greedy"].append(int(logits[-1].argmax()))
                logits = logits_of(model, [*ids, *found["greedy"]], pixels)
            ids, logits = [*ids, *found["greedy"][:-1]], logits[:-1]
        rough = logits_of(model.bfloat16(), ids, pixels.bfloat16(), **sizes)
    (FOLDER / f"{case}.json").write_text(json.dumps(shapes, separators=(",", ":")), encoding="utf-8")
    put = torch.cat if module is pixtral_cases else torch.stack
    embeddings = put(list(made.pooler_output)).numpy()
    error = np.float64(relative_error(rough, logits))
    found["bfloat16_mean_error"] = np.float64(mean_relative_error(rough, logits))
    np.savez_compressed(FOLDER / f"{case}.npz", embeddings=embeddings, logits=logits, bfloat16_error=error, **found)
    print(case, embeddings.shape, logits.shape, error, found.get("greedy"))


def logits_of(model: Any, ids: list[int], pixels: Any, **more: Any) -> np.ndarray[Any, Any]:
    """Logits of all positions; Gemma gets a mask of pictures, so that their tokens see each other."""
    if model.config.model_type == "gemma3":
        more["token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in ids]])
    made = model(input_ids=torch.tensor([ids]), pixel_values=pixels, **more)
    logits: np.ndarray[Any, Any] = made.logits[0].float().numpy()
    return logits


if __name__ == "__main__":
    main()
