"""Quantised layers of the GPU check are what a checkpoint's would be, and what is wrong with a product is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import declare_model, load_model
from numba_kernels.cuda.experts import hopper
from runtime import ops
from runtime.backends import cuda_plans
from runtime.bench.kernels.case import Inputs, Prepared, errors
from runtime.device.gpu import Gpu
from runtime.linear.options import LoadOptions
from runtime.linear.packed_matrix import MatrixPart, prepare_packed
from runtime.linear.weight import PackedWeight
from tools.gpu.checking.report import summary
from tools.gpu.kernels import cases, tuning
from tools.gpu.sections import Options
from tools.gpu.serving.models import STORED, TINY
from tools.gpu.serving.quick_weights import quick_weights
from tools.kernel_cases import experts, quantised, quantised_layers
from tools.kernel_cases.operation import Recorded, put
from tools.kernel_cases.quantised import served_case
from tools.kernel_cases.quantised_layers import FORMATS, packed_layer, random_matrix

pytestmark = pytest.mark.emulator


def the_gpu() -> Gpu:
    return Gpu.of("emulated:sm_90a")


@pytest.fixture(autouse=True)
def fresh_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_layers, "MOST_ROWS", 32)
    packed_layer.cache_clear()


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_is_what_its_rows_would_be_prepared_to(name: str) -> None:
    gpu, (width, depth) = the_gpu(), (144, 264)
    layer = packed_layer(gpu, name, width, depth)
    assert isinstance(layer.weight, PackedWeight)
    assert len(set(layer.rows[::16] // 16)) == 2  # both tiles of the small one come, in an order of their own
    small = random_matrix(FORMATS[name], 32, depth, 0)
    rows, layout = layer.rows, replace(small.layout, shape=(width, depth))
    high = layout.block[0]
    places: Any = rows // high if high else slice(0, 1)
    if high > 1:
        layout = replace(layout, block=(1, layout.block[1]))
    zeros = None if small.zeros is None else small.zeros[places]
    whole = replace(small, layout=layout, codes=small.codes[rows], scales=small.scales[places], zeros=zeros)
    options = LoadOptions.parse(device=str(gpu.device), dtype="bfloat16")
    expected = prepare_packed([MatrixPart(whole, slice(None), slice(None))], None, options, None)
    np.testing.assert_array_equal(layer.weight.memory.to("cpu").array, expected.memory.to("cpu").array)
    assert (layer.weight.size_bytes, layer.weight.rounds_rows) == (expected.size_bytes, expected.rounds_rows)
    assert layer.weight.input_scale == expected.input_scale


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.0])
def test_a_wrong_element_is_an_error(value: float) -> None:
    expected = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    ready = Prepared(lambda: None, rows=np.array([0, 5, 9, 17]), expected=expected)
    assert errors(expected, ready, 2e-2, "ours") == {"error_share": 0.0, "error_rms": 0.0}
    found = expected.copy()
    found[1, 7] = value
    with pytest.raises(AssertionError, match=r"at row 5, element \[7\]"):
        errors(found, ready, 2e-2, "ours")


def test_an_element_of_k_too_few_is_an_error() -> None:
    """Which the largest value alone does not show."""
    rng = np.random.default_rng(0)
    x, matrix = rng.standard_normal((16, 4096), np.float32), rng.standard_normal((64, 4096), np.float32)
    with pytest.raises(AssertionError, match="on the whole"):
        errors(x[:, 1:] @ matrix[:, 1:].T, Prepared(lambda: None, rows=np.arange(16), expected=x @ matrix.T), 2e-2, "")


@pytest.mark.exhaustive  # translates kernels of bytes
@pytest.mark.parametrize("name", ["fp8 blocks", "fp8", "w8a8", "fp8 static"])
@pytest.mark.parametrize("use", ["plain", "normed", "gated"])
def test_rows_that_are_rounded_are_compared_so(name: str, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_plans, "_is_faster_rounded", lambda weight, product, plain, machine, has_norm: (
        cuda_plans.can_round(weight, product, machine)
    ))  # fmt: skip
    case = served_case(name, 80, 128, 328, use)
    found = cases.check(the_gpu(), case)
    assert found["kernels"][0].startswith(("rounded_norm", "dynamic_quantisation"))
    monkeypatch.setattr(quantised, "dynamic_quantisation", lambda x, weight: x)
    assert cases.check(the_gpu(), replace(case, tolerance=2.0))["error_rms"] > 2 * found["error_rms"]


@pytest.mark.parametrize("name", ["qwen3-8b int4", "gpt-oss-20b"])
def test_quick_weights_are_kept_as_declared_each_in_memory_of_its_own(tmp_path: Path, name: str) -> None:
    config = TINY[name] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: Any = {"device": "emulated:sm_90a", "dtype": "bfloat16", "load_format": "dummy"}
    plain = declare_model(tmp_path, **settings).weight_bytes
    with quick_weights(STORED[name]):
        model: Any = load_model(tmp_path, **settings)
        assert model.weight_bytes == declare_model(tmp_path, **settings).weight_bytes != plain
        layers = [layer.mlp for layer in model.layers]
        maps = [each.down for each in layers] if "gpt" in name else [each.down_proj.weight for each in layers]
        weights = [each for one in maps for each in getattr(one, "experts", [one])]
        assert {type(each) for each in weights} == {PackedWeight}
        assert len({each.address for each in weights}) == len(weights) == (10 if "gpt" in name else 2)
        first, *others = (each.memory.to("cpu").array for each in weights)
        assert len(np.unique(first)) > 100
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.exhaustive
def test_recorded_launches_do_it_again_and_nothing_is_missing() -> None:
    gpu = the_gpu()
    layer = packed_layer(gpu, "int4 g128", 48, 136)
    x = put(gpu, Inputs(gpu, 1).normal((2, 136), "bf16"))
    recorded = Recorded(gpu, lambda: ops.linear(x, layer.weight))
    expected = recorded.result.to("cpu").array.copy()
    gpu.fill(recorded.result.address, 0xFF, recorded.result.size_bytes)
    recorded()
    np.testing.assert_array_equal(recorded.result.to("cpu").array, expected)
    with pytest.raises(AssertionError, match="copies or fills"):
        Recorded(gpu, lambda: gpu.fill(recorded.result.address, 0, 4))


@pytest.mark.exhaustive  # translates kernels of experts
def test_experts_are_verified_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases.timed(Options("emulated:sm_90a", is_quick=True), "experts speed")
    found = case.run()
    assert found["error_rms"] < 1e-2
    assert set(found["times"]) == {"ours", "bf16"}
    sections = {"experts speed": {"status": "ok", "seconds": 1, "cases": {"one": {"result": found}}}}
    assert "| tiny, mxfp4 | 2 tokens |" in summary({"device": "x", "is_emulated": False, "sections": sections})
    real = experts._expected
    monkeypatch.setattr(experts, "_expected", lambda x, ids, *more: real(x, ids + 1, *more))
    with pytest.raises(AssertionError, match="off by"):
        case.run()


@pytest.mark.exhaustive
def test_every_tile_of_experts_is_timed() -> None:
    (case,) = tuning.experts(Options("emulated:sm_90a", is_quick=True))
    found = case.run()["us"]
    unpacked = [f"unpacked {tile}" for tile in hopper.UNPACKING_TILES]
    assert list(found) == ["mma.sync", *map(str, hopper.TILES), *unpacked]
    assert all(us > 0 for us in found.values())
