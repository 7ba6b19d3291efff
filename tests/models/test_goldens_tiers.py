"""The models of `test_goldens` with each tier of GEMM and of attention forced, wherever that tier can do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from numba_kernels.cuda import attention, gemm
from tests.models.driver import logits_of, relative_error
from tests.models.folders import load_golden
from tests.models.test_goldens_gpu import load_on

GEMM = {
    # tier: architecture, type, tokens a step, the family in the kernels' names
    "naive": ("sm_80", "F32", 0, "gemm_naive"),
    "tiled": ("sm_80", "BF16", 0, "gemm_tiled"),
    "register": ("sm_80", "F32", 0, "gemm_register"),
    "tensor_core": ("sm_80", "BF16", 0, "gemm_tensor_core"),
    "gemv": ("sm_80", "BF16", 2, "gemv"),
    "skinny": ("sm_80", "BF16", 0, "gemm_skinny"),
    "hopper": ("sm_90a", "BF16", 0, "gemm_hopper"),
}
ATTENTION = {
    "naive": ("sm_80", "F32"),
    "flash": ("sm_80", "BF16"),
    "decode": ("sm_80", "BF16"),
    "flash_hopper": ("sm_90a", "BF16"),
}
EACH_TIME = {("attention", "naive")}  # the others' kernels are in most tests
CASES = ("qwen3_tied_gqa4", "gpt2_gelu_new", "llama_default")
TOLERANCES = {"F32": 1e-4, "BF16": 2e-2}


def params(kind: str, tiers: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(tier, case, marks=[pytest.mark.exhaustive] * (case != CASES[0] or (kind, tier) not in EACH_TIME))
        for tier in tiers
        for case in CASES
    ]


def error_of(folder: Path, case: str, arch: str, stored: str, tokens_a_step: int = 0) -> float:
    """Of the logits of a golden's prompt, computed at once or in steps of so many tokens."""
    golden = load_golden(case)
    model = load_on(folder, golden, f"emulated:{arch}", stored)
    ids = golden.prompt_ids
    whole, rest = divmod(len(ids), tokens_a_step or len(ids))
    chunks = [tokens_a_step or len(ids)] * whole + [rest] * (rest > 0)
    expected = golden.logits["float32" if stored == "F32" else "bfloat16"]
    return relative_error(logits_of(model, ids, chunks), expected)


@pytest.mark.emulator
@pytest.mark.parametrize(("tier", "case"), params("gemm", GEMM))
def test_gemm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, case: str) -> None:
    arch, stored, tokens_a_step, family = GEMM[tier]
    plan, names = gemm.plan, set()

    def forced(product: gemm.Product, machine: gemm.Machine, _: str) -> Any:
        try:
            launch = plan(product, machine, tier)
        except ValueError:  # it cannot do this one
            return plan(product, machine)
        if launch is not None:
            names.add(launch.specialisation.name)
        return launch

    monkeypatch.setattr(gemm, "plan", forced)
    assert error_of(tmp_path, case, arch, stored, tokens_a_step) <= TOLERANCES[stored]
    assert any(name.startswith(family) for name in names), names


@pytest.mark.emulator
@pytest.mark.parametrize(("tier", "case"), params("attention", ATTENTION))
@pytest.mark.exhaustive
def test_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, case: str) -> None:
    arch, stored = ATTENTION[tier]
    plan, names = attention.plan, set()

    def forced(**sizes: Any) -> Any:
        sizes["tier"] = tier
        found = plan(**sizes)
        assert found.tier == tier
        names.add(found.launch.specialisation.name)
        return found

    monkeypatch.setattr(attention, "plan", forced)
    assert error_of(tmp_path, case, arch, stored) <= TOLERANCES[stored]
    assert any(name.startswith(f"attention_{tier}") for name in names), names
