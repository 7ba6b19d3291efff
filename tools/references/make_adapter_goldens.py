"""Writes PEFT's logits of the golden models with adapters; needs torch, transformers and peft.

    python -m tools.references.make_adapter_goldens [CASE ...]

Each case of `tests/models/adapter_cases.py` becomes a file in `tests/models/adapters`: the logits of the golden's
prompt, and the names and shapes of the adapter's tensors, whose numbers are generated from a seed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from tests.models.adapter_cases import CASES, FOLDER, adapter_tensor
from tests.models.folders import load_golden
from tools.references.generate_reference import config_of, load


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        golden = load_golden(case.golden)
        model: Any = load(config_of(case.golden), golden.seed, False)
        fields = {key: value for key, value in case.fields.items() if key != "peft_type"}
        adapted = get_peft_model(model, LoraConfig(**fields)).eval()
        given = get_peft_model_state_dict(adapted)
        shapes = {key: tuple(tensor.shape) for key, tensor in given.items()}
        made = {key: torch.from_numpy(adapter_tensor(key, shape, name)) for key, shape in shapes.items()}
        missing = set_peft_model_state_dict(adapted, made)
        assert not missing.unexpected_keys, missing.unexpected_keys
        with torch.no_grad():
            logits = adapted(torch.tensor([golden.prompt_ids])).logits[0].numpy()
        change = np.abs(logits - golden.logits["float32"]).max() / np.abs(logits).max()
        assert change > 1e-2, f"{name}: the adapter changes nothing"
        np.savez_compressed(
            FOLDER / f"{name}.npz", logits=logits, shapes=np.frombuffer(json.dumps(shapes).encode(), np.uint8)
        )
        print(f"{name}: {len(shapes)} tensors, logits change by {change:.2f}")


if __name__ == "__main__":
    main()
