"""Adapters of tiny models' towers: shared by the tests and `tools/references/make_vision_goldens.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.folders import write_safetensors
from tests.models.golden_weights import golden_tensor
from tests.models.vision.cases import FOLDER, SEED

ADAPTED = ("qwen3_vl", "qwen2_5_vl", "gemma3_window", "llava_clip_llama", "mistral3")
ADAPTER: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}


def adapter_tensor(name: str, shape: tuple[int, ...], factor: float = 0.3) -> np.ndarray[Any, Any]:
    """A tensor of an adapter by its name in the file."""
    return golden_tensor(name, shape, SEED + 1) * np.float32(factor)


def write_adapter(folder: Path, case: str, *, factor: float = 0.3, part: str = "") -> Path:
    """A folder as PEFT writes it, of the modules whose names contain `part`."""
    with np.load(FOLDER / "adapters.npz") as stored:
        shapes = json.loads(bytes(stored[f"{case}_shapes"]).decode())
    folder.mkdir(parents=True)
    fields = {"peft_type": "LORA", "base_model_name_or_path": "base", **ADAPTER}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = {name: adapter_tensor(name, tuple(shape), factor) for name, shape in shapes.items() if part in name}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder
