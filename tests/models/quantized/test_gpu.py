"""Quantised checkpoints on emulated GPUs: kept as they are where kernels read them, the logits of the dequantised twin.

In float32 within 1e-4; in bfloat16, where activations and groups' scales are rounded, too, within 3e-2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.registry import declare_model, load_model
from numba_kernels.cuda import gemm
from numba_kernels.cuda.gemm import mixed_input
from runtime.backends import cuda_plans
from runtime.dtype import float32
from runtime.linear.linear import Linear
from runtime.linear.norm import RmsNorm
from runtime.linear.weight import PackedWeight, RowWeight
from runtime.tensor.tensor import Tensor
from tests.models.driver import logits_of, relative_error
from tests.models.quantized.test_fixtures import CASES, FIXTURES, IDS, twin

pytestmark = pytest.mark.emulator

DEQUANTISED = ("fp8_block_exponents",)
"""Values as scales of 16 neighbours."""
SOME = ("ct_mixed", "ct_w4_reordered", "fp8_block", "fp8_tensor_static", "gptq_dynamic", "gptq_w4_reordered",
        "gptq_w8_reordered", "modelopt_nvfp4")  # fmt: skip
"""Some maps are so, or stored as floats, or made of neighbours that differ, as gate's and up's orders of columns."""

ALL = [
    (case, dtype, f"emulated:{arch}")
    for case in CASES for dtype, arch in (("bfloat16", "sm_80"), ("bfloat16", "sm_89"), ("bfloat16", "sm_90a"),
                                          ("float32", "sm_90a"), ("float16", "sm_90a"))
]  # fmt: skip


@pytest.mark.exhaustive  # tests/models/test_int8_gpu.py has a model, tests/runtime/linear four bits, each time
@pytest.mark.parametrize(("case", "dtype", "device"), ALL)
def test_logits_of_the_dequantised_twin(tmp_path: Path, case: str, dtype: str, device: str) -> None:
    folder, exact = FIXTURES / case, twin(case, tmp_path / "exact", float32)
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    model: Any = load_model(folder, **options)
    layer = model.layers[0]
    maps = layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    kinds = {type(each.weight) for each in maps}
    wanted = {RowWeight} if case in DEQUANTISED else {PackedWeight, RowWeight} if case in SOME else {PackedWeight}
    assert kinds == wanted
    assert declare_model(folder, **options).weight_bytes == model.weight_bytes
    expected = logits_of(load_model(exact, dtype="float32"), IDS)
    tolerance = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}[dtype]
    assert relative_error(logits_of(model, IDS), expected) <= tolerance
    assert relative_error(logits_of(model, IDS, [4, *[1] * (len(IDS) - 4)], block_size=8), expected) <= tolerance


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (case, arch)
        for case in CASES if case not in DEQUANTISED for arch in ("sm_80", "sm_89", "sm_90a")
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_prompts_in_tiles_that_are_unpacked_in_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, arch: str
) -> None:
    """As many rows have them: the tier is forced on all products that it can compute."""
    plan, names = gemm.plan, set()

    def forced(product: gemm.Product, machine: gemm.Machine, tier: str = "auto", tile: str = "") -> Any:
        is_able = not mixed_input.why_not(product, machine)
        launch = plan(product, machine, "mixed_input" if is_able else tier, tile)
        if launch is not None:
            names.add(launch.specialisation.name)
        return launch

    monkeypatch.setattr(gemm, "plan", forced)
    expected = logits_of(load_model(twin(case, tmp_path / "exact", float32), dtype="float32"), IDS)
    model: Any = load_model(FIXTURES / case, device=f"emulated:{arch}", dtype="bfloat16")
    assert relative_error(logits_of(model, IDS), expected) <= 3e-2
    assert any(name.startswith("gemm_mixed_input") for name in names)


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        ("ct_int8_channel", "sm_80"), ("ct_int8_channel", "sm_89"), ("ct_int8_channel", "sm_90a"),
        ("ct_int8_channel", "sm_120a"), ("ct_fp8_channel", "sm_89"), ("ct_fp8_channel", "sm_90a"),
        ("ct_fp8_channel", "sm_120a"),
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_prompts_rounded_to_bytes_where_the_checkpoint_has_it_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, arch: str
) -> None:
    """As many rows are. Rounding x moves logits by as much as the cpu's rounding of it does."""
    launched = set()

    def forced(
        weight: PackedWeight, product: gemm.Product, plain: gemm.Product, machine: gemm.Machine, *, has_norm: bool
    ) -> bool:
        is_able = cuda_plans.can_round(weight, product, machine)
        launched.add((is_able, bool(product.epilogue.activation)))
        return is_able

    monkeypatch.setattr(cuda_plans, "_is_faster_rounded", forced)
    expected = logits_of(load_model(twin(case, tmp_path / "exact", float32), dtype="float32"), IDS)
    model: Any = load_model(FIXTURES / case, device=f"emulated:{arch}", dtype="bfloat16")
    got = logits_of(model, IDS)
    assert launched == {(True, False), (True, True)}
    assert relative_error(got, expected) <= (3e-2 if case == "ct_int8_channel" else 8e-2)
    exact: Any = load_model(FIXTURES / case, device=f"emulated:{arch}", dtype="bfloat16", exact=True)
    launched.clear()
    logits_of(exact, IDS)
    assert launched == {(False, False), (False, True)}


@pytest.mark.exhaustive  # products are compared with numpy's: tests/runtime/linear/test_dynamic_quantisation.py
@pytest.mark.parametrize(("case", "arch"), [("modelopt_fp8", "sm_89"), ("ct_fp8_tensor", "sm_90a")])
def test_prompts_rounded_by_static_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, arch: str
) -> None:
    """Beside the dequantised twin on the cpu, whose rows are rounded by the checkpoint's scales before each map."""
    monkeypatch.setattr(cuda_plans, "_is_faster_rounded", lambda weight, product, plain, machine, has_norm: (
        cuda_plans.can_round(weight, product, machine)
    ))  # fmt: skip
    model: Any = load_model(FIXTURES / case, device=f"emulated:{arch}", dtype="bfloat16")
    got = logits_of(model, IDS)
    exact: Any = load_model(twin(case, tmp_path / "exact", float32), dtype="float32")
    unrounded, scales, normalised = logits_of(exact, IDS), {}, Linear._normalised
    for layer, exact_layer in zip(model.layers, exact.layers, strict=True):
        for block, name in (
            ("attention", "qkv_proj"), ("attention", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj")
        ):  # fmt: skip
            of_map = getattr(getattr(layer, block), name).weight.input_scale
            scales[id(getattr(getattr(exact_layer, block), name))] = np.float32(of_map)

    def rounded(linear: Linear, x: Tensor) -> tuple[Tensor, RmsNorm | None]:
        x, norm = normalised(linear, x)
        if (scale := scales.get(id(linear))) is None:
            return x, norm
        codes = np.clip(x.array / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return Tensor.from_numpy(codes.astype(np.float32) * scale), norm

    monkeypatch.setattr(Linear, "_normalised", rounded)
    error = relative_error(got, logits_of(exact, IDS))
    assert error <= 3e-2
    assert error < 0.8 * relative_error(got, unrounded)


@pytest.mark.parametrize(
    ("case", "rounds"),
    [
        ("ct_int8_channel", "rows"),
        ("ct_fp8_channel", "rows"),
        ("ct_fp8_block", "groups"),
        ("fp8_tensor_static", "static"),
        ("modelopt_fp8", "static"),
        ("ct_w8_group", ""),
    ],
)
def test_only_a_scheme_with_rows_of_bytes_rounds_them(case: str, rounds: str) -> None:
    model: Any = load_model(FIXTURES / case, device="emulated:sm_80", dtype="bfloat16")
    assert model.layers[0].mlp.down_proj.weight.rounds_rows == rounds
