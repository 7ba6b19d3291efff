"""Exact mode over every quantised format: no schedule changes a bit of an answer.

Checkpoints that the formats' own libraries wrote, a GGUF file of each type of block, each format that is made while a
model is loaded, and pages of a byte. On a cpu; what becomes floats there is exact as floats are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Ggml

from runtime.bench.scheduling.exact import bench_exact, engine_maker
from tests.models.folders import write_safetensors
from tests.models.gguf.files import write_gguf
from tests.models.gguf.test_model import CONFIG, QUANTISED, quantised_tensors
from tests.models.quantized.test_fixtures import CASES, FIXTURES

pytestmark = pytest.mark.exhaustive

ON_LOAD: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}, "fp8": {"quantization": "fp8"},
    "mxfp4": {"quantization": "mxfp4"}, "pages int8": {"kv_cache_dtype": "int8"},
    "pages fp8": {"kv_cache_dtype": "fp8"}, "int4, pages fp8": {"quantization": "int4", "kv_cache_dtype": "fp8"},
}  # fmt: skip


def assert_exact(model: Path, **settings: Any) -> None:
    """Serves 40 requests under all schedules."""
    make = engine_maker({"model": model, "device": "cpu", "seed": 0, **settings}, exact=True)
    report = bench_exact(make, make, num_requests=40, num_rounds=0, max_model_len=64)
    assert [(row["name"], row["first"]) for row in report["schedules"] if row["num_different"]] == []
    assert report["is_exact"]
    assert report["num_choices"] >= 40


@pytest.mark.parametrize("case", CASES)
def test_checkpoints(case: str) -> None:
    assert_exact(FIXTURES / case)


@pytest.mark.parametrize("ggml", QUANTISED, ids=[each.name for each in QUANTISED])
def test_gguf(tmp_path: Path, ggml: Ggml) -> None:
    blocks, _ = quantised_tensors(lambda name: ggml)
    assert_exact(write_gguf(tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: ggml))


@pytest.mark.parametrize("settings", ON_LOAD.values(), ids=list(ON_LOAD))
def test_on_load(tmp_path: Path, settings: dict[str, Any]) -> None:
    _, floats = quantised_tensors(lambda name: Ggml.Q8_0)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", floats)
    assert_exact(tmp_path, **settings)


def test_experts_in_mxfp4() -> None:
    assert_exact(FIXTURES.parent / "gpt_oss_mxfp4")
