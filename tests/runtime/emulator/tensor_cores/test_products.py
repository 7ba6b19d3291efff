"""mma.sync in all shapes against numpy, by the fragment layouts of the PTX ISA; ldmatrix, stmatrix, movmatrix."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.tensor_harness import (
    DTYPES,
    a_fragment,
    b_fragment,
    c_fragment,
    c_matrix,
    launch_text,
)

ACCUMULATORS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
SHAPES = [
    (4, "f32", "tf32", "tf32"), (8, "f32", "tf32", "tf32"),
    (8, "f32", "bf16", "bf16"), (16, "f32", "bf16", "bf16"),
    (8, "f32", "f16", "f16"), (16, "f32", "f16", "f16"), (8, "f16", "f16", "f16"), (16, "f16", "f16", "f16"),
    (32, "f32", "e4m3", "e4m3"), (32, "f32", "e4m3", "e5m2"), (32, "f32", "e5m2", "e5m2"), (32, "f16", "e5m2", "e4m3"),
    (16, "s32", "s8", "s8"), (32, "s32", "s8", "u8"), (32, "s32", "u8", "s8"), (32, "s32", "u8", "u8"),
]  # fmt: skip


def mma_text(opcode: str, counts: tuple[int, int, int], guard: str = "") -> str:
    """A kernel (out, in): the fragments of A, B and C lie in `in` register after register; out gets D."""
    d_count, a_count, b_count = counts
    inputs = (
        [f"%a{i}" for i in range(a_count)] + [f"%b{i}" for i in range(b_count)] + [f"%c{i}" for i in range(d_count)]
    )
    outputs = [f"%d{i}" for i in range(d_count)]
    loads = "\n".join(f"ld.global.u32 {name}, [%in + {128 * i}];" for i, name in enumerate(inputs))
    stores = "\n".join(f"st.global.u32 [%out + {128 * i}], {name};" for i, name in enumerate(outputs))
    group = {kind: ", ".join(name for name in inputs + outputs if name[1] == kind) for kind in "abcd"}
    return f"""
.visible .entry k(.param .u64 out, .param .u64 in)
{{
.reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %lane; .reg .b64 %in, %out, %at; .reg .pred %p;
mov.u32 %lane, %laneid; mul.wide.u32 %at, %lane, 4;
setp.lt.u32 %p, %lane, 31;
ld.param.u64 %in, [in]; add.u64 %in, %in, %at;
ld.param.u64 %out, [out]; add.u64 %out, %out, %at;
{loads}
{guard}{opcode} {{{group["d"]}}}, {{{group["a"]}}}, {{{group["b"]}}}, {{{group["c"]}}};
{stores}
ret;
}}
"""


def matrices(k: int, c_type: str, a_type: str, b_type: str, seed: int, scale: float) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)

    def some(kind: str, shape: tuple[int, int]) -> np.ndarray:
        if kind in ("s8", "u8"):
            limits = np.iinfo(DTYPES[kind])
            return random.integers(limits.min, limits.max, shape, endpoint=True).astype(DTYPES[kind])
        values = random.integers(-4, 5, shape) if scale == 0 else random.standard_normal(shape) * scale
        return values.astype(np.float32).astype(DTYPES[kind])

    c = random.integers(-50, 50, (16, 8)).astype(ACCUMULATORS[c_type])
    return some(a_type, (16, k)), some(b_type, (k, 8)), c


@pytest.mark.parametrize(("k", "c_type", "a_type", "b_type"), SHAPES)
@pytest.mark.exhaustive_cases("32-f32-e4m3-e5m2", "32-s32-s8-u8", "32-s32-u8-s8")
def test_mma_is_exact_on_integers_and_close_on_others(k: int, c_type: str, a_type: str, b_type: str) -> None:
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{c_type}.{a_type}.{b_type}.{c_type}"
    for scale in (0, 1.0):
        a, b, c = matrices(k, c_type, a_type, b_type, k, scale)
        if a_type == "tf32":  # the low bits are not looked at
            low = np.random.default_rng(1).integers(0, 1 << 13, a.shape, np.uint32)
            a = (a.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
            b = (b.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32)
            noisy = (a.view(np.uint32) | low).view(np.float32)
        else:
            noisy = a
        fragments = [a_fragment(noisy), b_fragment(b), c_fragment(c)]
        inputs = np.concatenate(fragments)
        text = mma_text(opcode, (len(fragments[2]), len(fragments[0]), len(fragments[1])))
        out, _ = launch_text(text, [np.zeros_like(fragments[2]), inputs])
        actual = c_matrix(out, c.dtype)
        if c_type == "s32":
            assert np.array_equal(actual, a.astype(np.int32) @ b.astype(np.int32) + c)
        else:
            expected = a.astype(np.float64) @ b.astype(np.float64) + c
            if scale == 0:
                assert np.array_equal(actual.astype(np.float64), expected)
            else:
                magnitude = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) + np.abs(c)
                epsilon = 2.0**-10 if c_type == "f16" else 2.0**-22
                assert np.all(np.abs(actual - expected) <= epsilon * magnitude)


def test_fp8_bits_have_their_values() -> None:
    """Each of the 256 codes, by the identity: D = A I."""
    for kind in ("e4m3", "e5m2"):
        codes = np.arange(256, dtype=np.uint8).view(DTYPES[kind])
        for start in range(0, 256, 128):
            a = np.zeros((16, 32), DTYPES[kind])
            a[:, :8] = codes[start : start + 128].reshape(16, 8)
            b = np.zeros((32, 8), DTYPES[kind])
            b[:8] = np.eye(8).astype(DTYPES[kind])
            finite = np.isfinite(a[:, :8].astype(np.float32))
            a_finite = np.where(np.isfinite(a.astype(np.float32)), a, DTYPES[kind](0))
            opcode = f"mma.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
            for given in (a, a_finite):
                inputs = np.concatenate([a_fragment(given), b_fragment(b), np.zeros((4, 32), np.uint32)])
                out, _ = launch_text(mma_text(opcode, (4, 4, 2)), [np.zeros((4, 32), np.uint32), inputs])
                actual = c_matrix(out, np.float32)
                if given is a_finite:
                    assert np.array_equal(actual[finite], a[:, :8].astype(np.float32)[finite])
                else:
                    assert np.all(np.isnan(actual[~finite.all(axis=1)]).any(axis=1))


def test_saturating_integers() -> None:
    a, b = np.full((16, 32), 127, np.int8), np.full((32, 8), 127, np.int8)
    c = np.full((16, 8), np.iinfo(np.int32).max - 5, np.int32)
    inputs = np.concatenate([a_fragment(a), b_fragment(b), c_fragment(c)])
    wrapped = (a.astype(np.int64) @ b.astype(np.int64) + c).astype(np.int32)
    for middle, expected in ((".satfinite", np.full_like(c, np.iinfo(np.int32).max)), ("", wrapped)):
        opcode = f"mma.sync.aligned.m16n8k32.row.col{middle}.s32.s8.s8.s32"
        out, _ = launch_text(mma_text(opcode, (4, 4, 2)), [np.zeros((4, 32), np.uint32), inputs])
        assert np.array_equal(c_matrix(out, np.int32), expected)


def test_mma_under_divergence_is_a_fault() -> None:
    opcode = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
    with pytest.raises(EmulatorFault) as caught:
        launch_text(
            mma_text(opcode, (4, 2, 1), guard="@%p "), [np.zeros((4, 32), np.uint32), np.zeros((7, 32), np.uint32)]
        )
    assert caught.value.kind == FaultKind.DIVERGENT_ALIGNED
    assert opcode in caught.value.text


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
    ],
)
def test_what_is_not_known_is_refused_by_name(opcode: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=rf"{opcode} is not emulated: shape or types"):
        launch_text(mma_text(opcode, (4, 4, 2)), [np.zeros((4, 32), np.uint32), np.zeros((10, 32), np.uint32)])


def test_mma_of_doubles() -> None:
    random = np.random.default_rng(5)
    a, b, c = random.standard_normal((8, 4)), random.standard_normal((4, 8)), random.standard_normal((8, 8))
    lane = np.arange(32)
    row, column = lane // 4, lane % 4
    given = np.stack([a[row, column], b[column, row], c[row, 2 * column], c[row, 2 * column + 1]])
    text = """
.visible .entry k(.param .u64 out, .param .u64 in)
{
.reg .b32 %lane; .reg .b64 %in, %out, %at; .reg .f64 %d<6>;
mov.u32 %lane, %laneid; mul.wide.u32 %at, %lane, 8;
ld.param.u64 %in, [in]; add.u64 %in, %in, %at; ld.param.u64 %out, [out]; add.u64 %out, %out, %at;
ld.global.f64 %d0, [%in]; ld.global.f64 %d1, [%in + 256];
ld.global.f64 %d2, [%in + 512]; ld.global.f64 %d3, [%in + 768];
mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d0, %d3}, {%d0}, {%d1}, {%d2, %d3};
st.global.f64 [%out], %d0; st.global.f64 [%out + 256], %d3;
ret;
}
"""
    out, _ = launch_text(text, [np.zeros((2, 32)), given])
    expected = a @ b + c
    wanted = np.stack([expected[row, 2 * column], expected[row, 2 * column + 1]])
    assert np.allclose(out, wanted, rtol=1e-15, atol=1e-15)


MATRIX_TEXT = """
.visible .entry k(.param .u64 out, .param .u64 in)
{{
.reg .b32 %r<20>; .reg .b64 %d<6>; .shared .align 16 .b8 tile[1024];
mov.u32 %r0, %laneid;
ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];
mul.wide.u32 %d2, %r0, 16; add.u64 %d0, %d0, %d2;
mul.lo.u32 %r1, %r0, 16; mov.u32 %r2, tile; add.u32 %r1, %r1, %r2;
{before}
bar.sync 0;
{middle}
mul.wide.u32 %d2, %r0, 4; add.u64 %d1, %d1, %d2;
{after}
ret;
}}
"""
STORE_ROWS = "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d0]; st.shared.v4.u32 [%r1], {%r4, %r5, %r6, %r7};"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(count: int, trans: str) -> None:
    matrix = np.arange(256, dtype=np.uint16).reshape(4, 8, 8) * 251
    names = ", ".join(f"%r{8 + i}" for i in range(count))
    text = MATRIX_TEXT.format(
        before=STORE_ROWS,
        middle=f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r1];",
        after="\n".join(f"st.global.u32 [%d1 + {128 * i}], %r{8 + i};" for i in range(count)),
    )
    out, _ = launch_text(text, [np.zeros((count, 32), np.uint32), matrix])
    for index in range(count):
        expected = matrix[index].T if trans else matrix[index]
        assert np.array_equal(out[index].view(np.uint16).reshape(8, 8), expected)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix(count: int, trans: str) -> None:
    matrix = np.arange(256, dtype=np.uint16).reshape(4, 8, 8) * 113
    loads = "\n".join(f"ld.global.u32 %r{8 + i}, [%d3 + {128 * i}];" for i in range(count))
    names = ", ".join(f"%r{8 + i}" for i in range(count))
    text = MATRIX_TEXT.format(
        before=f"mul.wide.u32 %d2, %r0, 4; ld.param.u64 %d3, [in]; add.u64 %d3, %d3, %d2;\n{loads}\n"
        f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r1], {{{names}}};",
        middle="",
        after="mul.lo.u32 %r3, %r0, 4; mov.u32 %r2, tile; add.u32 %r3, %r3, %r2;\n"
        + "\n".join(
            f"ld.shared.u32 %r4, [%r3 + {128 * i}]; st.global.u32 [%d1 + {128 * i}], %r4;" for i in range(count)
        ),
    )
    out, _ = launch_text(text, [np.zeros((count, 32), np.uint32), matrix])
    for index in range(count):
        expected = matrix[index].T if trans else matrix[index]
        assert np.array_equal(out[index].view(np.uint16).reshape(8, 8), expected)


def test_movmatrix_transposes() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    text = MATRIX_TEXT.format(
        before="mul.wide.u32 %d2, %r0, 4; ld.param.u64 %d3, [in]; add.u64 %d3, %d3, %d2; ld.global.u32 %r8, [%d3];",
        middle="movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r8;",
        after="st.global.u32 [%d1], %r9;",
    )
    out, _ = launch_text(text, [np.zeros((1, 32), np.uint32), matrix])
    assert np.array_equal(out.view(np.uint16).reshape(8, 8), matrix.T)


@pytest.mark.parametrize(
    ("before", "address", "kind"),
    [
        (STORE_ROWS, "[%r1 + 8]", FaultKind.ASYNC_ALIGNMENT),
        ("", "[%r1]", FaultKind.UNINITIALIZED),
        (STORE_ROWS, "[%r1 + 16]", FaultKind.OUT_OF_BOUNDS),
    ],
)
def test_ldmatrix_checks_each_row(before: str, address: str, kind: FaultKind) -> None:
    text = MATRIX_TEXT.format(
        before=before.replace("tile[1024]", "tile[512]"),
        middle=f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r8, %r9, %r10, %r11}}, {address};",
        after="st.global.u32 [%d1], %r8;",
    ).replace("tile[1024]", "tile[512]")
    with pytest.raises(EmulatorFault) as caught:
        launch_text(text, [np.zeros((1, 32), np.uint32), np.zeros((4, 64), np.uint16)])
    assert caught.value.kind == kind
    assert "ldmatrix" in caught.value.text
