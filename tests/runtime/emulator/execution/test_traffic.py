"""Sectors of device memory and wavefronts of shared memory, counted where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.counters import Traffic
from runtime.emulator.execution.launch import Checks, load
from tests.runtime.emulator.memory_harness import Device, kernel_text

COUNTING = Checks.ALL | Checks.TRAFFIC
BOX = ".shared .align 128 .b8 box[16384];"


def traffic(line: str, *, threads: int = 32, text: str | None = None) -> Traffic:
    """What one instruction costs; %d9 is the address of 16 KiB, %r9 that of as much shared memory, %r8 the lane."""
    fill = """mov.u32 %r20, %thread;
    fill: shl.b32 %r21, %r20, 4; mov.u32 %r22, box; add.u32 %r21, %r21, %r22;
    st.shared.v4.u32 [%r21], {%r20, %r20, %r20, %r20};
    add.u32 %r20, %r20, %ntid.x; setp.lt.u32 %p9, %r20, 1024; @%p9 bra fill;
    bar.sync 0;"""
    fill = fill.replace("add.u32 %r20, %r20, %ntid.x;", "mov.u32 %r23, %ntid.x; add.u32 %r20, %r20, %r23;")
    body = f"{fill}\nmov.u64 %d9, %a0; mov.u32 %r9, box; mov.u32 %r8, %lane;\n{line}"
    full = kernel_text(1, body, inside=BOX)
    with Device() as device:
        address = device.put(np.zeros(16384, np.uint8))
        counters = device.run(full, address, block=(threads, 1, 1), checks=COUNTING)
    instructions = load(full).kernel("k").kernel.instructions
    kinds = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix")
    last = max(
        site
        for site, ins in enumerate(instructions)
        if ins.parts[0] in kinds or ins.opcode.startswith(("cp.async.ca", "cp.async.cg"))
    )
    return counters.traffic[last]


def at(space: str, stride: int, offset: int = 0) -> str:
    """Sets %d10 or %r10 to lane · stride + offset."""
    if space == "global":
        return f"mul.wide.u32 %d10, %r8, {stride}; add.u64 %d10, %d10, %d9; add.u64 %d10, %d10, {offset};\n"
    return f"mul.lo.u32 %r10, %r8, {stride}; add.u32 %r10, %r10, %r9; add.u32 %r10, %r10, {offset};\n"


@pytest.mark.parametrize(
    ("suffix", "registers", "stride", "offset", "sectors", "size"),
    [
        ("u32", "%r0", 4, 0, 4, 4),  # a full line
        ("u32", "%r0", 4, 16, 5, 4),  # shifted by half a sector
        ("u32", "%r0", 0, 0, 1, 4),  # all the same word
        ("u32", "%r0", 32, 0, 32, 4),  # a sector each
        ("u32", "%r0", 8, 0, 8, 4),  # every other word
        ("u8", "%r0", 1, 0, 1, 1),
        ("u16", "%h0", 2, 0, 2, 2),
        ("u64", "%d0", 8, 0, 8, 8),
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 16, 0, 16, 16),
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 32, 0, 32, 16),
    ],
)
@pytest.mark.parametrize("kind", ["ld", "st"])
def test_sectors(kind: str, suffix: str, registers: str, stride: int, offset: int, sectors: int, size: int) -> None:
    if kind == "ld":
        line = f"ld.global.{suffix} {registers}, [%d10];"
    elif stride == 0:
        line = f"st.volatile.global.{suffix} [%d10], 1;"
    else:
        names = registers.strip("{}").split(", ")
        zero = "".join(f"mov.b{ {'r': 32, 'h': 16, 'd': 64}[name[1]] } {name}, 0; " for name in names)
        line = f"{zero}st.global.{suffix} [%d10], {registers};"
    found = traffic(at("global", stride, offset) + line)
    assert found == Traffic(global_requests=1, global_sectors=sectors, global_bytes=32 * size)
    if stride >= size:
        assert found.sector_efficiency == 32 * size / (32 * sectors)


def test_idle_lanes_ask_for_nothing() -> None:
    found = traffic(at("global", 32) + "setp.lt.u32 %p0, %r8, 5; @%p0 ld.global.u32 %r0, [%d10];")
    assert found == Traffic(global_requests=1, global_sectors=5, global_bytes=20)


def test_every_warp_is_a_request() -> None:
    found = traffic(at("global", 4) + "ld.global.u32 %r0, [%d10];", threads=128)
    assert found == Traffic(global_requests=4, global_sectors=16, global_bytes=512)


@pytest.mark.parametrize(
    ("suffix", "registers", "stride", "wavefronts", "ideal", "size"),
    [
        ("u32", "%r0", 4, 1, 1, 4),
        ("u32", "%r0", 0, 1, 1, 4),  # a broadcast
        ("u32", "%r0", 8, 2, 1, 4),  # two lanes a bank
        ("u32", "%r0", 12, 1, 1, 4),  # odd strides do not collide
        ("u32", "%r0", 64, 16, 1, 4),
        ("u32", "%r0", 128, 32, 1, 4),  # a column of a 32-word matrix
        ("u32", "%r0", 132, 1, 1, 4),  # the same, padded
        ("u8", "%r0", 1, 1, 1, 1),
        ("u8", "%r0", 128, 32, 1, 1),
        ("u16", "%h0", 2, 1, 1, 2),
        ("u64", "%d0", 8, 2, 2, 8),  # half warps
        ("u64", "%d0", 16, 4, 2, 8),
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 16, 4, 4, 16),  # quarter warps
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 32, 8, 4, 16),
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 128, 32, 4, 16),
        ("v4.u32", "{%r0, %r1, %r2, %r3}", 144, 4, 4, 16),  # rows of 128 bytes padded by 16
        ("v2.u32", "{%r0, %r1}", 0, 2, 2, 8),
    ],
)
def test_bank_conflicts(suffix: str, registers: str, stride: int, wavefronts: int, ideal: int, size: int) -> None:
    found = traffic(at("shared", stride) + f"ld.shared.{suffix} {registers}, [%r10];")
    assert found == Traffic(shared_requests=1, shared_wavefronts=wavefronts, shared_ideal=ideal, shared_bytes=32 * size)
    assert found.bank_conflicts == wavefronts - ideal


@pytest.mark.parametrize(("stride", "sectors", "wavefronts"), [(16, 16, 4), (32, 32, 8), (128, 32, 32)])
def test_asynchronous_copies_count_on_both_sides(stride: int, sectors: int, wavefronts: int) -> None:
    found = traffic(
        at("global", stride) + at("shared", stride)
        + "cp.async.cg.shared.global [%r10], [%d10], 16; cp.async.wait_all;"
    )  # fmt: skip
    assert found == Traffic(1, sectors, 512, 1, wavefronts, 4, 512)


def test_an_asynchronous_fill_with_zeros_reads_nothing() -> None:
    line = "mov.u32 %r7, 0; cp.async.cg.shared.global [%r10], [%d10], 16, %r7; cp.async.wait_all;"
    assert traffic(at("global", 16) + at("shared", 16) + line) == Traffic(0, 0, 0, 1, 4, 4, 512)


@pytest.mark.parametrize(("stride", "wavefronts"), [(16, 4), (32, 8), (128, 32), (144, 4)])
@pytest.mark.parametrize("kind", ["ldmatrix", "stmatrix"])
def test_matrices_conflict_row_by_row(kind: str, stride: int, wavefronts: int) -> None:
    registers = "{%r0, %r1, %r2, %r3}"
    line = {
        "ldmatrix": f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {registers}, [%r10];",
        "stmatrix": f"mov.u32 %r0, 0; mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0;"
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r10], {registers};",
    }
    assert traffic(at("shared", stride) + line[kind]) == Traffic(0, 0, 0, 1, wavefronts, 4, 512)


def test_generic_addresses_and_atomics_are_counted() -> None:
    found = traffic(at("shared", 8) + "cvt.u64.u32 %d0, %r10; cvta.shared.u64 %d0, %d0; ld.u32 %r0, [%d0];")
    assert (found.shared_wavefronts, found.global_requests) == (2, 0)
    assert traffic(at("global", 4) + "red.global.add.u32 [%d10], 1;").global_sectors == 4
    assert traffic(at("shared", 0) + "atom.shared.add.u32 %r0, [%r10], 1;").shared_requests == 1


def test_nothing_is_counted_unless_asked() -> None:
    with Device() as device:
        address = device.put(np.zeros(32, np.uint32))
        counters = device.run(kernel_text(1, "ld.global.u32 %r0, [%a0];"), address)
        assert counters.traffic == {}
        counters = device.run(kernel_text(1, "ld.global.u32 %r0, [%a0];"), address, checks=Checks.TRAFFIC)
        assert sum(counters.traffic.values(), Traffic()) == Traffic(1, 1, 128)
