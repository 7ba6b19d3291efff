"""Loads and stores: every width, vector and space, the quick way and the careful way; and what must not be accessed."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine, connect
from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.memory_harness import Device, kernel_text

PATHS = [Checks.NONE, Checks.MEMORY | Checks.UNINITIALIZED, Checks.ALL, Checks.ALL | Checks.TRAFFIC]
SHAPES = [
    (size, count)
    for size in (1, 2, 4, 8)
    for count in (1, 2, 4, 8)
    if size * count <= 16 or (size, count) in ((4, 8), (8, 4))
    if count < 8 or size == 4
]
ORDERS = {
    "contiguous": np.arange(32),
    "reversed": np.arange(31, -1, -1),
    "scattered": np.random.default_rng(1).permutation(32),
    "apart": np.arange(32) * 3,
}


def _registers(size: int, count: int) -> str:
    kind = {1: "r", 2: "h", 4: "r", 8: "d"}[size]
    names = [f"%{kind}{10 + index if kind != 'h' else index}" for index in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def _suffix(size: int, count: int) -> str:
    return (f".v{count}" if count > 1 else "") + f".b{8 * size}"


@pytest.mark.parametrize("checks", PATHS, ids=["none", "memory", "all", "traffic"])
@pytest.mark.parametrize(("size", "count"), SHAPES)
def test_every_shape_through_device_and_shared_memory(size: int, count: int, checks: Checks) -> None:
    """in → register → shared → register → out, each lane at a place of its own, a quarter of the lanes idle."""
    suffix, registers, total = _suffix(size, count), _registers(size, count), size * count
    random = np.random.default_rng(size * 10 + count)
    for name, order in ORDERS.items():
        body = f"""
        and.b32 %r0, %lane, 3;
        setp.eq.u32 %p0, %r0, {3 if name != "contiguous" else 4};
        @%p0 bra done;
        mul.wide.u32 %d0, %lane, 4;
        add.u64 %d1, %a2, %d0;
        ld.global.u32 %r1, [%d1];
        mul.wide.u32 %d2, %r1, {total};
        add.u64 %d3, %a0, %d2;
        ld.global{suffix} {registers}, [%d3];
        mov.u64 %d4, box;
        add.u64 %d4, %d4, %d2;
        st.shared{suffix} [%d4], {registers};
        cvt.u32.u64 %r2, %d4;
        ld.shared{suffix} {registers}, [%r2];
        cvta.shared.u64 %d5, %d4;
        st{suffix} [%d5], {registers};
        ld{suffix} {registers}, [%d5];
        add.u64 %d6, %a1, %d2;
        st.global{suffix} [%d6+{total}], {registers};
        """
        text = kernel_text(3, body, inside=f".shared .align 32 .b8 box[{total * 96}];")
        data = random.integers(0, 256, (96, total), dtype=np.uint8)
        with Device() as device:
            source, places = device.put(data), device.put(order.astype(np.uint32))
            target = device.put(np.full((97, total), 0x5A, np.uint8))
            device.run(text, source, target, places, checks=checks)
            result = device.get(target, (97, total), np.uint8)
        expected = np.full((97, total), 0x5A, np.uint8)
        active = order if name == "contiguous" else order[np.arange(32) % 4 != 3]
        expected[active + 1] = data[active]
        np.testing.assert_array_equal(result, expected, err_msg=name)


@pytest.mark.parametrize("checks", PATHS[1:3])
def test_narrow_elements_get_their_sign(checks: Checks) -> None:
    body = """
    ld.global.s8 %r0, [%a0]; ld.global.u8 %r1, [%a0]; ld.global.s16 %r2, [%a0]; ld.global.u16 %r3, [%a0];
    ld.global.s8 %d0, [%a0]; ld.global.s16 %d1, [%a0]; ld.global.s32 %d2, [%a0]; ld.global.u32 %d3, [%a0];
    ld.global.s8 %h0, [%a0]; ld.global.v2.s8 {%r4, %r5}, [%a0];
    cvt.u32.u16 %r6, %h0;
    st.global.v4.u32 [%a1], {%r0, %r1, %r2, %r3};
    st.global.v4.u64 [%a1+32], {%d0, %d1, %d2, %d3};
    st.global.v2.u32 [%a1+16], {%r4, %r5};
    st.global.u32 [%a1+24], %r6;
    """
    with Device() as device:
        source, target = device.put(np.array([0x8182F384], np.uint32)), device.put(np.zeros(16, np.uint32))
        device.run(kernel_text(2, body), source, target, block=(1, 1, 1), checks=checks)
        words = device.get(target, 8, np.uint32)
        longs = device.get(target + 32, 4, np.uint64)
    assert [hex(word) for word in words[:7]] == [
        "0xffffff84", "0x84", "0xfffff384", "0xf384", "0xffffff84", "0xfffffff3", "0xff84"
    ]  # fmt: skip
    assert [hex(word) for word in longs] == [
        "0xffffffffffffff84", "0xfffffffffffff384", "0xffffffff8182f384", "0x8182f384"
    ]  # fmt: skip


def test_a_target_that_is_also_the_address() -> None:
    body = "ld.global.u64 %a0, [%a0]; ld.global.v2.u64 {%a0, %d1}, [%a0]; st.global.v2.u64 [%a1], {%a0, %d1};"
    with Device() as device:
        numbers = device.put(np.array([11, 22], np.uint64))
        source, target = device.put(np.array([numbers], np.uint64)), device.put(np.zeros(2, np.uint64))
        device.run(kernel_text(2, body), source, target, block=(1, 1, 1))
        assert device.get(target, 2, np.uint64).tolist() == [11, 22]


def test_local_memory_is_each_threads_own() -> None:
    body = """
    mov.u64 %d0, mine;
    cvta.local.u64 %d1, %d0;
    and.b32 %r0, %lane, 7; mul.wide.u32 %d2, %r0, 4; add.u64 %d3, %d0, %d2; add.u64 %d4, %d1, %d2;
    st.local.u32 [%d3], %thread;
    ld.u32 %r1, [%d4];
    st.u32 [%d1+28], 5; ld.local.u32 %r2, [mine+28];
    mad.lo.u32 %r1, %r2, 1000, %r1;
    mul.wide.u32 %d5, %thread, 4; add.u64 %d5, %a0, %d5; st.global.u32 [%d5], %r1;
    """
    with Device() as device:
        target = device.put(np.zeros(64, np.uint32))
        device.run(kernel_text(1, body, inside=".local .align 8 .b8 mine[32];"), target, block=(64, 1, 1))
        assert device.get(target, 64, np.uint32).tolist() == [5000 + thread for thread in range(64)]


def test_parameters_by_value() -> None:
    text = """.version 8.7
.target sm_80
.address_size 64
.visible .entry k(.param .u8 a, .param .align 8 .b8 b[24], .param .s16 c, .param .u64 out)
{ .reg .b32 %r<9>; .reg .b64 %d<9>;
ld.param.u64 %d0, [out]; ld.param.u8 %r0, [a]; ld.param.v2.b32 {%r1, %r2}, [b+8]; ld.param.s16 %r3, [c];
mov.b64 %d1, b; cvta.param.u64 %d2, %d1; ld.u64 %d3, [%d2+16]; ld.param.u32 %r4, [%d1+4];
mov.u32 %r5, 1;
st.global.v4.u32 [%d0], {%r0, %r1, %r2, %r3}; st.global.u64 [%d0+16], %d3; st.global.v2.u32 [%d0+24], {%r4, %r5};
ret; }"""
    kernel = load(text).kernel("k")
    machine = Machine(1 << 20)
    target = machine.allocate(32)
    parameters = bytearray(48)
    parameters[0] = 200
    parameters[8:32] = np.array([1, 2, 3, 4, 5, 6], np.uint32).tobytes()
    parameters[32:34] = np.array([-2], np.int16).tobytes()
    parameters[40:48] = np.array([target], np.uint64).tobytes()
    launch(kernel, machine, (1, 1, 1), (1, 1, 1), 0, bytes(parameters), checks=Checks.ALL)
    words = np.frombuffer(machine.read(target, 32), np.uint32).tolist()
    assert words == [200, 3, 4, 0xFFFFFFFE, 5, 6, 2, 1]


def test_const_and_global_variables() -> None:
    outside = ".const .align 4 .u32 primes[4] = {2, 3, 5, 7};\n.global .align 4 .u32 counter = 40;"
    body = """
    and.b32 %r0, %lane, 3; mul.wide.u32 %d0, %r0, 4; mov.u64 %d1, primes; add.u64 %d1, %d1, %d0;
    ld.const.u32 %r1, [%d1]; ld.const.u32 %r2, [primes+12]; ld.global.u32 %r3, [counter];
    cvta.const.u64 %d2, %d1; ld.u32 %r4, [%d2];
    mad.lo.u32 %r1, %r1, 100, %r2; mad.lo.u32 %r1, %r1, 100, %r3; mad.lo.u32 %r1, %r1, 10, %r4;
    mul.wide.u32 %d3, %lane, 4; add.u64 %d3, %a0, %d3; st.global.u32 [%d3], %r1;
    """
    with Device() as device:
        target = device.put(np.zeros(32, np.uint32))
        device.run(kernel_text(1, body, outside=outside), target)
        expected = [((p * 100 + 7) * 100 + 40) * 10 + p for p in (2, 3, 5, 7)] * 8
        assert device.get(target, 32, np.uint32).tolist() == expected


def test_addresses_go_to_generic_ones_and_back() -> None:
    body = """
    mov.u64 %d0, box; cvta.shared.u64 %d1, %d0; cvta.to.shared.u64 %d2, %d1; cvta.global.u64 %d3, %a0;
    setp.eq.u64 %p0, %d2, %d0; setp.eq.u64 %p1, %d3, %a0;
    selp.u32 %r0, 1, 0, %p0; selp.u32 %r1, 2, 0, %p1; add.u32 %r0, %r0, %r1; st.global.u32 [%a0], %r0;
    """
    with Device() as device:
        target = device.put(np.zeros(1, np.uint32))
        device.run(kernel_text(1, body, inside=".shared .b32 box[4];"), target, block=(1, 1, 1))
        assert device.get(target, 1, np.uint32)[0] == 1 + 2


def test_caches_change_nothing() -> None:
    body = """
    mov.u64 %d0, 0;
    ld.global.L1::evict_last.L2::cache_hint.L2::128B.u32 %r0, [%a0], %d0;
    ld.global.cg.u32 %r1, [%a0+4]; ld.global.nc.L1::no_allocate.v2.u32 {%r2, %r3}, [%a0+8];
    ld.relaxed.gpu.global.u32 %r4, [%a0]; ld.acquire.sys.u32 %r5, [%a0]; ld.volatile.global.u32 %r6, [%a0];
    ld.global.u32 %r7, [%a0];
    st.global.wt.u32 [%a1], %r0; st.global.L1::no_allocate.L2::cache_hint.u32 [%a1+4], %r1, %d0;
    st.relaxed.gpu.global.u32 [%a1+8], %r2; st.release.cta.u32 [%a1+12], %r3; st.volatile.global.u32 [%a1+16], %r7;
    """
    with Device() as device:
        source, target = device.put(np.arange(1, 5, dtype=np.uint32)), device.put(np.zeros(32, np.uint32))
        device.run(kernel_text(2, body), source, target, block=(1, 1, 1))
        assert device.get(target, 5, np.uint32).tolist() == [1, 2, 3, 4, 1]


# --- what must not be accessed ---

BOX = ".shared .align 16 .b8 first[64];\n.shared .align 16 .b8 second[64];"


def test_one_past_the_end_names_everything() -> None:
    body = """mov.u32 %r0, %tid.y; mad.lo.u32 %thread, %r0, 10, %thread;
mul.wide.u32 %d0, %thread, 4; add.u64 %d1, %a0, %d0;
st.global.u32 [%d1], %thread;"""
    with Device() as device:
        address = device.machine.allocate(4 * 99, label="logits")
        text = kernel_text(1, body)
        fault = device.fault(FaultKind.OUT_OF_BOUNDS, text, address, block=(10, 10, 1))
        assert fault.kernel == "k"
        assert fault.text == "st.global.u32 [%d1], %thread;"
        assert text.split("\n")[fault.line - 1] == fault.text
        assert (fault.block, fault.thread, fault.address) == ((0, 0, 0), (9, 9, 0), address + 396)
        message = str(fault)
        assert f"a store of 4 bytes at global address {address + 396:#x}" in message
        assert f"0 bytes past the end of allocation #1 (logits) of 396 bytes at {address:#x}" in message
        assert "kernel k, block (0, 0, 0), thread (9, 9, 0)" in message
        assert f"PTX line {fault.line}: st.global.u32 [%d1], %thread;" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ld.global.u32 %r0, [%a0+64];", "0 bytes past the end of allocation #1 of 64 bytes"),
        ("ld.global.u32 %r0, [%a0-4];", "4 bytes before allocation #1"),
        ("ld.global.u32 %r0, [%a0+300];", "past the end of allocation #1 of 64 bytes"),
        ("ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%a0+64];", "0 bytes past the end"),
        ("ld.global.u64 %d0, [%a1+56];", "whose byte 4 is at"),
        ("ld.u8 %r0, [0];", "the null page"),
        ("mov.b64 %d0, 0x123456789abc; ld.global.u8 %r0, [%d0];", "no device memory"),
        ("ld.shared.u32 %r0, [first+64];", "0 bytes past the end of shared variable first of 64 bytes"),
        ("st.shared.u32 [second-4], 1;", "4 bytes before shared variable second"),
        ("mov.u32 %r0, 0; ld.shared.u32 %r1, [%r0];", "before shared variable"),
        ("mov.u32 %r0, -4; st.shared.u32 [%r0], 1;", None),
        ("st.shared.u32 [999996], 1;", "past the end of shared variable"),
        ("ld.local.u32 %r0, [mine+16];", "local memory is smaller"),
    ],
)
def test_out_of_bounds(line: str, words: str | None) -> None:
    with Device() as device:
        places = [device.machine.allocate(size) for size in (64, 60)]
        for place, size in zip(places, (64, 60)):
            device.machine.fill(place, 1, size)
        inside = BOX + ".local .align 4 .b8 mine[16];"
        text = kernel_text(2, line, inside=inside)
        if words is None:  # an offset that is no address of this cluster
            with pytest.raises(EmulatorFault):
                device.run(text, *places, block=(1, 1, 1))
            return
        if "mine" in line:  # local memory is rounded up to 64 bytes
            text = text.replace("mine+16", "mine+64")
        fault = device.fault(FaultKind.OUT_OF_BOUNDS, text, *places, block=(1, 1, 1))
        assert words in str(fault)


def test_bytes_between_the_lanes_of_two_allocations() -> None:
    """A warp that runs from one allocation into the next finds the gap, and the first lane that is in it."""
    body = "mul.wide.u32 %d0, %lane, 64; add.u64 %d1, %a0, %d0; ld.global.u8 %r0, [%d1];"
    with Device() as device:
        first, _ = device.put(np.zeros(1000, np.uint8)), device.put(np.zeros(1000, np.uint8))
        fault = device.fault(FaultKind.OUT_OF_BOUNDS, kernel_text(1, body), first)
        assert fault.thread == (16, 0, 0)
        assert "24 bytes past the end of allocation #1" in str(fault)
        assert "bytes before allocation #2" in str(fault)


@pytest.mark.parametrize("size", [64, 3 << 20])
def test_use_after_free(size: int) -> None:
    with Device() as device:
        address = device.machine.allocate(size)
        device.machine.fill(address, 0, size)
        device.machine.free(address)
        text = kernel_text(1, f"ld.global.u32 %r0, [%a0+{size // 2}];")
        fault = device.fault(FaultKind.ACCESS_AFTER_FREE, text, address, block=(1, 1, 1))
        assert f"allocation #1 of {size:,} bytes" in str(fault)
        assert "has been freed" in str(fault)


@pytest.mark.parametrize(
    "line",
    ["ld.global.u32 %r0, [%a0+2];", "st.global.u16 [%a0+1], %h0;", "ld.shared.u64 %d0, [first+4];",
     "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%a0+8];", "st.global.v2.u8 [%a0+1], {%r0, %r1};"],
)  # fmt: skip
@pytest.mark.parametrize("checks", PATHS)
def test_misaligned(line: str, checks: Checks) -> None:
    with Device() as device:
        address = device.put(np.zeros(64, np.uint8))
        text = kernel_text(1, line, inside=BOX)
        fault = device.fault(FaultKind.MISALIGNED, text, address, block=(1, 1, 1), checks=checks)
        assert "which is no multiple of" in str(fault)


@pytest.mark.parametrize(
    ("line", "where"),
    [("ld.global.u32 %r0, [%a0+4];", "allocation #1"), ("ld.shared.u32 %r0, [first+8];", "shared variable first"),
     ("ld.local.u32 %r0, [mine];", "local"), ("ld.global.v2.u32 {%r0, %r1}, [%a0];", "whose byte 4")],
)  # fmt: skip
def test_reading_what_nothing_wrote(line: str, where: str) -> None:
    body = f"st.global.u32 [%a0], 1; st.shared.u32 [first], 1;\n{line}"
    with Device() as device:
        address = device.machine.allocate(64)
        text = kernel_text(1, body, inside=BOX + ".local .align 4 .b8 mine[16];")
        fault = device.fault(FaultKind.UNINITIALIZED, text, address, block=(1, 1, 1))
        assert fault.text == line
        assert where in str(fault)
        assert "which nothing has written" in str(fault)
        device.run(text, address, block=(1, 1, 1), checks=Checks.MEMORY)


def test_shared_memory_is_new_in_each_block() -> None:
    body = """setp.ne.u32 %p0, %block, 0; @%p0 bra second;
    st.shared.u32 [first], 1;
    second:
    ld.shared.u32 %r0, [first];"""
    with Device() as device:
        fault = device.fault(FaultKind.UNINITIALIZED, kernel_text(0, body, inside=BOX), grid=(2, 1, 1), block=(1, 1, 1))
        assert fault.block == (1, 0, 0)


def test_a_generic_address_given_to_one_space() -> None:
    body = "mov.u64 %d0, first; cvta.shared.u64 %d1, %d0; st.shared.u32 [first], 1; ld.global.u32 %r0, [%d1];"
    with Device() as device:
        device.fault(FaultKind.WRONG_SPACE, kernel_text(0, body, inside=BOX), block=(1, 1, 1))
        device.fault(
            FaultKind.OUT_OF_BOUNDS, kernel_text(1, "ld.shared.u32 %r0, [%a0];"), device.put(np.zeros(4)),
            block=(1, 1, 1),
        )  # fmt: skip


def test_memory_of_other_devices() -> None:
    machines = [Machine(1 << 20, index=index) for index in range(2)]
    connect(machines)
    text = kernel_text(2, "ld.global.u32 %r0, [%a0]; add.u32 %r0, %r0, 1; st.global.u32 [%a1], %r0;")
    kernel = load(text).kernel("k")

    def go(source: int, target: int) -> None:
        parameters = np.array([source, target], np.uint64).tobytes()
        launch(kernel, machines[0], (1, 1, 1), (1, 1, 1), 0, parameters, checks=Checks.ALL)

    target, device_memory = machines[0].allocate(4), machines[1].allocate(4)
    pinned = machines[1].allocate(4, is_host=True)
    for address in (device_memory, pinned):
        machines[1].write(address, (41).to_bytes(4, "little"))
    go(pinned, target)
    assert machines[0].read(target, 4) == (42).to_bytes(4, "little")
    with pytest.raises(EmulatorFault, match="on device 1, whose memory device 0 has no peer access to") as caught:
        go(device_memory, target)
    assert caught.value.kind == FaultKind.NO_PEER_ACCESS
    machines[0].enable_peer(machines[1])
    go(device_memory, pinned)
    assert machines[1].read(pinned, 4) == (42).to_bytes(4, "little")
    with pytest.raises(EmulatorFault, match="on device 1") as caught:
        go(device_memory + 4, target)
    assert caught.value.kind == FaultKind.OUT_OF_BOUNDS


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ld.global.wild.u32 %r0, [%a0];", "wild"),
        ("ld.relaxed.global.u32 %r0, [%a0];", "scope"),
        ("ld.global.v2.u32 {%r0, %r1, %r2, %r3}, [%a0];", "4 registers for 2 elements"),
        ("st.const.u32 [%a0], %r0;", "space"),
        ("ld.param.u64 %d0, [p0+4];", "of a parameter of 8"),
        ("ld.param.u32 %r0, [nothing];", "nothing"),
        ("st.global.v8.u8 [%a0], {%r0,%r1,%r2,%r3,%r4,%r5,%r6,%r7};", "v8"),
        ("cvta.shared.u32 %r0, %r1;", "64-bit"),
    ],
)
def test_what_is_not_understood_is_refused(line: str, why: str) -> None:
    with Device() as device, pytest.raises(UnsupportedInstruction, match=why):
        device.run(kernel_text(1, line), device.machine.allocate(64))
