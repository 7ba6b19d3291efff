"""Every kind of register tile that this processor runs, each in a process that is forced to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import llvmlite.ir as ir
import ml_dtypes
import numpy as np
import pytest
from numba import cfunc, types

from numba_kernels.cpu import gemm_tile, launch, linear, operands, simd, target
from numba_kernels.cpu.gemm_tile import BF16Sums
from runtime.linear_weight import PanelWeight, prepare_linear
from tests.numba_kernels.cpu.cases import normal, tensor
from tests.oracles import dense

ROOT = Path(__file__).resolve().parents[3]


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip


def _check(tiles: str, *kinds: str) -> None:
    if tiles not in target.available_tiles():
        pytest.skip(f"this processor has no {tiles}")
    done = _python("-m", "tests.numba_kernels.cpu.tile_checks", tiles, *kinds, XSERV_CPU_TILES=tiles)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"checked {tiles}\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("tiles", ["portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16"])
def test_products_of_forced_tiles(tiles):
    _check(tiles)


def test_int8_products_of_avx2():
    _check("avx2", "int8")


def test_a_forced_tile_limits_the_compiler():
    code = "from numba_kernels.cpu.target import *; print(TILES, compiled_for('avx512f'), compiled_for('avx2'))"
    assert _python("-c", code, XSERV_CPU_TILES="portable").stdout == "portable False False\n"


@pytest.mark.parametrize("name", ["sse9", "AVX2"])
def test_a_tile_that_nobody_has_is_an_error(name):
    done = _python("-c", "import numba_kernels.cpu", XSERV_CPU_TILES=name)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"runtime.errors.InvalidArgumentError: XSERV_CPU_TILES is '{name}': must be one of portable")


@pytest.mark.skipif("avx512_bf16" in target.available_tiles(), reason="this processor has the best tile")
def test_a_tile_that_this_processor_lacks_is_an_error():
    done = _python("-c", "import numba_kernels.cpu", XSERV_CPU_TILES="avx512_bf16")
    assert done.returncode != 0
    assert "'avx512_bf16': this processor runs portable" in done.stderr


@pytest.mark.skipif(not target._IS_X86, reason="an x86-64 instruction")
def test_the_bfloat16_tile_assembles_to_its_instruction():
    """Assembled for a processor that has it, whatever this one has: EVEX.512.F3.0F38.W0 52 /r."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    floats, words = simd.vector(simd.F32), simd.vector(simd.I32)
    function = ir.Function(module, ir.FunctionType(floats, [floats, words, words]), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(BF16Sums(types.uint16, 1, 1).dot(builder, *function.args))
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(cpu="cooperlake")
    code = machine.emit_object(llvm.parse_assembly(str(module)))
    found = [
        match
        for match in re.findall(rb"(?s)\x62(.)(.)(.)\x52", code)
        if match[0][0] & 7 == 2 and match[1][0] & 0x83 == 2 and match[2][0] >> 5 & 3 == 2
    ]
    assert len(found) == 1


def test_the_bfloat16_tile_computes_what_its_instruction_means(monkeypatch):
    """The whole product with the instruction spelled out: both products of a pair, one after the other."""

    def dot(self, builder, total, pairs, weights):
        def halves(words):
            low = builder.shl(words, simd.splat_constant(simd.I32, 16))
            high = builder.and_(words, simd.splat_constant(simd.I32, 0xFFFF0000))
            return [builder.bitcast(half, simd.vector(simd.F32)) for half in (high, low)]

        for a, b in zip(halves(pairs), halves(weights)):
            total = simd.fma(builder, a, b, total)
        return total

    monkeypatch.setattr(launch, "CFunction", lambda kind, body, folder, **options: cfunc(kind, **options)(body))
    monkeypatch.setattr(BF16Sums, "dot", dot)
    for module in (gemm_tile, linear, operands):
        monkeypatch.setattr(module, "HAS_BF16_DOT", True)
    for module in (gemm_tile, linear):  # fewer shapes to compile
        monkeypatch.setattr(module, "GEMM_ROWS", 3)
    kernel = linear.linear_kernel.__wrapped__(np.uint16)
    monkeypatch.setattr(linear, "linear_kernel", lambda stored: kernel)
    linear.tickets_of.cache_clear()
    for rows, width, depth in [(1, 100, 64), (2, 50, 33), (5, 49, 300), (7, 130, 601)]:
        rng = np.random.default_rng([rows, width, depth])
        x, weight = normal(rng, (rows, depth)), normal(rng, (width, depth), np.dtype(ml_dtypes.bfloat16))
        packed = prepare_linear(tensor(weight))
        assert isinstance(packed, PanelWeight)
        out = np.full((rows, width), np.nan, np.float32)
        linear.multiply(
            np.uint16, launch.address_of(x), packed.panels_address, packed.scales_address, packed.bias_address, 0,
            launch.address_of(out), rows, depth, width, 2,
        )  # fmt: skip
        expected = dense.linear(x.astype(ml_dtypes.bfloat16), weight)
        assert dense.relative_error(out, expected) < 1e-5, (rows, width, depth)
    linear.tickets_of.cache_clear()
