"""Every layout of the cpu's, on any processor.

The one in force has all tests in this process. The others run some telling ones each time (`tests/selection.py` names
them), and all of the kernels', the golden models' and the sizes' in `make test-all`, in processes that are forced to
them. Compiling takes most of the time.
"""

from __future__ import annotations

import functools
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
from numba import njit, types
from numba.extending import intrinsic

from numba_kernels.cpu import target
from numba_kernels.cpu.attention import amx_pairs
from numba_kernels.cpu.gemm import amx_tile
from numba_kernels.cpu.intrinsics import simd
from numba_kernels.cpu.intrinsics.amx import Tiles
from numba_kernels.cpu.intrinsics.dots import (
    bf16_pairs_by_instruction,
    bf16_pairs_spelled_out,
    rounded_by_instruction,
    rounded_spelled_out,
)
from numba_kernels.cpu.layout import LAYOUTS, TILE_VECTORS
from numba_kernels.cpu.running.launch import address_of
from tests.selection import SIZES, TELLING

ROOT = Path(__file__).resolve().parents[3]
KINDS = [tiles for tiles in LAYOUTS if tiles != target.EMULATED_BF16]
OTHERS = [
    tiles if tiles in target.available_tiles() else f"emulated_{tiles}"
    for tiles in KINDS if tiles != target.layout_name()
]  # fmt: skip
"""The other layouts: as themselves where the processor runs them, else compiled for what it has."""


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=1800,
    )  # fmt: skip


def _passed(tiles: str, *tests: str) -> int:
    """How many tests pass with these tiles, where no other one fails."""
    done = _python("-m", "pytest", "-m", "not exhaustive and not emulator", *tests, XSERV_CPU_TILES=tiles)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    return int(passed)


@pytest.mark.parametrize("tiles", OTHERS)
def test_telling_cases(tiles):
    names = TELLING[tiles.removeprefix("emulated_")]
    assert _passed(tiles, *names) == len(names)


def test_each_layout_has_telling_cases():
    assert list(TELLING) == KINDS


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "tiles", [tiles for tiles in (*target.available_tiles(), *target.EMULATED_TILES) if tiles != target.TILES]
)
def test_all_kernels_and_golden_models(tiles):
    kernels = sorted(map(str, (ROOT / "tests/numba_kernels/cpu").glob("test_*.py")))
    kernels.remove(__file__)
    models = ["tests/models/test_goldens.py", "tests/models/test_int8.py", "tests/models/test_registry.py"]
    sizes = [name for name in SIZES if name.partition("::")[0] not in models]
    assert _passed(tiles, *kernels, "tests/runtime/linear/test_split_k.py", *models, *sizes) > 450


@pytest.mark.parametrize(
    ("processor", "has_amx", "best", "chosen"),
    [
        ("znver3", False, "avx2", "avx2"),
        ("cascadelake", False, "avx512_vnni", "avx512_vnni"),
        ("znver4", False, "avx512_bf16", "avx512_bf16"),
        ("znver5", False, "avx512_bf16", "avx512_bf16"),
        ("sapphirerapids", True, "avx512_bf16", "avx512_vnni"),
        ("sapphirerapids", False, "avx512_bf16", "avx512_vnni"),  # a virtual machine hides AMX
        ("sapphirerapids", False, "avx2", "avx2"),  # and AVX-512
        ("sapphirerapids", True, "amx", "amx"),
        ("graniterapids", True, "amx", "amx"),
        ("graniterapids", True, "avx512_bf16", "avx512_vnni"),  # Linux gives no leave
        ("a processor of next year", False, "portable", "portable"),
    ],
)
def test_the_fastest_kind_is_chosen(processor, has_amx, best, chosen):
    available = KINDS[: KINDS.index(best) + 1]
    assert target.usual_tiles(available, processor, has_amx=has_amx) == chosen


@pytest.mark.skipif(target.VARIABLE in os.environ, reason="a kind is forced")
def test_the_kind_in_force_is_the_chosen_one():
    has_amx = target.compiled_for("amx-bf16")
    chosen = target.usual_tiles(target.available_tiles(), llvm.get_host_cpu_name(), has_amx=has_amx)
    assert chosen == target.TILES


def test_a_forced_tile_limits_the_compiler():
    code = "from numba_kernels.cpu.target import *; print(TILES, compiled_for('avx512f'), compiled_for('avx2'))"
    assert _python("-c", code, XSERV_CPU_TILES="portable").stdout == "portable False False\n"


@pytest.mark.parametrize("name", ["sse9", "AVX2"])
def test_a_tile_that_nobody_has_is_an_error(name):
    done = _python("-c", "import numba_kernels.cpu", XSERV_CPU_TILES=name)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"runtime.errors.InvalidArgumentError: XSERV_CPU_TILES is '{name}': must be one of portable")
    assert "emulated_avx512_vnni" in last


@pytest.mark.skipif("amx" in target.available_tiles(), reason="this processor has the best tile")
def test_a_tile_that_this_processor_lacks_is_an_error():
    done = _python("-c", "import numba_kernels.cpu", XSERV_CPU_TILES="amx")
    assert done.returncode != 0
    assert "'amx': this processor runs portable" in done.stderr
    assert "emulated_amx has its layout" in done.stderr


@pytest.mark.skipif(not target.IS_X86, reason="an x86-64 instruction")
def test_the_bfloat16_tile_assembles_to_its_instruction():
    """Assembled for a processor that has it, whatever this one has: EVEX.512.F3.0F38.W0 52 /r."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    floats, words = simd.vector(simd.F32), simd.vector(simd.I32)
    function = ir.Function(module, ir.FunctionType(floats, [floats, words, words]), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(bf16_pairs_by_instruction(builder, *function.args))
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(cpu="cooperlake")
    code = machine.emit_object(llvm.parse_assembly(str(module)))
    found = [
        match
        for match in re.findall(rb"(?s)\x62(.)(.)(.)\x52", code)
        if match[0][0] & 7 == 2 and match[1][0] & 0x83 == 2 and match[2][0] >> 5 & 3 == 2
    ]
    assert len(found) == 1


@pytest.mark.skipif(not target.IS_X86, reason="x86-64 instructions")
def test_tiles_of_amx_assemble_to_their_instructions():
    """Assembled for a processor that has them, whatever this one has: VEX.128.F3.0F38.W0 5C and 5E /r of the three
    registers that were named."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [simd.I64] * 2), "products")
    builder = ir.IRBuilder(function.append_basic_block())
    address, rows = function.args
    tiles = Tiles(builder, is_emulated=False)
    tiles.configure(rows, [3], [6], [7], 16)
    tiles.load_left(6, address, rows)
    tiles.load_right(7, address, rows)
    tiles.add_pairs(3, 6, 7)
    tiles.add_bytes(3, 6, 7)
    tiles.store_sums(3, address, rows)
    tiles.release()
    builder.ret_void()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(cpu="sapphirerapids")
    code = machine.emit_object(llvm.parse_assembly(str(module)))
    registers = 0xC0 | 3 << 3 | 6  # sums and left; right is in the prefix, inverted
    for opcode in (0x5C, 0x5E):
        assert code.count(bytes([0xC4, 0xE2, (~7 & 15) << 3 | 2, opcode, registers])) == 1


def _counted(emit, num_arguments):
    """How often AMX's products, loads and stores stand in the assembly of ``emit(builder, *arguments)``."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [simd.I64] * num_arguments), "counted")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(cpu="sapphirerapids")
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    return [len(re.findall(rf"\t{name}\s", assembly)) for name in ("tdpbf16ps|tdpbsud", "tileloadd", "tilestored")]


@pytest.mark.skipif(not target.IS_X86, reason="x86-64 instructions")
@pytest.mark.parametrize("tile", [amx_tile._PairTile, amx_tile._Int8Tile])
def test_a_weight_in_a_register_is_not_loaded_again(tile):
    """32 rows and a panel: both registers of rows, and each vector of the weight twice but for one."""

    def emit(builder, rows, x, weight, *others):
        made = tile(np.uint16, builder, rows=rows)
        made.tiles = Tiles(builder, is_emulated=False)
        made.tiles.configure(made.tile_rows, range(6), [6], [7], 16)
        stride = ir.Constant(simd.I64, 64)
        if tile is amx_tile._PairTile:
            made._add(x, stride, weight)
        else:
            made.integers(x, stride, weight, 192, 64)

    products, loads, _ = _counted(emit, 3)
    assert products == 2 * TILE_VECTORS
    assert loads == 2 + 2 * TILE_VECTORS - 1


@pytest.mark.skipif(not target.IS_X86, reason="x86-64 instructions")
def test_attention_by_amx_assembles(monkeypatch):
    """Scores of 32 and of 64 tokens; values of four vectors of columns and of one, whose sums come from memory."""
    monkeypatch.setattr(amx_pairs, "Tiles", functools.partial(Tiles, is_emulated=False))
    assert _counted(amx_pairs.tile_scores, 7) == [2 + 4, 1 + 2 + 1 + 4, 2 + 4]
    assert _counted(amx_pairs.tile_values, 8) == [4 + 1, 4 + 1 + 4 + 1 + 1 + 1, 4 + 1]


def test_the_emulated_product_of_pairs_flushes_subnormals_and_adds_two_chains():
    """By one register of sums: the lower elements' chain and the upper ones' begin at zero, numbers below the smallest
    normal one count as zero in factors, chains, sums and totals."""
    tiny = np.float32(2.0**-126)
    x = np.zeros((1, 32), np.float32)
    weight = np.zeros((3, 32), np.float32)
    x[0, :6] = 1, 2.0**-63, tiny / 2, 1, 1, -1
    weight[0, :6] = 1, 0, 4, 2**25, 0, 2**25  # the upper chain cancels before it meets the lower one
    weight[1, :2] = 0, 2.0**-64  # a product below the smallest normal number
    weight[2, 2] = 2.0**100  # a factor below it
    out = _by_amx(x, weight, np.array([0, tiny, 1], np.float32))
    np.testing.assert_array_equal(out, np.array([1, tiny, 1], np.float32))


def _by_amx(x, weight, totals):
    """``totals`` plus rows of 32 bfloat16 times those of a weight, by the emulated tile. [1, 32], [n, 32], [n]"""

    @intrinsic
    def product(typingctx, left, right, sums):
        def codegen(context, builder, signature, args):
            tiles = Tiles(builder, is_emulated=True)
            tiles.configure(ir.Constant(simd.I64, 1), [0], [6], [7], 16)
            stride = ir.Constant(simd.I64, 64)
            tiles.load_left(6, args[0], stride)
            tiles.load_right(7, args[1], stride)
            tiles.load_sums(0, args[2], stride)
            tiles.add_pairs(0, 6, 7)
            tiles.store_sums(0, args[2], stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 3), codegen

    @njit
    def run(left, right, sums):
        product(left, right, sums)

    pairs = np.zeros((16, 16, 2), ml_dtypes.bfloat16)  # words of K, columns
    pairs[:, : len(weight)] = weight.astype(ml_dtypes.bfloat16).reshape(len(weight), 16, 2).transpose(1, 0, 2)
    left, sums = x.astype(ml_dtypes.bfloat16), np.zeros(16, np.float32)
    sums[: len(totals)] = totals
    run(*map(address_of, (left, pairs, sums)))
    return sums[: len(totals)]


def _sums_of_pairs(emit, totals, pairs, weights):
    """What code for LANES words at a time makes of arrays of totals and of pairs of bfloat16."""

    @intrinsic
    def add(typingctx, total, pair, weight, out):
        def codegen(context, builder, signature, args):
            floats, words = simd.vector(simd.F32), simd.vector(simd.I32)
            values = [simd.load(builder, at, kind, 4) for at, kind in zip(args, (floats, words, words))]
            simd.store(builder, emit(builder, *values), args[3])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), codegen

    @njit
    def add_all(total, pair, weight, out, size_bytes):
        for at in range(0, size_bytes, 64):
            add(total + at, pair + at, weight + at, out + at)

    out = np.empty_like(totals)
    add_all(*map(address_of, (totals, pairs, weights, out)), out.nbytes)
    return out


def test_the_instruction_spelled_out():
    """The upper product is added and rounded first, then the lower one; on a processor that has the instruction it
    does the same to the bit."""
    rng = np.random.default_rng(1)
    count = 1600
    totals = (rng.standard_normal(count) * 10 ** rng.uniform(-3, 3, count)).astype(np.float32)
    pairs, weights = (rng.standard_normal((count, 2)).astype(ml_dtypes.bfloat16) for _ in range(2))
    in_full = _sums_of_pairs(bf16_pairs_spelled_out, totals, pairs, weights)
    products = pairs.astype(np.float64) * weights.astype(np.float64)  # exact
    once = (totals + products[:, 1]).astype(np.float32)
    expected = (once + products[:, 0]).astype(np.float32)
    if target.compiled_for("avx2"):
        np.testing.assert_array_equal(in_full, expected)
    else:  # products are rounded, too
        np.testing.assert_allclose(in_full, expected, rtol=0, atol=1e-6 * np.abs(totals).max())
    if target.compiled_for("avx512bf16"):
        at_once = _sums_of_pairs(bf16_pairs_by_instruction, totals, pairs, weights)
        np.testing.assert_array_equal(at_once, in_full)


def _pairs_of(emit, numbers):
    """Floats ``[2 n]``, LANES by LANES, as pairs of bfloat16: their bits."""

    @intrinsic
    def rounded(typingctx, source, out):
        def codegen(context, builder, signature, args):
            floats = simd.vector(simd.F32)
            halves = [simd.load(builder, simd.offset(builder, args[0], first), floats, 4) for first in (0, 64)]
            simd.store(builder, emit(builder, *halves), args[1])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 2), codegen

    @njit
    def round_all(source, out, size_bytes):
        for at in range(0, size_bytes, 64):
            rounded(source + 2 * at, out + at)

    out = np.empty(len(numbers), np.uint16)
    round_all(address_of(numbers), address_of(out), out.nbytes)
    return out


def test_rounding_to_pairs_spelled_out():
    """To the nearest, ties to even, subnormal numbers to zero; the instruction does the same to the bit."""
    numbers = np.random.default_rng(2).integers(0, 1 << 32, 6400, dtype=np.uint32)
    numbers[:64] &= 0x807FFFFF  # subnormal
    numbers[64:128] |= 0x7F800000  # NaN and infinity
    numbers[128:192] = numbers[128:192] & 0xFFFF0000 | 0x8000  # ties
    floats = numbers.view(np.float32)
    with np.errstate(all="ignore"):
        expected = np.where(np.abs(floats) < 2.0**-126, np.copysign(0, floats), floats).astype(ml_dtypes.bfloat16)
    spelled_out = _pairs_of(rounded_spelled_out, floats)
    is_nan = np.isnan(floats)
    assert np.isnan(spelled_out[is_nan].view(ml_dtypes.bfloat16)).all()
    np.testing.assert_array_equal(spelled_out[~is_nan], expected.view(np.uint16)[~is_nan])
    if target.compiled_for("avx512bf16"):
        np.testing.assert_array_equal(_pairs_of(rounded_by_instruction, floats), spelled_out)
