"""Kernels compile to the same PTX by Numba's own passes and by those that replace them."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

from numba_kernels.cuda import compile as compiler
from numba_kernels.cuda import registry
from numba_kernels.cuda.specialisation import Specialisation
from numba_kernels.numba_patches import patching
from numba_kernels.numba_patches.cuda_passes import cuda_passes

pytestmark = pytest.mark.emulator

_NUMBERED = re.compile(r"\b(?:_Z\w+|_cudapy_smem_\d+)")  # names that count what was compiled before
EACH_TIME = ("rms_norm_f16_x8",)
OTHERS = (
    "qkv_prepare_f16_d64_b16_r64_x8", "elementwise_where_f32",
    "attention_decode_f16_d128_b16_r8", "attention_flash_f16_d32_b16_r64", "attention_flash_hopper_bf16_d64_b16_sinks",
    "gemm_skinny_f16_f16_64", "gemm_hopper_f16_f16_128x128x64_s5_rows", "gemm_register_f16_f16_128x128_nk_aligned",
    "gemm_mixed_input_u4_g32_bf16_bf16_silu", "logprobs", "sampling_block",
)  # fmt: skip


def ptx_of(specialisation: Specialisation) -> str:
    """Compiled now, whatever was compiled before."""
    text = compiler.ptx_of(specialisation, compiler.llvm_ir.__wrapped__(specialisation), "sm_90a")
    numbers: dict[str, int] = {}
    return _NUMBERED.sub(lambda match: f"name_{numbers.setdefault(match[0], len(numbers))}", text)


@pytest.mark.parametrize("name", [*EACH_TIME, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_the_ptx_is_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (specialisation,) = (each for each in registry.specialisations() if each.name == name)
    quick = ptx_of(specialisation)
    monkeypatch.setattr(compiler, "cuda_passes", nullcontext)
    assert ptx_of(specialisation) == quick


def test_numba_is_as_it_was_afterwards() -> None:
    from numba.core.types import BaseFunction
    from numba.cuda import lowering
    from numba.cuda.core import inline_closurecall, ir, ssa, typeinfer
    from numba.cuda.core.base import BaseContext as LoweringContext
    from numba.cuda.typing.context import BaseContext

    def replaced() -> list[object]:
        return [
            ssa._run_ssa, ir.Stmt.list_vars, inline_closurecall.InlineWorker.run_untyped_passes,
            inline_closurecall.InlineWorker.inline_ir, BaseContext.resolve_function_type, BaseFunction.get_call_type,
            vars(lowering).get("str"), LoweringContext.refresh, lowering.new_error_context, typeinfer.new_error_context,
        ]  # fmt: skip

    before = replaced()
    with cuda_passes():
        assert all(now is not then for now, then in zip(replaced(), before, strict=True))
    assert replaced() == before


def test_another_version_of_numba_cuda_keeps_its_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.core import ssa

    monkeypatch.setattr(patching, "_found", lambda package: "0.30.3")
    before = ssa._run_ssa
    with cuda_passes():
        assert ssa._run_ssa is before
