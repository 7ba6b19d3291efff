"""The comparison with Triton: machine code is read, both sides do the work, and the page is what was counted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tools.comparing import compare_triton
from tools.comparing.triton_comparison import comparer as counting
from tools.comparing.triton_comparison.comparer import (
    ATTENTIONS,
    MATMULS,
    METRICS,
    MIXTURES,
    Comparer,
    Measured,
    Row,
)
from tools.comparing.triton_comparison.main_loop import MainLoop, main_loop, main_loops, operations_of
from tools.comparing.triton_comparison.ours import ARCHS
from tools.comparing.triton_comparison.theirs import PTX, nearest, peers, text_of, tile_of
from tools.kernel_costs import machine_code
from tools.kernel_costs.machine_code import NoDisassemblerError, find_nvdisasm, parse

LISTING = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.16816.F32.BF16 R12, R4, R6, R12 ;
        /*0040*/                   NOP ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0090*/               @P2 BRA `(.L_x_2) ;
.L_x_3:
        /*00a0*/                   HMMA.1688.F32.TF32 R8, R4, R6, R8 ;
        /*00b0*/                   FADD R1, R2, R3 ;
        /*00c0*/              @UP0 BRA `(.L_x_3) ;
.L_x_5:
        /*00c8*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*00cc*/               @P3 BRA `(.L_x_5) ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4);
"""


def test_the_innermost_loops_with_tensor_work_are_found() -> None:
    first, second, third = main_loops(parse(LISTING))
    assert (first.num_instructions, first.num_operations) == (3, 2)  # the outer loop is not innermost, NOP not counted
    assert first.mix == {"HMMA": 2, "BRA": 1}
    assert (second.num_instructions, second.num_operations) == (3, 0.5)
    assert (third.num_instructions, third.num_operations) == (2, 16)
    assert main_loop(parse(LISTING)) == third
    assert MainLoop(3, 2, {}).instructions_per_operation == 1.5
    with pytest.raises(ValueError, match="no loop"):
        main_loop(parse("/*0000*/ EXIT ;"))
    with pytest.raises(ValueError, match="L_x_9"):
        parse("/*0000*/ BRA `(.L_x_9) ;")


MASKED = """
.L_x_0:
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   FSEL R8, R4, R6, P1 ;
        /*0030*/                   FSEL R9, R4, R6, P1 ;
.L_x_1:
        /*0040*/               @P2 BRA `(.L_x_2) ;
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0080*/                   FADD R1, R2, R3 ;
.L_x_3:
        /*0090*/               @P4 BRA `(.L_x_9) ;
        /*00a0*/               @P3 BRA `(.L_x_0) ;
.L_x_9:
        /*00b0*/                   EXIT ;
"""


OUT_OF_LINE = """
.L_x_0:
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0030*/               @P3 BRA `(.L_x_0) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   BRA `(.L_x_1) ;
"""


def test_a_wait_out_of_line_is_no_loop_of_its_own() -> None:
    (loop,) = main_loops(parse(OUT_OF_LINE))
    assert (loop.num_instructions, loop.num_operations) == (4, 16)


def test_a_turn_skips_what_branches_may_but_no_tensor_work() -> None:
    (loop,) = main_loops(parse(MASKED))
    assert loop.mix == {"BRA": 5, "LDSM": 1, "HMMA": 1}  # neither the mask nor the other product
    assert loop.num_operations == 1


@pytest.mark.parametrize(
    ("opcode", "operations"),
    [
        ("HMMA.16816.F32.BF16", 1), ("HMMA.1688.F32", 0.5), ("HGMMA.64x256x16.F32.BF16", 32),
        ("HGMMA.64x8x16.F32", 1), ("FFMA", 0), ("BAR.SYNC", 0),
    ],
)  # fmt: skip
def test_tensor_work_of_an_instruction(opcode: str, operations: float) -> None:
    assert operations_of(opcode) == operations


@pytest.mark.parametrize("opcode", ["HMMA.884.F32", "HGMMA.SP"])
def test_an_unknown_shape_is_an_error(opcode: str) -> None:
    with pytest.raises(ValueError, match="unknown shape"):
        operations_of(opcode)


def test_a_missing_disassembler_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine_code.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine_code, "find_spec", lambda name: None)
    with pytest.raises(NoDisassemblerError, match="neither on PATH nor in an installed nvidia-cuda-nvdisasm or triton"):
        find_nvdisasm()
    with pytest.raises(NoDisassemblerError, match="--nvdisasm none: no such program"):
        find_nvdisasm("none")
    assert compare_triton.main([]) == 2
    assert "nvdisasm is neither on PATH" in capsys.readouterr().err


def test_every_recorded_kernel_has_its_text() -> None:
    index = json.loads((PTX / "peers.json").read_text())
    assert {file.stem for file in PTX.glob("*.ptx")} == set(index)
    for name, facts in index.items():
        assert f".entry {facts['kernel']}(" in text_of(name)
        assert facts["arch"] in text_of(name)
    for arch in ARCHS:
        assert [len(peers(work, arch)) for work in ("matmul", "experts", "attention")] == [2, 3, 1]


def test_the_nearest_tile_stands_beside_ours() -> None:
    known = peers("matmul", "sm_80")
    spills = dict.fromkeys(known, 0)
    assert tile_of(known[nearest((128, 128, 64), known, spills)]) == (128, 128, 32)
    assert tile_of(known[nearest((128, 256, 64), known, spills)]) == (128, 256, 64)
    (facts,) = peers("attention", "sm_80").values()
    known = {"a": facts, "b": facts}
    for kept in known:
        assert nearest((128, 32), known, {name: int(name != kept) for name in known}) == kept


@pytest.mark.emulator
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90a"])
@pytest.mark.exhaustive
def test_both_sides_do_the_work(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are verified in `product` and `prefill`; the counts that are known, here."""
    loop = MainLoop(10, 2, {"HMMA": 2})
    monkeypatch.setattr(counting, "disassemble", lambda cubin, program: [])
    monkeypatch.setattr(counting, "main_loop", lambda instructions: loop)
    known = {name: facts for name, facts in peers("matmul", arch).items() if "128x256" not in name}
    monkeypatch.setattr(counting, "peers", lambda work, arch: known if work == "matmul" else peers(work, arch))
    comparer = Comparer(arch, "none")
    m, n, k = 128, 256, 64
    for row in comparer.product(m, n, k):
        least = 2 * (m * k * (n // 128) + n * k * (m // 128) + m * n)  # tiles of 128 x 128
        assert row.triton.sectors == least // 32
        assert row.triton.machine_per_operation == 5
        assert row.ours.sectors >= 2 * (m * k + n * k + m * n) // 32  # each once
        assert row.configurations == (row.triton,)
    rows = list(comparer.prefill(1, 128, 128))
    assert all(row.triton.tile.startswith("128x") for row in rows)
    assert all(row.triton.barriers > 0 and row.triton.bytes > 0 for row in rows)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90a"])
def test_both_sides_multiply_experts(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven, four and one rows of three experts; results are verified in `mixture`."""
    monkeypatch.setattr(counting, "disassemble", lambda cubin, program: [])
    monkeypatch.setattr(counting, "main_loop", lambda instructions: MainLoop(10, 2, {"HMMA": 2}))
    known = {name: facts for name, facts in peers("experts", arch).items() if "16x64" in name}
    monkeypatch.setattr(counting, "peers", lambda work, arch: known)
    (row,) = Comparer(arch, "none").mixture(3, 4, 64, 64)
    least = 2 * (3 * 64 * 64 + 12 * 64 + 12 * 64)  # weights, rows of x, results
    assert row.triton.bytes == least
    again, tables = 2 * 64 * (3 * 16 - 12), 3 * 128 * (16 + 2 * 8)  # rows that are copied again; what each thread asks
    assert row.ours.bytes == least + again + tables
    assert (row.ours.name, row.ours.tile) == ("tensor_core", "16x64x64")


@pytest.mark.emulator
def test_wrong_experts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "launch_experts", lambda name, facts, bench, work: None)
    with pytest.raises(AssertionError, match="3 experts x 4 x 64 x 64 are wrong"):
        list(Comparer("sm_80", "none").mixture(3, 4, 64, 64))


@pytest.mark.emulator
def test_a_wrong_result_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    comparer = Comparer("sm_80", "none")
    monkeypatch.setattr(counting, "launch_matmul", lambda name, facts, bench, work: None)
    with pytest.raises(AssertionError, match="the product 128 x 128 x 64 is wrong"):
        list(comparer.product(128, 128, 64))


def measured(**changes: object) -> Measured:
    return dataclasses.replace(Measured("t", "1x1", 10, 10, 0, 0, 10, 2.0, 2.0, {}, 32, 0), **changes)


def test_what_is_worse_is_named() -> None:
    def worse(**changes: object) -> list[str]:
        return Row("matmul", "sm_80", "1", measured(**changes), measured(), ()).worse

    assert worse() == []
    assert worse(sectors=11) == ["sectors"]
    assert worse(conflicts=1, barriers=11) == ["conflicts", "barriers"]
    assert worse(machine_per_operation=float("nan")) == ["machine_per_operation"]
    assert worse(bytes=9, num_registers=255) == []


def test_the_page_is_what_was_counted() -> None:
    docs = compare_triton.ROOT / "docs"
    report = json.loads((docs / "triton_comparison.json").read_text())
    page = (docs / "triton_comparison.md").read_text()
    for row in report["rows"]:
        for name in METRICS:
            assert f"{row['ours'][name]:,} / {row['triton'][name]:,}" in page
            if name not in row["worse"]:
                assert row["ours"][name] <= row["triton"][name]
        assert row["worse"] == [] or row["work"] == "experts"
    seen = {(row["work"], row["arch"], row["shape"]) for row in report["rows"]}
    for arch in ARCHS:
        assert {("matmul", arch, f"{m} x {n} x {k}") for m, n, k in MATMULS} <= seen
        for experts, m, n, k in MIXTURES:
            assert ("experts", arch, f"{experts} experts x {m} rows x {n} x {k}") in seen
        for heads, length, head_dim in ATTENTIONS:
            assert ("attention", arch, f"{heads} heads, {length} tokens, head dim {head_dim}") in seen


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_the_command_counts_one_row(tmp_path: Path) -> None:
    try:
        find_nvdisasm()
    except NoDisassemblerError:
        pytest.skip("nvdisasm is not installed")
    files = [tmp_path / f"found.{kind}" for kind in ("json", "md")]
    only = ["--arch", "sm_80", "--only", "matmul sm_80 256 x 256 x 512"]
    assert compare_triton.main([*only, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    (row, *_) = json.loads(files[0].read_text())["rows"]
    assert row["shape"] == "256 x 256 x 512"
    assert row["ours"]["machine_per_operation"] > 1
    assert row["shape"] in files[1].read_text()
