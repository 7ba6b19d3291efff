"""Writes what transformers makes of the tiny models of `tests/models/vision/llava_cases.py`.

    python -m tools.make_llava_goldens          # needs transformers and torch
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.models.driver import relative_error
from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import FOLDER, SEED
from tests.models.vision.llava_cases import CASES, pixels_of, prompt_of


def main() -> None:
    import torch
    import transformers

    for case, values in CASES.items():
        config = transformers.AutoConfig.for_model(**json.loads(json.dumps(values)))
        config._attn_implementation = "eager"
        model: Any = transformers.AutoModelForImageTextToText.from_config(config).eval()
        shapes: dict[str, tuple[int, ...]] = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                shapes[name] = tuple(parameter.shape)
                parameter.copy_(torch.from_numpy(golden_tensor(name, shapes[name], SEED)))
            pixels = torch.from_numpy(pixels_of(case))
            made = model.model.get_image_features(
                pixels, vision_feature_layer=config.vision_feature_layer,
                vision_feature_select_strategy=config.vision_feature_select_strategy,
            )  # fmt: skip
            ids = torch.tensor([prompt_of(case)[0]])
            logits = model(input_ids=ids, pixel_values=pixels).logits[0].numpy()
            rough = model.bfloat16()(input_ids=ids, pixel_values=pixels.bfloat16()).logits[0].float().numpy()
        (FOLDER / f"{case}.json").write_text(json.dumps(shapes, separators=(",", ":")))
        embeddings = torch.stack(list(made.pooler_output)).numpy()
        error = np.float64(relative_error(rough, logits))
        np.savez_compressed(FOLDER / f"{case}.npz", embeddings=embeddings, logits=logits, bfloat16_error=error)
        print(case, embeddings.shape, logits.shape, error)


if __name__ == "__main__":
    main()
