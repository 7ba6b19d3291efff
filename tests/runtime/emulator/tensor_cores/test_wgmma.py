"""wgmma: every type, swizzle and orientation of its operands against numpy; groups, fences, registers in flight."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks
from tests.runtime.emulator.tensor_harness import DTYPES, a_fragment, c_fragment, c_matrix, launch_text

PITCH = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row of a block, by the descriptor's swizzle code
DESCRIPTOR_MODE = {0: 0, 32: 3, 64: 2, 128: 1}


def swizzle(address: np.ndarray, pitch: int) -> np.ndarray:
    return address ^ (((address >> 7) & (pitch // 16 - 1)) << 4)


def k_major(matrix: np.ndarray, pitch: int, base: int) -> tuple[np.ndarray, int, int, int]:
    """Rows of M or N with 32 bytes of K → (bytes at `base`, LBO, SBO, size). Blocks of eight rows follow each other;
    with no swizzle the two chunks of K are 8 KB apart and blocks 128 bytes."""
    rows = np.ascontiguousarray(matrix).view(np.uint8).reshape(matrix.shape[0], 2, 16)
    row, chunk = np.meshgrid(np.arange(rows.shape[0]), np.arange(2), indexing="ij")
    if pitch == 16:
        lbo, sbo = 8192, 128
        address = row // 8 * sbo + row % 8 * 16 + chunk * lbo
    else:
        lbo, sbo = 16, 8 * pitch
        address = swizzle(base + row // 8 * sbo + row % 8 * pitch + chunk * 16, pitch) - base
    size = 8192 + rows.shape[0] * 16 if pitch == 16 else rows.shape[0] * pitch
    data = np.zeros(size, np.uint8)
    data[address[..., None] + np.arange(16)] = rows
    return data, lbo, sbo, size


def mn_major(matrix: np.ndarray, pitch: int, base: int) -> tuple[np.ndarray, int, int, int]:
    """A [MN, 16] matrix of 16-bit elements with MN contiguous. Eight rows of K and pitch / 2 elements of MN make a
    block; blocks follow each other along MN, then along K."""
    chunks = np.ascontiguousarray(matrix.T).view(np.uint8).reshape(16, -1, 16)  # k, chunk of MN, byte
    k, chunk = np.meshgrid(np.arange(16), np.arange(chunks.shape[1]), indexing="ij")
    wide, per = pitch // 16, 8 * pitch
    blocks = -(-chunks.shape[1] // wide)
    along_mn, along_k = per, per * blocks
    address = k // 8 * along_k + chunk // wide * along_mn + k % 8 * pitch + chunk % wide * 16
    if pitch > 16:
        address = swizzle(base + address, pitch) - base
    data = np.zeros(2 * along_k, np.uint8)
    data[address[..., None] + np.arange(16)] = chunks
    return data, (along_k if pitch == 16 else along_mn), (along_mn if pitch == 16 else along_k), data.size


def descriptor(base: int, lbo: int, sbo: int, pitch: int) -> int:
    mode = DESCRIPTOR_MODE[0 if pitch == 16 else pitch]
    return base >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | mode << 62


FENCE, COMMIT, WAIT = (
    "wgmma.fence.sync.aligned;\n",
    "wgmma.commit_group.sync.aligned;\n",
    "wgmma.wait_group.sync.aligned 0;\n",
)
PROXY = "fence.proxy.async.shared::cta;\n"
TILE = 1024  # shared variables begin there; the tile is the first, so its address is this


def text(count: int, body: str, size: int, fragments: int = 0) -> str:
    """A kernel (out, in, tile, desc_a, desc_b): registers %c from `in`, %a after them; shared memory from `tile`."""
    loads = "".join(f"ld.global.u32 %c{i}, [%d0 + {512 * i}];\n" for i in range(count))
    loads += "".join(f"ld.global.u32 %a{i}, [%d0 + {512 * (count + i)}];\n" for i in range(fragments))
    stores = "".join(f"st.global.u32 [%d1 + {512 * i}], %c{i};\n" for i in range(count))
    return f"""
.visible .entry k(.param .u64 out, .param .u64 in, .param .u64 tile_in, .param .u64 desc_a, .param .u64 desc_b)
{{
.reg .b32 %r<20>, %c<{max(count, 1)}>, %a<4>; .reg .b64 %d<12>; .reg .pred %p<6>;
.shared .align 1024 .b8 tile[{size}];
mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; setp.eq.u32 %p1, %r0, 0;
ld.param.u64 %d0, [in]; add.u64 %d0, %d0, %d2; ld.param.u64 %d1, [out]; add.u64 %d1, %d1, %d2;
ld.param.u64 %d3, [tile_in]; ld.param.u64 %d4, [desc_a]; ld.param.u64 %d5, [desc_b];
mul.lo.u32 %r2, %r0, 16; mov.u32 %r3, tile;
IN: setp.ge.u32 %p2, %r2, {size};
@%p2 bra IN_END;
cvt.u64.u32 %d6, %r2; add.u64 %d6, %d6, %d3; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d6];
add.u32 %r8, %r3, %r2; st.shared.v4.u32 [%r8], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 2048;
bra IN;
IN_END:
{loads}{body}{stores}ret;
}}
"""


def registers(kind: str, count: int) -> str:
    return "{" + ", ".join(f"%{kind}{i}" for i in range(count)) + "}"


def elements(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    low, high = (0, 9) if kind == "u8" else (-4, 5)
    return random.integers(low, high, shape).astype(np.float32).astype(DTYPES[kind])


def multiply(
    d_type: str, a_type: str, b_type: str, n: int, *, a_pitch: int = 128, b_pitch: int = 128, a_mn: bool = False,
    b_mn: bool = False, in_registers: bool = False, scale_d: int = 1, scale_a: int = 1, scale_b: int = 1,
    body: str = "{mma}", checks: Checks = Checks.ALL, fence: str = PROXY + "bar.sync 0;\n" + FENCE,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One wgmma on small integers: (result, expected), both [64, n]."""
    k = 32 // np.dtype(DTYPES[a_type]).itemsize
    c_type = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d_type]
    a, b = elements(a_type, (64, k), n), elements(b_type, (n, k), n + 1)
    c = np.random.default_rng(2).integers(-40, 40, (64, n)).astype(c_type)
    data_a, lbo_a, sbo_a, size_a = (mn_major if a_mn else k_major)(a, a_pitch, TILE)
    start_b = TILE + -(-size_a // 1024) * 1024
    data_b, lbo_b, sbo_b, size_b = (mn_major if b_mn else k_major)(b, b_pitch, start_b)
    tile = np.zeros(-(-(start_b - TILE + size_b) // 1024) * 1024, np.uint8)
    tile[:size_a], tile[start_b - TILE : start_b - TILE + size_b] = data_a, data_b
    parts = [c_fragment(c[16 * w : 16 * w + 16]) for w in range(4)]
    if in_registers:
        parts = [np.concatenate([part, a_fragment(a[16 * w : 16 * w + 16])]) for w, part in enumerate(parts)]
    inputs = np.concatenate(parts, axis=1)  # [registers, 128]
    count = n // (4 if d_type == "f16" else 2)
    source = registers("a", 4) if in_registers else "%d4"
    immediates = [] if d_type == "s32" else [scale_a, scale_b]
    if np.dtype(DTYPES[a_type]).itemsize == 2:
        immediates += [int(b_mn)] if in_registers else [int(a_mn), int(b_mn)]
    mma = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{a_type}.{b_type} "
    mma = (
        f"setp.ne.u32 %p0, {scale_d}, 0;\n"
        + mma
        + f"{registers('c', count)}, {source}, %d5, %p0"
        + "".join(f", {value}" for value in immediates)
        + ";\n"
    )
    kernel = text(
        count, fence + body.replace("{mma}", mma + COMMIT + WAIT).replace("{bare}", mma), tile.size, 4 * in_registers
    )
    out, *_ = launch_text(
        kernel,
        [
            np.zeros((count, 128), np.uint32), inputs, tile,
            descriptor(TILE, lbo_a, sbo_a, a_pitch), descriptor(start_b, lbo_b, sbo_b, b_pitch),
        ],
        threads=128, checks=checks,
    )  # fmt: skip
    actual = np.concatenate([c_matrix(out[:, 32 * w : 32 * w + 32], c_type) for w in range(4)])
    product = a.astype(np.float64) @ b.astype(np.float64).T * (scale_a * scale_b)
    return actual.astype(np.float64), product + (c if scale_d else 0)


CASES = [
    ("f32", "bf16", "bf16"), ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e4m3"), ("f32", "e5m2", "e4m3"), ("f16", "e4m3", "e5m2"), ("s32", "s8", "s8"), ("s32", "u8", "s8"),
]  # fmt: skip


@pytest.mark.parametrize(("d_type", "a_type", "b_type"), CASES)
@pytest.mark.parametrize("n", [8, 88, 256])
@pytest.mark.exhaustive_cases("88-", "f16-e4m3-e5m2", "s32-u8-s8")
def test_types_and_widths(d_type: str, a_type: str, b_type: str, n: int) -> None:
    actual, expected = multiply(d_type, a_type, b_type, n)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("pitch_a", [16, 32, 64, 128])
@pytest.mark.parametrize("pitch_b", [16, 32, 64, 128])
@pytest.mark.parametrize("majors", [(False, False), (False, True), (True, False), (True, True)])
def test_swizzles_and_orientations(pitch_a: int, pitch_b: int, majors: tuple[bool, bool]) -> None:
    actual, expected = multiply(
        "f32", "bf16", "bf16", 128, a_pitch=pitch_a, b_pitch=pitch_b, a_mn=majors[0], b_mn=majors[1]
    )
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize(("d_type", "a_type", "b_type"), CASES)
def test_a_from_registers(d_type: str, a_type: str, b_type: str) -> None:
    actual, expected = multiply(d_type, a_type, b_type, 24, in_registers=True)
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("scale_d", [0, 1])
@pytest.mark.parametrize(("scale_a", "scale_b"), [(1, -1), (-1, 1), (-1, -1)])
def test_scales(scale_d: int, scale_a: int, scale_b: int) -> None:
    actual, expected = multiply("f32", "f16", "f16", 16, scale_d=scale_d, scale_a=scale_a, scale_b=scale_b)
    assert np.array_equal(actual, expected)


def test_accumulation_over_groups() -> None:
    """Two instructions in two groups on the same accumulators: no fence is needed between them."""
    body = "{bare}" + COMMIT + "{bare}" + COMMIT + "wgmma.wait_group.sync.aligned 1;\n" + WAIT
    actual, once = multiply("f32", "bf16", "bf16", 16, body=body)
    twice, _ = multiply("f32", "bf16", "bf16", 16, body="{mma}")
    c = np.random.default_rng(2).integers(-40, 40, (64, 16))
    assert np.array_equal(actual - c, 2 * (once - c))
    assert np.array_equal(twice, once)


NO_PROXY = "bar.sync 0;\n" + FENCE


@pytest.mark.parametrize(
    ("body", "options", "kind", "text"),
    [
        # accumulators read or written before their wait, or whose group is pending or was never committed
        ("{bare}" + COMMIT + "add.f32 %r9, %c3, %c4;\n" + WAIT, {}, FaultKind.ACCUMULATOR_IN_FLIGHT, "add.f32"),
        ("{bare}" + COMMIT + "wgmma.wait_group.sync.aligned 1;\n", {}, FaultKind.ACCUMULATOR_IN_FLIGHT, "st.global"),
        ("{bare}" + WAIT, {}, FaultKind.ACCUMULATOR_IN_FLIGHT, ""),
        ("{bare}" + COMMIT + "mov.b32 %c0, 0;\n" + WAIT, {}, FaultKind.ACCUMULATOR_IN_FLIGHT, "mov.b32"),
        ("{bare}" + COMMIT + "mov.b32 %a1, 0;\n" + WAIT, {"in_registers": True}, FaultKind.ACCUMULATOR_IN_FLIGHT, ""),
        # missing fences
        ("{mma}", {"fence": PROXY + "bar.sync 0;\n"}, FaultKind.MISSING_WGMMA_FENCE, ""),
        ("mov.b32 %c5, 0;\n{mma}", {}, FaultKind.MISSING_WGMMA_FENCE, "wgmma.mma_async"),
        ("{mma}", {"fence": NO_PROXY}, FaultKind.MISSING_PROXY_FENCE, "wgmma.mma_async"),
        # shared memory changed before it was read, registers that nothing reads again, a tile outside of the memory
        ("{bare}" + COMMIT + "@%p1 st.shared.u32 [%r3], 12345;\n" + WAIT, {"checks": Checks.ALL & ~Checks.RACES},
         FaultKind.SOURCE_IN_FLIGHT, "wgmma.mma_async"),
        ("{bare}" + COMMIT + "ret;\n", {}, FaultKind.EXIT_IN_FLIGHT, ""),
        ("or.b64 %d5, %d5, 16376;\n{mma}", {}, FaultKind.WGMMA_DESCRIPTOR, ""),
    ],
)  # fmt: skip
def test_misuse_is_named(body: str, options: dict[str, object], kind: FaultKind, text: str) -> None:
    with pytest.raises(EmulatorFault) as caught:
        multiply("f32", "bf16", "bf16", 16, body=body, **options)
    assert caught.value.kind == kind
    assert text in caught.value.text


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("{bare}" + COMMIT + "mov.b32 %r9, %a1;\n" + WAIT, {"in_registers": True}),  # a factor may be read in flight
        ("{mma}", {"fence": "bar.sync 0;\n" + PROXY + FENCE}),
    ],
)
def test_what_is_no_misuse(body: str, options: dict[str, object]) -> None:
    actual, expected = multiply("f32", "bf16", "bf16", 16, body=body, **options)
    assert np.array_equal(actual, expected)


def test_operands_are_read_late() -> None:
    """Without checks the changed operand shows in the result."""
    body = "{bare}" + COMMIT + "@%p1 st.shared.u32 [%r3], 0x44804480;\n" + WAIT  # 1024, 1024
    actual, expected = multiply("f32", "bf16", "bf16", 16, body=body, checks=Checks(0))
    assert not np.array_equal(actual[0], expected[0])
    assert np.array_equal(actual[1:], expected[1:])
