"""An adapter's tensors by their names in PEFT's file, made again from a seed wherever they are needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models.golden_weights import golden_tensor

Array = np.ndarray[Any, Any]
_PREFIX = "base_model.model."


def adapter_tensor(name: str, shape: tuple[int, ...], adapter: dict[str, Any], weights: int) -> Array | None:
    """The tensor of an adapter (`adapter_cases.py`) of a model whose weights have this seed; None for a copy of the
    base model's table."""
    if ".base_layer.weight" in name:
        return None
    if adapter["fields"].get("ensure_weight_tying") and name.startswith(f"{_PREFIX}lm_head.lora_"):
        table = f"{_PREFIX}model.embed_tokens.lora_embedding_" + ("B" if "lora_A" in name else "A")
        return golden_tensor(table, shape[::-1], weights + adapter["seed"]).T.copy() * np.float32(0.3)
    return golden_tensor(name, shape, weights + adapter["seed"]) * np.float32(0.3)
