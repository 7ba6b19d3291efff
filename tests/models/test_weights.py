"""Loading holds the source of one linear map at a time, whatever it is made into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoint import Checkpoint, open_checkpoint
from models.families import known_architectures
from models.registry import load_config
from models.safetensors_file import SafetensorsFile
from models.weights import Weights
from runtime.device.device import Device
from runtime.dtype import DType, bfloat16
from tests.models.folders import golden_tensors, load_golden, write_model, write_safetensors


class WatchedSource:
    """A checkpoint that notes which tensors were looked at and not released yet."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.held: set[str] = set()
        self.most_held: set[str] = set()
        self.seen: set[str] = set()

    def main_dtype(self) -> DType:
        return self._source.main_dtype()

    def dtype(self, name: str) -> DType:
        return self._source.dtype(name)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        self.held.add(name)
        self.seen.add(name)
        if len(self.held) > len(self.most_held):
            self.most_held = set(self.held)
        return self._source.array(name)

    def release(self, name: str) -> None:
        self.held.discard(name)
        self._source.release(name)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [None, bfloat16], ids=str)
@pytest.mark.parametrize("case", ["gpt2_gelu_erf", "qwen2_tied"])
def test_the_source_is_released_map_by_map(
    tmp_path: Path, case: str, dtype: DType | None, quantization: str
) -> None:
    folder = write_model(tmp_path, load_golden(case))
    config = load_config(folder)
    model_class = known_architectures()[config.architecture].model_class
    layout = model_class.tensor_layout(config)
    checkpoint = open_checkpoint(folder)
    checkpoint.fit(layout)
    source = WatchedSource(checkpoint)
    model_class(config, Weights(source, dtype, quantization=quantization), Device.parse("cpu"), 64)
    assert source.seen == set(layout.shapes)
    assert source.held == set()
    joined = {name.rsplit(".", 2)[0] for name in source.most_held}
    assert len(joined) == 1, source.most_held  # query, key and value with their biases at most
    assert len(source.most_held) <= 6


def test_a_tied_copy_that_was_compared_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden("gpt2_gelu_new")
    folder = write_model(tmp_path, golden)
    tensors = golden_tensors(golden)
    write_safetensors(
        folder / "model.safetensors", {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    )
    released: list[str] = []
    monkeypatch.setattr(SafetensorsFile, "release", lambda self, name: released.append(name))
    config = load_config(folder)
    open_checkpoint(folder).fit(known_architectures()[config.architecture].model_class.tensor_layout(config))
    assert sorted(released) == ["lm_head.weight", "transformer.wte.weight"]
