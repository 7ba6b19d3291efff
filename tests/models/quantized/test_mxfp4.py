"""gpt-oss's experts beside transformers' floats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from models.checkpoint import SafetensorsTensor
from models.errors import WeightsError
from models.quantized.mxfp4 import expert_matrices
from models.safetensors_file import SafetensorsFile
from runtime.dtype import bfloat16
from tests.models.quantized.test_fixtures import FIXTURES

FOLDER = FIXTURES / "mxfp4_experts"


def stored() -> tuple[SafetensorsTensor, SafetensorsTensor]:
    file = SafetensorsFile(FOLDER / "model.safetensors")
    return SafetensorsTensor(file, "gate_up_proj_blocks"), SafetensorsTensor(file, "gate_up_proj_scales")


def test_transformers_floats_bit_for_bit() -> None:
    experts = expert_matrices(*stored())
    floats = np.stack([matrix.dequantise(bfloat16) for matrix in experts])
    assert floats.shape == (2, 6, 96)
    said = json.loads((FOLDER / "dequantised.json").read_text())["gate_up_proj"]
    assert hashlib.sha256(floats.tobytes()).hexdigest() == said["sha256"]


@dataclass(frozen=True)
class Fake:
    """A stored tensor of another kind."""

    values: Any
    type_name: str = "U8"
    file: str = "f.safetensors"
    name: str = "X"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def array(self) -> Any:
        return self.values


def test_what_does_not_fit_is_refused() -> None:
    blocks, scales = Fake(np.zeros((2, 4, 3, 16), np.uint8)), Fake(np.zeros((2, 4, 3), np.uint8), name="S")
    expert_matrices(blocks, scales)  # type: ignore[arg-type]
    nan = scales.values.copy()
    nan[1, 2, 0] = 255
    for changed, message in (
        ((replace(blocks, type_name="I8"), scales), "f.safetensors: tensor 'X' is I8, must be U8"),
        ((Fake(np.zeros((2, 4, 48), np.uint8)), scales), r"tensor 'X' is \[2, 4, 48\], must be \[experts, N, K / 32"),
        ((blocks, Fake(np.zeros((2, 3, 3), np.uint8), name="S")), r"'S' is \[2, 3, 3\], must be \[2, 4, 3\]"),
        ((blocks, replace(scales, values=nan)), r"'S' has the scale nan at \[1, 2, 0\]; scales must be finite"),
    ):
        with pytest.raises(WeightsError, match=message):
            expert_matrices(*changed)  # type: ignore[arg-type]
