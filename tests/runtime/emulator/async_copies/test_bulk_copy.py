"""Bulk copies and TMA: plain bytes, tiles of 1 to 5 dimensions and their swizzles, stores, reductions, faults."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from runtime.emulator.async_copies import tensor_map
from runtime.emulator.async_copies.tensor_map import BF16, F16, F32, F64, S32, U8, U16, U32, encode
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.errors import InvalidArgumentError
from tests.runtime.emulator.tensor_harness import InMemory, launch_text

MBARRIER = "mbarrier::complete_tx::bytes"
TEXT = """
.visible .entry k(.param .u64 out, .param .u64 in, .param .align 64 .b8 map[128])
{{
.reg .b32 %r<30>; .reg .b64 %d<12>; .reg .pred %p<6>;
.shared .align 1024 .b8 tile[8192]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0;
ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];
mov.b64 %d2, map; cvta.param.u64 %d2, %d2;
mov.u32 %r1, tile;
@%p1 mbarrier.init.shared.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
{body}
ret;
}}
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;\n@!%p3 bra W;\n"


def copy_out(size_bytes: int) -> str:
    """Shared memory as it lies → out, a word a thread and turn."""
    return f"""
mul.lo.u32 %r20, %r0, 4; mov.u32 %r24, %ntid.x; mul.lo.u32 %r24, %r24, 4;
OUT: setp.ge.u32 %p5, %r20, {size_bytes};
@%p5 bra OUT_END;
add.u32 %r21, %r1, %r20; cvt.u64.u32 %d8, %r20; add.u64 %d9, %d1, %d8;
ld.shared.u32 %r22, [%r21]; st.global.u32 [%d9], %r22;
add.u32 %r20, %r20, %r24;
bra OUT;
OUT_END:
"""


def copy_in(size_bytes: int) -> str:
    """in → shared memory, by plain stores."""
    return f"""
mul.lo.u32 %r20, %r0, 4; mov.u32 %r24, %ntid.x; mul.lo.u32 %r24, %r24, 4;
IN: setp.ge.u32 %p5, %r20, {size_bytes};
@%p5 bra IN_END;
add.u32 %r21, %r1, %r20; cvt.u64.u32 %d8, %r20; add.u64 %d9, %d0, %d8;
ld.global.u32 %r22, [%d9]; st.shared.u32 [%r21], %r22;
add.u32 %r20, %r20, %r24;
bra IN;
IN_END:
"""


NO_MAP = bytes(128)


def run(body: str, out: np.ndarray, data: np.ndarray, tensor: object = NO_MAP, **options: object) -> list[np.ndarray]:
    return launch_text(TEXT.format(body=body), [out, data, tensor], **options)


def fault(body: str, out: np.ndarray, data: np.ndarray, tensor: object = NO_MAP, **options: object) -> EmulatorFault:
    with pytest.raises(EmulatorFault) as caught:
        run(body, out, data, tensor, **options)
    return caught.value


def load(size: int, expect: int | None = None, where: str = "[%d0]", target: str = "[%r1]") -> str:
    return (
        f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size if expect is None else expect};\n"
        f"@%p1 cp.async.bulk.shared::cluster.global.{MBARRIER} {target}, {where}, {size}, [bar];\n"
    )


STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 1024;\n"
COMMIT = "@%p1 cp.async.bulk.commit_group;\n"
DRAIN = "@%p1 cp.async.bulk.wait_group 0;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
WORDS = np.arange(256, dtype=np.uint32) * 3 + 7
ZEROS = np.zeros(256, np.uint32)


# --- plain bytes ---


def test_load() -> None:
    assert np.array_equal(run(load(1024) + WAIT + copy_out(1024), ZEROS, WORDS)[0], WORDS)


def test_two_loads_complete_one_phase() -> None:
    body = load(512, 1024) + f"@%p1 cp.async.bulk.shared::cta.global.{MBARRIER} [%r1 + 512], [%d0 + 512], 512, [bar];\n"
    assert np.array_equal(run(body + WAIT + copy_out(1024), ZEROS, WORDS, threads=64)[0], WORDS)


def test_store() -> None:
    body = copy_in(1024) + FENCE + "bar.sync 0;\n" + STORE + COMMIT + DRAIN
    assert np.array_equal(run(body, ZEROS, WORDS, threads=64)[0], WORDS)


def test_the_fence_may_stand_after_the_barrier() -> None:
    body = copy_in(1024) + "bar.sync 0;\n" + FENCE + STORE + COMMIT + DRAIN
    assert np.array_equal(run(body, ZEROS, WORDS, threads=64)[0], WORDS)


def test_a_missing_proxy_fence() -> None:
    caught = fault(copy_in(1024) + "bar.sync 0;\n" + STORE + COMMIT + DRAIN, ZEROS, WORDS, threads=64)
    assert caught.kind == FaultKind.MISSING_PROXY_FENCE
    assert "cp.async.bulk.global" in caught.text


def test_a_fence_by_another_warp_before_the_barrier_does_not_count() -> None:
    only_first = "setp.lt.u32 %p2, %r0, 32;\n@%p2 fence.proxy.async.shared::cta;\n"
    body = copy_in(1024) + only_first + "bar.sync 0;\n" + STORE + COMMIT + DRAIN
    assert fault(body, ZEROS, WORDS, threads=64).kind == FaultKind.MISSING_PROXY_FENCE


def test_what_tma_wrote_needs_no_fence() -> None:
    body = load(1024) + WAIT + STORE + COMMIT + DRAIN
    assert np.array_equal(run(body, ZEROS, WORDS)[0], WORDS)


def test_the_target_in_flight() -> None:
    caught = fault(load(1024) + copy_out(1024), ZEROS, WORDS)
    assert caught.kind == FaultKind.IN_FLIGHT
    assert "ld.shared" in caught.text


def test_the_source_of_a_store_overwritten_before_it_was_read() -> None:
    after = "@%p1 st.shared.u32 [%r1 + 64], %r0;\n"
    prefix = copy_in(1024) + FENCE + "bar.sync 0;\n" + STORE + COMMIT
    caught = fault(prefix + after + DRAIN, ZEROS, WORDS)
    assert caught.kind == FaultKind.SOURCE_IN_FLIGHT
    assert "st.shared" in caught.text
    out = run(prefix + "@%p1 cp.async.bulk.wait_group.read 0;\n" + after + DRAIN, ZEROS, WORDS)[0]
    assert np.array_equal(out, WORDS)


def test_wait_group_read_does_not_show_the_result() -> None:
    read = "ld.global.u32 %r9, [%d1];\n"
    prefix = copy_in(1024) + FENCE + "bar.sync 0;\n" + STORE + COMMIT
    caught = fault(prefix + "@%p1 cp.async.bulk.wait_group.read 0;\n@%p1 " + read, ZEROS, WORDS)
    assert caught.kind == FaultKind.IN_FLIGHT
    run(prefix + DRAIN + "@%p1 " + read, ZEROS, WORDS)


def test_a_wait_counts_groups() -> None:
    second = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1 + 512], [%r1 + 512], 512;\n" + COMMIT
    body = copy_in(1024) + FENCE + "bar.sync 0;\n" + STORE.replace("1024", "512") + COMMIT + second
    body += "@%p1 cp.async.bulk.wait_group 1;\n@%p1 ld.global.u32 %r9, [%d1{}];\n" + DRAIN
    run(body.format(""), ZEROS, WORDS)
    assert fault(body.format(" + 512"), ZEROS, WORDS).kind == FaultKind.IN_FLIGHT


def test_exit_before_the_source_was_read() -> None:
    caught = fault(copy_in(1024) + FENCE + "bar.sync 0;\n" + STORE + COMMIT, ZEROS, WORDS)
    assert caught.kind == FaultKind.EXIT_IN_FLIGHT
    assert fault(load(1024), ZEROS, WORDS).kind == FaultKind.EXIT_IN_FLIGHT


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (load(1000), FaultKind.ASYNC_SIZE),
        (load(1024, where="[%d0 + 8]"), FaultKind.ASYNC_ALIGNMENT),
        (load(1024, target="[%r1 + 4]"), FaultKind.ASYNC_ALIGNMENT),
        (load(1040), FaultKind.OUT_OF_BOUNDS),
        (load(1024, target="[%r1 + 7680]"), FaultKind.OUT_OF_BOUNDS),
        (load(1024, 1040) + WAIT, FaultKind.DEADLOCK),
        (load(1024).replace("1024, [bar]", "1024, [tile]"), FaultKind.MBARRIER_INVALID),
        (STORE + COMMIT + DRAIN, FaultKind.UNINITIALIZED),
    ],
)  # fmt: skip
def test_misuse(body: str, kind: FaultKind) -> None:
    assert fault(body, ZEROS, WORDS).kind == kind


@pytest.mark.parametrize(
    ("operation", "dtype", "reduce"),
    [
        ("add.u32", np.uint32, np.add), ("min.s32", np.int32, np.minimum), ("max.s32", np.int32, np.maximum),
        ("and.b32", np.uint32, np.bitwise_and), ("xor.b64", np.uint64, np.bitwise_xor), ("add.u64", np.uint64, np.add),
        ("max.u64", np.uint64, np.maximum), ("add.f32", np.float32, np.add), ("add.f64", np.float64, np.add),
        ("add.noftz.f16", np.float16, np.add), ("add.noftz.bf16", ml_dtypes.bfloat16, np.add),
        ("min.f16", np.float16, np.minimum), ("max.bf16", ml_dtypes.bfloat16, np.maximum),
    ],
)  # fmt: skip
def test_reducing_stores(operation: str, dtype: type, reduce: Callable[..., np.ndarray]) -> None:
    random = np.random.default_rng(3)
    size = 1024 // np.dtype(dtype).itemsize
    old, new = (
        (random.standard_normal(size) * 3).astype(dtype)
        if np.dtype(dtype).kind in "fV"
        else random.integers(0, 2**31 - 1, size).astype(dtype)
        for _ in range(2)
    )
    body = copy_in(1024) + FENCE + "bar.sync 0;\n"
    body += (
        f"@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%d1], [%r1], 1024;\n" + COMMIT + DRAIN
    )
    out = run(body, old, new)[0]
    with np.errstate(over="ignore"):
        assert np.array_equal(out.view(np.uint8), reduce(old, new).astype(dtype).view(np.uint8))


@pytest.mark.parametrize(("operation", "expected"), [("inc", [0, 6, 8]), ("dec", [9, 4, 7])])
def test_wrapping_counters(operation: str, expected: list[int]) -> None:
    old, limit = np.array([9, 5, 7, 0], np.uint32), np.array([9, 9, 9, 9], np.uint32)
    old[0] = 9 if operation == "inc" else 0
    old[2] = 7 if operation == "inc" else 8
    body = copy_in(16) + FENCE + "bar.sync 0;\n"
    body += (
        f"@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.u32 [%d1], [%r1], 16;\n" + COMMIT + DRAIN
    )
    assert run(body, old, limit)[0][:3].tolist() == expected


# --- tiles ---


def swizzled_image(tile: np.ndarray, mode: int) -> np.ndarray:
    """A tile's packed bytes as they lie in shared memory under a swizzle, by the PTX ISA's picture: chunk c of row r of
    a 128-byte-wide pattern lies in column c XOR r mod 8 (narrower patterns: two and four rows a line)."""
    packed = np.ascontiguousarray(tile).reshape(-1).view(np.uint8)
    image = np.empty_like(packed)
    for chunk in range(packed.size // 16):
        line, column = divmod(chunk, 8)
        moved = column ^ (line & ((1 << mode) - 1))
        image[(line * 8 + moved) * 16 : (line * 8 + moved) * 16 + 16] = packed[chunk * 16 : chunk * 16 + 16]
    return image


def box_of(tensor: np.ndarray, start: list[int], box: list[int], fill: float, steps: list[int]) -> np.ndarray:
    """The box of a tensor (coordinates innermost first) with what lies outside filled in."""
    result = np.full([-(-extent // step) for extent, step in zip(box, steps)][::-1], fill, tensor.dtype)
    for index in np.ndindex(*result.shape):
        at = [first + i * step for first, i, step in zip(start[::-1], index, steps[::-1])]
        if all(0 <= place < size for place, size in zip(at, tensor.shape)):
            result[index] = tensor[tuple(at)]
    return result


def map_of(
    tensor: np.ndarray,
    kind: int,
    box: list[int],
    swizzle: int = 0,
    fill: int = 0,
    steps: list[int] | None = None,
    which: int = 1,
) -> Callable[[list[int]], bytes]:
    rank = tensor.ndim

    def at(addresses: list[int]) -> bytes:
        return encode(
            kind, addresses[which], tensor.shape[::-1], tensor.strides[::-1][1:], box, steps or [1] * rank,
            swizzle=swizzle, fill=fill,
        )  # fmt: skip

    return at


def tensor_load(rank: int, start: list[int], size: int) -> str:
    coordinates = ", ".join(str(c) for c in start)
    return (
        f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};\n"
        f"@%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.{MBARRIER} "
        f"[%r1], [%d2, {{{coordinates}}}], [bar];\n"
    )


def some(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count) % 251 - 120).astype(dtype).reshape(shape)


TILES = [
    ((96,), np.float32, F32, [64], [16], 0, 0),
    ((13, 40), np.int32, S32, [16, 8], [4, 2], 0, 0),
    ((13, 40), np.int32, S32, [16, 8], [32, 9], 0, 0),
    ((13, 40), np.int32, S32, [16, 8], [-5, -3], 0, 0),
    ((70, 128), ml_dtypes.bfloat16, BF16, [64, 32], [64, 48], 3, 0),
    ((70, 128), ml_dtypes.bfloat16, BF16, [64, 32], [96, 48], 3, 1),
    ((40, 64), np.float16, F16, [32, 16], [16, 3], 2, 0),
    ((40, 64), np.float16, F16, [16, 16], [56, 30], 1, 1),
    ((40, 64), np.float32, F32, [32, 16], [8, 30], 3, 1),
    ((9, 11, 32), np.uint8, U8, [32, 4, 3], [0, 9, 7], 1, 0),
    ((3, 5, 7, 16), np.uint16, U16, [8, 3, 2, 2], [4, 5, 4, 2], 0, 0),
    ((2, 3, 4, 5, 8), np.float32, F32, [8, 2, 2, 2, 2], [0, 4, 1, 2, 0], 1, 0),
]


@pytest.mark.parametrize(("shape", "dtype", "kind", "box", "start", "swizzle", "fill"), TILES)
def test_tensor_load(
    shape: tuple[int, ...], dtype: type, kind: int, box: list[int], start: list[int], swizzle: int, fill: int
) -> None:
    tensor = some(shape, dtype)
    expected = box_of(tensor, start, box, float("nan") if fill else 0, [1] * len(shape))
    image = swizzled_image(expected, swizzle)
    body = tensor_load(len(shape), start, image.size) + WAIT + copy_out(image.size)
    out = run(body, np.zeros(image.size, np.uint8), tensor, map_of(tensor, kind, box, swizzle, fill), threads=64)[0]
    if fill:  # any NaN will do
        is_nan = np.isnan(swizzled_image(expected, swizzle).view(dtype).astype(np.float32))
        assert is_nan.any()
        assert np.isnan(out.view(dtype)[is_nan].astype(np.float32)).all()
        out.view(dtype)[is_nan], image.view(dtype)[is_nan] = 0, 0
    assert np.array_equal(out, image)


def test_element_strides() -> None:
    tensor = some((20, 48), np.int32)
    expected = box_of(tensor, [1, 2], [32, 9], 0, [2, 3])
    body = tensor_load(2, [1, 2], expected.nbytes) + WAIT + copy_out(expected.nbytes)
    out = run(body, np.zeros_like(expected), tensor, map_of(tensor, S32, [32, 9], steps=[2, 3]))[0]
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(("shape", "dtype", "kind", "box", "start", "swizzle", "fill"), TILES[:8])
def test_tensor_store_leaves_the_outside_alone(
    shape: tuple[int, ...], dtype: type, kind: int, box: list[int], start: list[int], swizzle: int, fill: int
) -> None:
    tile = some(tuple(box[::-1]), dtype)
    image = swizzled_image(tile, swizzle)
    tensor = np.full(shape, 77).astype(dtype) if len(shape) else None
    assert tensor is not None
    expected = tensor.copy()
    for index in np.ndindex(*tile.shape):
        at = tuple(first + i for first, i in zip(start[::-1], index))
        if all(0 <= place < size for place, size in zip(at, shape)):
            expected[at] = tile[index]
    coordinates = ", ".join(str(c) for c in start)
    body = copy_in(image.size) + FENCE + "bar.sync 0;\n"
    body += (
        f"@%p1 cp.async.bulk.tensor.{len(shape)}d.global.shared::cta.tile.bulk_group [%d2, {{{coordinates}}}], [%r1];\n"
    )
    out = run(body + COMMIT + DRAIN, tensor, image, map_of(tensor, kind, box, swizzle, which=0), threads=64)[0]
    assert np.array_equal(out.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("operation", "dtype", "kind"),
    [("min", np.float32, F32), ("max", np.float64, F64), ("and", np.float32, F32), ("inc", np.float16, F16),
     ("add", np.uint8, U8)],
)  # fmt: skip
def test_a_reduction_that_the_type_lacks(operation: str, dtype: type, kind: int) -> None:
    tile, tensor = some((4, 16), dtype), some((6, 16), dtype)
    body = copy_in(tile.nbytes) + FENCE + "bar.sync 0;\n"
    body += (
        f"@%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%d2, {{0, 0}}], [%r1];\n"
    )
    caught = fault(body + COMMIT + DRAIN, tensor, tile, map_of(tensor, kind, [16, 4], which=0))
    assert caught.kind == FaultKind.TENSOR_MAP


def test_tensor_reduce() -> None:
    tile, tensor = some((4, 8), np.float32), some((6, 12), np.float32)
    expected = tensor.copy()
    expected[3:6, 6:12] += tile[:3, :6]
    body = copy_in(128) + FENCE + "bar.sync 0;\n"
    body += "@%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d2, {6, 3}], [%r1];\n"
    assert np.array_equal(run(body + COMMIT + DRAIN, tensor, tile, map_of(tensor, F32, [8, 4], which=0))[0], expected)


@pytest.mark.parametrize("fence", ["fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;\n", ""])
def test_a_map_in_global_memory_needs_its_fence(fence: str) -> None:
    tensor = some((8, 8), np.float32)
    text = TEXT.replace("mov.b64 %d2, map; cvta.param.u64 %d2, %d2;", "ld.param.u64 %d2, [map];")
    text = text.replace(".param .align 64 .b8 map[128]", ".param .u64 map")
    body = text.format(body=fence + tensor_load(2, [0, 0], 256) + WAIT + copy_out(256))
    arguments = [np.zeros_like(tensor), tensor, InMemory(map_of(tensor, F32, [8, 8]))]
    if fence:
        assert np.array_equal(launch_text(body, arguments)[0], tensor)
    else:
        with pytest.raises(EmulatorFault) as caught:
            launch_text(body, arguments)
        assert caught.value.kind == FaultKind.MISSING_TENSOR_MAP_FENCE


def test_a_map_of_another_rank() -> None:
    tensor = some((8, 8), np.float32)
    caught = fault(tensor_load(3, [0, 0, 0], 256), ZEROS, tensor, map_of(tensor, F32, [8, 8]))
    assert caught.kind == FaultKind.TENSOR_MAP
    assert fault(tensor_load(2, [0, 0], 256), ZEROS, tensor).kind == FaultKind.TENSOR_MAP


def test_a_prefetch_of_a_map_changes_nothing() -> None:
    tensor = some((8, 8), np.float32)
    run("prefetch.tensormap [%d2];\n", ZEROS, tensor, map_of(tensor, F32, [8, 8]))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"address": 8}, "address"), ({"sizes": [0, 4]}, "sizes"), ({"strides": [24]}, "strides"),
        ({"strides": []}, "strides"), ({"box": [257, 4]}, "box"), ({"box": [3, 4]}, "box"),
        ({"element_strides": [9, 1]}, "element_strides"), ({"swizzle": 4}, "swizzle"),
        ({"interleave": 1}, "interleave"),
        ({"fill": 2}, "fill"), ({"element_type": 11}, "element_type"), ({"box": [64, 4], "swizzle": 3}, "box"),
        ({"element_type": U32, "fill": 1}, "fill"),
    ],
)  # fmt: skip
def test_encode_names_what_is_wrong(changes: dict[str, object], field: str) -> None:
    arguments: dict[str, object] = {
        "element_type": F32, "address": 4096, "sizes": [64, 64], "strides": [256], "box": [16, 4],
        "element_strides": [1, 1],
    }  # fmt: skip
    encode(**arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as caught:
        encode(**{**arguments, **changes})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert tensor_map.MAP_BYTES == 128
