"""`kernels build --model`: a model's kernels, found by running its engine on a device that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import models.demo
from numba_kernels.cuda.registry import specialisations
from runtime.cli import app
from runtime.device import gpu as gpu_module
from runtime.device.gpu import Gpu
from runtime.engine.config import EngineConfig
from runtime.engine.model_kernels import kernels_of_model, shallow_copy

DEMO = Path(models.demo.__file__).parent


@pytest.fixture(autouse=True)
def _devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "_opened", {})


def test_the_bundled_models_kernels() -> None:
    found = {each.name for each in kernels_of_model(DEMO, "sm_80", EngineConfig())}
    for family in (
        "embedding",
        "rms_norm",
        "deferred_norm",
        "qkv_prepare",
        "attention_decode",
        "attention_flash",
        "gemv",
        "gemm",
        "sampling",
    ):
        assert any(name.startswith(family) for name in found), family
    assert any(name.endswith("_silu") for name in found)
    assert not any("_f16_" in name for name in found)  # its weights are bfloat16
    rare = found - {each.name for each in specialisations()}
    assert all("_d32_" in f"{name}_" for name in rare)  # its head dim; a build of everything covers the rest
    assert Gpu.of("emulated:sm_80").allocator.statistics.num_driver_allocations > 0  # the device that did nothing


def test_the_type_of_the_weights_is_chosen() -> None:
    found = [each.name for each in kernels_of_model(DEMO, "sm_80", EngineConfig(dtype="float32"))]
    assert "rms_norm_f32_x4" in found
    assert not any("bf16" in name for name in found)


@pytest.mark.exhaustive
def test_a_ranks_kernels_are_found_without_the_others() -> None:
    config = EngineConfig(max_model_len=32, tensor_parallel_size=2, exact=True)
    found = {each.name for each in kernels_of_model(DEMO, "sm_90a", config)}
    assert any(name.startswith("add_segments") or "segment" in name for name in found), sorted(found)


@pytest.mark.exhaustive  # ptxas goes over all of them
def test_a_quantised_models_kernels_are_those_of_its_layout() -> None:
    folder = Path(__file__).parents[2] / "models" / "quantized" / "fixtures" / "gptq_w4"
    found = [each.name for each in kernels_of_model(folder, "sm_90a", EngineConfig(max_model_len=32))]
    assert any(name.startswith("gemm_skinny_u4_g32_") for name in found)


def test_layers_of_one_kind_are_not_repeated(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    cases = [
        ({"num_hidden_layers": 36, "hidden_size": 8}, {"num_hidden_layers": 2, "hidden_size": 8}),
        ({"n_layer": 1}, {"n_layer": 1}),
        ({"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]},) * 2,
    ]
    for fields, expected in cases:
        (source / "config.json").write_text(json.dumps(fields))
        assert json.loads((shallow_copy(source, target) / "config.json").read_text()) == expected


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["kernels", "build", "--model", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
