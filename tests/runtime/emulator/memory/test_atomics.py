"""atom and red: every operation and type against Python's arithmetic; scalar and vector; device and shared memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import launch, load
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.running import HEADER, Checks, entry, run

WORDS = np.array([0, 1, 2, 7, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF], np.uint64)
PAIRS_32 = [(int(a), int(b)) for a in WORDS for b in WORDS]
LONGS = np.array([0, 1, 5, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1], np.uint64)
PAIRS_64 = [(int(a), int(b)) for a in LONGS for b in LONGS]


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _integer(name: str, kind: str, old: int, operand: int, bits: int) -> int:
    key = (lambda value: _signed(value, bits)) if kind[0] == "s" else int
    results = {
        "add": lambda: old + operand,
        "inc": lambda: 0 if old >= operand else old + 1,
        "dec": lambda: operand if old == 0 or old > operand else old - 1,
        "min": lambda: min(old, operand, key=key),
        "max": lambda: max(old, operand, key=key),
        "and": lambda: old & operand,
        "or": lambda: old | operand,
        "xor": lambda: old ^ operand,
        "exch": lambda: operand,
    }
    return results[name]() % (1 << bits)


def atomic(
    op: str, space: str, pairs: list[tuple[int, ...]], bits: int, prefix: str = "atom"
) -> tuple[list[int], list[int]]:
    """Thread i has memory cell i, which holds pairs[i][0]: what the instruction returned, and what is there after it.

    `pairs` gives (old, operand) or (old, operand, third operand).
    """
    width, count = bits // 8, len(pairs)
    third = ", %v2" if len(pairs[0]) == 3 else ""
    result = "%v0, " if prefix == "atom" else ""
    register = {16: "b16", 32: "b32", 64: "b64"}[bits]
    at = "[%cell]" if space == "global" else "[%box]"
    text = f"""{HEADER}
.visible .entry k(.param .u64 cells, .param .u64 operands, .param .u64 thirds, .param .u64 results)
{{
.reg .b32 %r<4>; .reg .b64 %d<8>, %cell, %box, %base; .reg .{register} %v<4>; .reg .pred %p;
.shared .align 8 .b8 box[8192];
mov.u32 %r0, %tid.x;
setp.ge.u32 %p, %r0, {count};
@%p bra done;
mul.wide.u32 %d0, %r0, {width};
ld.param.u64 %cell, [cells];
add.u64 %cell, %cell, %d0;
ld.param.u64 %d1, [operands];
add.u64 %d1, %d1, %d0;
ld.param.u64 %d2, [thirds];
add.u64 %d2, %d2, %d0;
ld.param.u64 %d3, [results];
add.u64 %d3, %d3, %d0;
mov.u64 %base, box;
add.u64 %box, %base, %d0;
ld.global.b{bits} %v3, [%cell];
st.shared.b{bits} [%box], %v3;
ld.global.b{bits} %v1, [%d1];
ld.global.b{bits} %v2, [%d2];
mov.b{bits} %v0, 0;
{prefix}.{op.format(space=space)} {result}{at}, %v1{third};
st.global.b{bits} [%d3], %v0;
ld.shared.b{bits} %v3, [%box];
{"" if space == "global" else f"st.global.b{bits} [%cell], %v3;"}
done:
ret;
}}
"""
    kernel = load(text).kernel("k")
    machine = Machine(1 << 20)
    columns = [*zip(*pairs)] + [(0,) * count] * (3 - len(pairs[0]))
    dtype = np.dtype(f"u{width}")
    places = []
    for column in [*columns, (0,) * count]:
        places.append(machine.allocate(width * count))
        machine.write(places[-1], np.array(column, dtype).tobytes())
    threads = -(-count // 32) * 32
    launch(kernel, machine, (1, 1, 1), (threads, 1, 1), 0, np.array(places, np.uint64).tobytes(), checks=Checks.ALL)
    returned = np.frombuffer(machine.read(places[3], width * count), dtype)
    after = np.frombuffer(machine.read(places[0], width * count), dtype)
    machine.close()
    return [int(value) for value in returned], [int(value) for value in after]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("add", "u32"), ("add", "s32"), ("inc", "u32"), ("dec", "u32"), ("min", "u32"), ("min", "s32"), ("max", "u32"),
        ("max", "s32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"), ("exch", "b32"),
    ],
)  # fmt: skip
def test_32_bits(name: str, kind: str, space: str) -> None:
    returned, after = atomic(f"{{space}}.{name}.{kind}", space, PAIRS_32, 32)
    assert returned == [old for old, _ in PAIRS_32]
    assert after == [_integer(name, kind, old, operand, 32) for old, operand in PAIRS_32]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("add", "u64"), ("min", "u64"), ("min", "s64"), ("max", "u64"), ("max", "s64"), ("and", "b64"), ("or", "b64"),
     ("xor", "b64"), ("exch", "b64")],
)  # fmt: skip
def test_64_bits(name: str, kind: str) -> None:
    returned, after = atomic(f"{{space}}.{name}.{kind}", "global", PAIRS_64, 64)
    assert returned == [old for old, _ in PAIRS_64]
    assert after == [_integer(name, kind, old, operand, 64) for old, operand in PAIRS_64]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_compare_and_swap(bits: int) -> None:
    top = (1 << bits) - 1
    cases = [(5, 5, 9), (5, 6, 9), (top, top, 0), (top, top - 1, 0), (0, 0, top)]
    returned, after = atomic(f"{{space}}.cas.b{bits}", "global", cases, bits)
    assert returned == [old for old, _, _ in cases]
    assert after == [new if old == expected else old for old, expected, new in cases]


def test_red_changes_memory_alone() -> None:
    returned, after = atomic("relaxed.gpu.{space}.add.u32", "global", [(1, 2), (0xFFFFFFFF, 3)], 32, prefix="red")
    assert returned == [0, 0]
    assert after == [3, 2]


def _bits(values: list[float], dtype: object) -> list[int]:
    array = np.array(values, dtype)
    return [int(value) for value in array.view(np.dtype(f"u{array.dtype.itemsize}"))]


TINY, SUBNORMAL = 2.0**-126, 2.0**-130


def test_f32_sums_flush_subnormals_in_device_memory_alone() -> None:
    cases = [(1.0, 2.0**-24), (1.0, 3 * 2.0**-24), (-0.0, -0.0), (SUBNORMAL, TINY), (TINY, -1.5 * TINY),
             (-SUBNORMAL, 0.0), (3e38, 3e38), (float("inf"), float("-inf"))]  # fmt: skip
    pairs = [(a, b) for a, b in zip(_bits([a for a, _ in cases], np.float32), _bits([b for _, b in cases], np.float32))]
    _, in_global = atomic("{space}.add.f32", "global", pairs, 32)
    _, in_shared = atomic("{space}.add.f32", "shared", pairs, 32)
    nan = 0x7FFFFFFF
    assert in_global == [*_bits([1.0, 1.0 + 2.0**-22, -0.0, TINY, -0.0, 0.0, np.inf], np.float32), nan]
    with np.errstate(all="ignore"):
        sums = [np.float32(a) + np.float32(b) for a, b in cases]
    assert in_shared == [*_bits([float(value) for value in sums[:-1]], np.float32), nan]


def test_f64_sums_round_once() -> None:
    pairs = [(a, b) for a, b in zip(_bits([1.0, 1e308], np.float64), _bits([2.0**-53, 1e308], np.float64))]
    _, after = atomic("{space}.add.f64", "global", pairs, 64)
    assert after == _bits([1.0, np.inf], np.float64)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("name", ["add", "min", "max"])
def test_16_bit_floats(kind: str, dtype: object, name: str) -> None:
    values = [0.0, -0.0, 1.0, -1.5, 1e-6, 0.333251953125, 1000.0, float("inf")]
    cases = [(a, b) for a in values for b in values if a != -b or abs(a) < 1e9]
    pairs = [(a, b) for a, b in zip(_bits([a for a, _ in cases], dtype), _bits([b for _, b in cases], dtype))]
    _, after = atomic(f"{{space}}.{name}.noftz.{kind}", "global", pairs, 16)
    wide = [(float(np.array(a, dtype)), float(np.array(b, dtype))) for a, b in cases]  # type: ignore[call-overload]

    def key(value: float) -> tuple[float, bool]:
        return value, not np.signbit(value)

    results = {
        "add": [a + b for a, b in wide],
        "min": [min(pair, key=key) for pair in wide],
        "max": [max(pair, key=key) for pair in wide],
    }
    assert after == _bits(results[name], dtype)
    nan = _bits([float("nan")], dtype)[0]
    one = _bits([1.0], dtype)[0]
    _, with_nan = atomic(f"{{space}}.{name}.noftz.{kind}", "global", [(nan, one), (one, nan), (nan, nan)], 16)
    assert with_nan == ([0x7FFF] * 3 if name == "add" else [one, one, 0x7FFF])


@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16)])
def test_pairs_of_16_bit_floats(kind: str, dtype: object) -> None:
    low, high = [1.0, -2.5, 0.125], [100.0, 3.0, -0.5]
    pack = [(h << 16) | b for b, h in zip(_bits(low, dtype), _bits(high, dtype))]
    more = [(h << 16) | b for b, h in zip(_bits(high, dtype), _bits(high, dtype))]
    _, after = atomic(f"{{space}}.add.noftz.{kind}", "shared", [*zip(pack, more)], 32)
    assert [value & 0xFFFF for value in after] == _bits([a + b for a, b in zip(low, high)], dtype)
    assert [value >> 16 for value in after] == _bits([2 * a for a in high], dtype)


def test_vectors_and_targets_that_are_sources() -> None:
    text = """
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d1];
    atom.global.v4.f32.add {%r5, %r6, %r7, %r4}, [%d1+16], {%r4, %r5, %r6, %r7};
    red.global.add.v2.f32 [%d1+32], {%r4, %r5};
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d1+16];
    ld.global.v2.b32 {%r14, %r15}, [%d1+32];
    xor.b32 %r0, %r10, %r11; xor.b32 %r0, %r0, %r12; xor.b32 %r0, %r0, %r13;
    xor.b32 %r0, %r0, %r14; xor.b32 %r0, %r0, %r15;
    """
    given = np.arange(1, 13, dtype=np.float32)
    # One thread: memory[4:8] += memory[0:4], what was there goes to (r5, r6, r7, r4); memory[8:10] += (r4, r5).
    after = given.copy()
    after[4:8] += given[0:4]
    after[8] += given[7]
    after[9] += given[4]
    expected = 0
    for value in (*after[4:8], *after[8:10]):
        expected ^= int(np.float32(value).view(np.uint32))
    assert run(entry(text), 1, inputs=given)[0, 0] == expected


def test_128_bits() -> None:
    text = """
    ld.global.v2.b64 {%d2, %d3}, [%d1];
    ld.global.v2.b64 {%d4, %d5}, [%d1+16];
    mov.b128 %q0, {%d2, %d3};
    mov.b128 %q1, {%d4, %d5};
    atom.global.cas.b128 %q2, [%d1], %q0, %q1;
    atom.global.exch.b128 %q3, [%d1], %q0;
    mov.b128 {%d6, %d7}, %q3;
    xor.b64 %d6, %d6, %d7;
    cvt.u32.u64 %r0, %d6;
    """
    given = np.array([1, 2, 30, 40], np.uint64)
    assert run(entry(text, inside=".reg .b128 %q<4>;"), 1, inputs=given)[0, 0] == 30 ^ 40


def test_lanes_of_one_warp_take_turns() -> None:
    text = """
    mov.u32 %r4, box;
    setp.eq.u32 %p0, %r1, 0;
    @%p0 st.shared.u32 [%r4], 0;
    bar.sync 0;
    atom.shared.add.u32 %r5, [%r4], 3;
    bar.sync 0;
    ld.shared.u32 %r6, [%r4];
    mad.lo.u32 %r0, %r6, 1000, %r5;
    """
    results = run(entry(text, inside=".shared .align 4 .b32 box[1];"), 96)[0]
    assert sorted(int(value) - 288000 for value in results) == [3 * index for index in range(96)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("atom.global.add.f16 %h0, [%d1], %h1;", "noftz"),
        ("atom.global.add.noftz.f32 %f0, [%d1], %f1;", "noftz"),
        ("red.global.exch.b32 [%d1], %r4;", "exch"),
        ("atom.local.add.u32 %r4, [%d1], 1;", "local"),
        ("atom.global.mul.u32 %r4, [%d1], 1;", "needs one of"),
        ("atom.global.add.b32 %r4, [%d1], 1;", "type"),
        ("atom.global.add.wild.u32 %r4, [%d1], 1;", "wild"),
    ],
)
def test_what_is_not_understood_is_refused(line: str, why: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=why):
        run(entry(line, inside=".reg .b16 %h<2>;"), 1)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("atom.global.add.u32 %r4, [%d1+2], 1;", FaultKind.MISALIGNED),
        ("atom.global.add.u32 %r4, [%d1+4096], 1;", FaultKind.OUT_OF_BOUNDS),
        ("red.global.v2.f32.add [%d1+4], {%f0, %f1};", FaultKind.MISALIGNED),
        ("atom.shared.add.u32 %r4, [box], 1;", FaultKind.UNINITIALIZED),
    ],
)
def test_faults(line: str, kind: FaultKind) -> None:
    with pytest.raises(EmulatorFault) as caught:
        run(entry(line, inside=".shared .align 4 .b32 box[4];"), 1)
    assert caught.value.kind == kind
    assert line in caught.value.text
