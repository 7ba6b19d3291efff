"""The operations that the tower's section counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.registry import load_model
from tests.models.vision.chat_model import write_chat_model
from tools.gpu.serving.vision import product_flops


def test_product_flops_are_those_of_every_matrix(tmp_path: Path) -> None:
    model: Any = load_model(str(write_chat_model(tmp_path / "vl")), load_format="dummy", device="cpu")
    rows = {64: [(36, 108), (36, 36), (36, 52), (52, 36)] * 3, 16: [(144, 144), (144, 40)] * 3}
    assert product_flops(model.tower, 64) == sum(2 * num * a * b for num, shapes in rows.items() for a, b in shapes)
