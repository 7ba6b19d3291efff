"""The race checker: what is a race is named, with both sides; what is ordered is not blamed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks
from runtime.emulator.races.clocks import TABLE_LIMIT
from tests.runtime.emulator.memory_harness import Device, kernel_text

SEEDS = [0, 1, 2, 3]
BOX = ".shared .align 16 .b8 box[4096];"
AT = "mov.u32 %r60, box; shl.b32 %r61, %thread, 2; add.u32 %r62, %r60, %r61;\n"
"""%r62: the thread's own word of the box, %r60 the box."""

EXCHANGE = f"""{AT}
st.shared.u32 [%r62], %thread;
{{barrier}}
xor.b32 %r0, %r61, {{flip}}; add.u32 %r0, %r60, %r0;
ld.shared.u32 %r1, [%r0];
{{after}}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_barrier_is_named(seed: int) -> None:
    """Warp 0 writes and warp 1 reads, in whichever order: one or the other is blamed, with the other side's name."""
    body = f"""{AT}
    st.shared.u32 [%r62], 7; bar.sync 0;
    setp.ge.u32 %p0, %thread, 32; @%p0 bra reader;
    st.shared.u32 [%r62], %thread;
    bra done;
    reader:
    ld.shared.u32 %r1, [%r62+-128];"""
    text = kernel_text(0, body, inside=BOX)
    with Device() as device, pytest.raises(EmulatorFault) as caught:
        device.run(text, block=(64, 1, 1), seed=seed)
    fault, message = caught.value, str(caught.value)
    if fault.kind == FaultKind.RACE_READ_AFTER_WRITE:
        assert (fault.text.strip(), fault.thread) == ("ld.shared.u32 %r1, [%r62+-128];", (32, 0, 0))
        assert "which thread (0, 0, 0) of block (0, 0, 0) has written" in message
    else:
        assert fault.kind == FaultKind.RACE_WRITE_AFTER_READ
        assert (fault.text.strip(), fault.thread) == ("st.shared.u32 [%r62], %thread;", (0, 0, 0))
        assert "which warp 1 of block (0, 0, 0) has read" in message
    assert "0 bytes into shared variable box" in message


def test_both_sides_of_a_missing_barrier_are_seen() -> None:
    kinds = set()
    body = f"""{AT}
    st.shared.u32 [%r62], 7; bar.sync 0;
    setp.ge.u32 %p0, %thread, 32; @%p0 bra reader;
    {{first}} st.shared.u32 [%r62], %thread;
    bra done;
    reader:
    {{second}} ld.shared.u32 %r1, [%r62+-128];"""
    nap = "nanosleep.u32 100; nanosleep.u32 100;"
    with Device() as device:
        for pieces in ({"first": nap, "second": ""}, {"first": "", "second": nap}):
            with pytest.raises(EmulatorFault) as caught:
                device.run(kernel_text(0, body.format(**pieces), inside=BOX), block=(64, 1, 1))
            kinds.add(caught.value.kind)
    assert kinds == {FaultKind.RACE_READ_AFTER_WRITE, FaultKind.RACE_WRITE_AFTER_READ}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_second_barrier_is_named(seed: int) -> None:
    """The classic one: the tile is overwritten while another warp may still read it."""
    after = "st.shared.u32 [%r62], %r1;"
    barrier = "bar.sync 0;"
    with Device() as device:
        text = kernel_text(0, EXCHANGE.format(barrier=barrier, flip=128, after=after), inside=BOX)
        for block in (64, 256):
            with pytest.raises(EmulatorFault, match="a race: this") as caught:
                device.run(text, block=(block, 1, 1), seed=seed)
            assert caught.value.kind in (FaultKind.RACE_WRITE_AFTER_READ, FaultKind.RACE_READ_AFTER_WRITE)
        text = kernel_text(0, EXCHANGE.format(barrier=barrier, flip=128, after=barrier + after), inside=BOX)
        device.run(text, block=(64, 1, 1), seed=seed)
        device.run(text, block=(256, 1, 1), seed=seed)


def test_barriers_order_a_loop_of_tiles() -> None:
    """Two barriers a round, many rounds, every warp reading what every other wrote."""
    body = f"""{AT}
    mov.u32 %r10, 0; mov.u32 %r12, 0;
    loop:
    add.u32 %r11, %r10, %thread; st.shared.u32 [%r62], %r11;
    bar.sync 0;
    mov.u32 %r13, 0;
    inner:
    shl.b32 %r14, %r13, 7; add.u32 %r14, %r14, %r60; ld.shared.u32 %r15, [%r14]; add.u32 %r12, %r12, %r15;
    add.u32 %r13, %r13, 1; setp.lt.u32 %p0, %r13, 4; @%p0 bra inner;
    bar.sync 0;
    add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 20; @%p1 bra loop;
    mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %a0, %d0; st.global.u32 [%d0], %r12;
    """
    with Device() as device:
        target = device.put(np.zeros(128, np.uint32))
        for seed in SEEDS:
            device.run(kernel_text(1, body, inside=BOX), target, block=(128, 1, 1), seed=seed)
            expected = sum(step + 32 * warp for step in range(20) for warp in range(4))
            assert device.get(target, 128, np.uint32).tolist() == [expected] * 128


def test_threads_may_use_halves_of_one_word() -> None:
    """16-bit stores of two warps to one word, each warp reading its own half: no race, and a race one half further."""
    body = f"""
    shr.u32 %r0, %thread, 5; shl.b32 %r1, %lane, 2; shl.b32 %r2, %r0, 1; add.u32 %r1, %r1, %r2;
    mov.u32 %r60, box; add.u32 %r1, %r1, %r60;
    cvt.u16.u32 %h0, %thread; st.shared.u16 [%r1], %h0; ld.shared.u16 %h1, [%r1{{shift}}];
    {AT}"""
    with Device() as device:
        for seed in SEEDS:
            device.run(kernel_text(0, body.format(shift=""), inside=BOX), block=(64, 1, 1), seed=seed)
        text = kernel_text(0, body.format(shift="+2").replace("st.shared", "@!%p9 st.shared"), inside=BOX)
        text = text.replace("mov.u32 %lane", "setp.ne.u32 %p9, 0, 0; mov.u32 %lane")
        with pytest.raises(EmulatorFault, match=r"a race|nothing has written"):
            device.run(text, block=(64, 1, 1))


def test_writes_of_the_same_value_are_no_race() -> None:
    body = "st.shared.u32 [box], 7; st.shared.u32 [box+4], {value}; "
    with Device() as device:
        device.run(kernel_text(0, body.format(value=9), inside=BOX), block=(128, 1, 1))
        fault = device.fault(
            FaultKind.RACE_WRITE_AFTER_WRITE,
            kernel_text(0, "shr.u32 %r0, %thread, 5;" + body.format(value="%r0"), inside=BOX), block=(128, 1, 1),
        )  # fmt: skip
        assert "another value" in str(fault)


WRITES = {
    # Each writes %r0 to the whole box, or what %a0 has for the warp; %r9 is the box, %d0 the warp's own row there.
    "stmatrix": "shl.b32 %r1, %lane, 4; add.u32 %r1, %r1, %r9;"
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r0, %r0, %r0, %r0};",
    "stmatrix.trans": "shl.b32 %r1, %lane, 4; add.u32 %r1, %r1, %r9;"
    "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r1], {%r0};",
    "st and stmatrix": "shl.b32 %r1, %lane, 4; add.u32 %r1, %r1, %r9; setp.ge.u32 %p0, %thread, 32; @%p0 bra other;"
    "st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0}; bra done; other:"
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r0, %r0, %r0, %r0};",
    "cp.async": "setp.ne.u32 %p0, %lane, 0; @%p0 bra done;"
    "cp.async.cg.shared.global [box], [%d0], 16; cp.async.wait_all;",
    "cp.async of less": "setp.ne.u32 %p0, %lane, 0; @%p0 bra done;"
    "cp.async.cg.shared.global [box], [%d0], 16, 4; cp.async.wait_all;",
    "bulk load": "setp.ne.u32 %p0, %lane, 0; @%p0 bra done; shl.b32 %r2, %r3, 3; mov.u32 %r4, bar;"
    "add.u32 %r2, %r2, %r4; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;"
    "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16; fence.proxy.async;"
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [box], [%d0], 16, [%r2];"
    "wait: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra wait;",
    "bulk store": "setp.ne.u32 %p0, %lane, 0; @%p0 bra done; shl.b32 %r2, %r3, 4; add.u32 %r2, %r2, %r9;"
    "st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0}; fence.proxy.async;"
    "cp.async.bulk.global.shared::cta.bulk_group [%a1], [%r2], 16; cp.async.bulk.commit_group;"
    "cp.async.bulk.wait_group 0;",
}


@pytest.mark.parametrize("how", WRITES)
def test_every_instruction_may_write_the_same_value_twice(how: str) -> None:
    """`st.shared`'s rule, whichever instruction of two warps writes."""
    start = (
        "mov.u32 %r9, box; shr.u32 %r3, %thread, 5; {value} mul.wide.u32 %d0, %r3, 16; add.u64 %d0, %a0, %d0;"
        + WRITES[how].replace("{", "{{").replace("}", "}}")
    )
    inside = BOX + ".shared .align 8 .b64 bar[4];"
    with Device() as device:
        for value, rows, races in (
            ("mov.u32 %r0, 7;", [[7] * 4] * 2, False), ("mov.u32 %r0, %r3;", [[1] * 4, [2] * 4], True),
        ):  # fmt: skip
            source, target = device.put(np.array(rows, np.uint32)), device.put(np.zeros(4, np.uint32))
            text = kernel_text(2, start.format(value=value), inside=inside)
            if races:
                fault = device.fault(FaultKind.RACE_WRITE_AFTER_WRITE, text, source, target, block=(64, 1, 1))
                assert "another value" in str(fault)
            else:
                device.run(text, source, target, block=(64, 1, 1))


def test_rows_of_one_stmatrix_that_differ() -> None:
    body = "mov.u32 %r9, box; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {{{value}}};"
    with Device() as device:
        device.run(kernel_text(0, body.format(value="%r0").replace("stm", "mov.u32 %r0, 5; stm"), inside=BOX))
        text = kernel_text(0, body.format(value="%lane"), inside=BOX)
        fault = device.fault(FaultKind.LANES_DIFFER, text)
        assert "0 bytes into shared variable box" in str(fault)


def test_lanes_of_one_store_that_differ() -> None:
    with Device() as device:
        text = kernel_text(0, "st.shared.u32 [box+8], %lane;", inside=BOX)
        fault = device.fault(FaultKind.LANES_DIFFER, text, block=(32, 1, 1))
        assert "8 bytes into shared variable box" in str(fault)
        target = device.put(np.zeros(4, np.uint32))
        fault = device.fault(FaultKind.LANES_DIFFER, kernel_text(1, "st.global.u32 [%a0+4], %lane;"), target)
        assert "4 bytes into allocation #1" in str(fault)
        device.run(kernel_text(1, "st.global.u32 [%a0+4], 3;"), target)


def test_within_a_warp() -> None:
    """Lanes do not run in step: what another lane wrote needs bar.warp.sync."""
    with Device() as device:
        text = kernel_text(0, EXCHANGE.format(barrier="", flip=4, after=""), inside=BOX)
        fault = device.fault(FaultKind.RACE_WITHIN_WARP, text)
        assert "with no bar.warp.sync" in str(fault)
        for barrier in ("bar.warp.sync -1;", "bar.sync 0;"):
            device.run(kernel_text(0, EXCHANGE.format(barrier=barrier, flip=4, after=""), inside=BOX))
        volatile = EXCHANGE.replace(".shared.u32", ".volatile.shared.u32")
        device.run(kernel_text(0, volatile.format(barrier="", flip=4, after=""), inside=BOX))
        own = EXCHANGE.format(barrier="", flip=0, after="")
        device.run(kernel_text(0, own, inside=BOX))


# --- named barriers ---

PRODUCER_CONSUMER = """
setp.ge.u32 %p0, %thread, 64; and.b32 %r20, %thread, 63;
mov.u32 %r60, box; shl.b32 %r61, %r20, 2; add.u32 %r62, %r60, %r61;
mov.u32 %r10, 0; mov.u32 %r12, 0;
@%p0 bra consumer;
producer:
bar.sync 2, 128;
mad.lo.u32 %r11, %r10, 1000, %r20; st.shared.u32 [%r62], %r11;
bar.arrive 1, 128;
add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 8; @%p1 bra producer;
bra done;
consumer:
{signal_first}
bar.sync 1, 128;
{signal_early}
xor.b32 %r13, %r61, 128; add.u32 %r13, %r13, %r60; ld.shared.u32 %r14, [%r13]; add.u32 %r12, %r12, %r14;
add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 8; @%p1 bra consumer_next;
mul.wide.u32 %d0, %r20, 4; add.u64 %d0, %a0, %d0; st.global.u32 [%d0], %r12;
bra done;
consumer_next:
bra consumer;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_producers_and_consumers(seed: int) -> None:
    """Two warps fill a buffer, two drain it, by a full and an empty barrier; called empty too early, it is a race."""
    body = PRODUCER_CONSUMER.format(signal_first="bar.arrive 2, 128;", signal_early="")
    with Device() as device:
        target = device.put(np.zeros(64, np.uint32))
        device.run(kernel_text(1, body, inside=BOX), target, block=(128, 1, 1), seed=seed)
        expected = [sum(1000 * step for step in range(8)) + 8 * (index ^ 32) for index in range(64)]
        assert device.get(target, 64, np.uint32).tolist() == expected
        early = PRODUCER_CONSUMER.format(
            signal_first="setp.ne.u32 %p2, %r10, 0; @%p2 bra begun; bar.arrive 2, 128;\nbegun:",
            signal_early="bar.arrive 2, 128;",
        )
        with pytest.raises(EmulatorFault, match="a race: this") as caught:
            device.run(kernel_text(1, early, inside=BOX), target, block=(128, 1, 1), seed=seed)
        assert caught.value.kind in (FaultKind.RACE_WRITE_AFTER_READ, FaultKind.RACE_READ_AFTER_WRITE)


def test_a_barrier_of_some_warps_orders_only_those() -> None:
    """Warps 0 and 1 meet at barrier 1; warp 2 has not, and reads what warp 0 wrote."""
    body = f"""{AT}
    setp.lt.u32 %p0, %thread, 64;
    st.shared.u32 [%r62], %thread;
    @!%p0 bra others;
    bar.sync 1, 64;
    xor.b32 %r0, %r61, 128; add.u32 %r0, %r0, %r60; ld.shared.u32 %r1, [%r0];
    bra done;
    others:
    nanosleep.u32 100; nanosleep.u32 100; nanosleep.u32 100;
    and.b32 %r0, %r61, 127; add.u32 %r0, %r0, %r60;
    {{read}}
    """
    with Device() as device:
        device.run(kernel_text(0, body.format(read=""), inside=BOX), block=(96, 1, 1))
        text = kernel_text(0, body.format(read="ld.shared.u32 %r1, [%r0];"), inside=BOX)
        fault = device.fault(FaultKind.RACE_READ_AFTER_WRITE, text, block=(96, 1, 1))
        assert fault.thread[0] >= 64


# --- device memory ---

REDUCTION = """
mov.u32 %r0, %ntid.x; mad.lo.u32 %r1, %block, %r0, %thread;
mul.wide.u32 %d0, %r1, 4; add.u64 %d1, %a0, %d0; add.u64 %d2, %a1, %d0;
ld.global.u32 %r2, [%d1]; add.u32 %r2, %r2, 1; st.global.u32 [%d2], %r2;
{fence}
{barrier}
setp.ne.u32 %p0, %thread, 0;
@%p0 bra wait;
mov.u32 %r3, %nctaid.x; sub.u32 %r3, %r3, 1;
{atomic}
st.shared.u32 [box], %r4;
wait:
bar.sync 0;
ld.shared.u32 %r4, [box];
mov.u32 %r3, %nctaid.x; sub.u32 %r3, %r3, 1;
setp.ne.u32 %p1, %r4, %r3;
@%p1 bra done;
mul.lo.u32 %r5, %r0, %r3; add.u32 %r5, %r5, %r0; mov.u32 %r6, %thread; mov.u32 %r7, 0;
sum:
mul.wide.u32 %d3, %r6, 4; add.u64 %d3, %a1, %d3; ld.global.u32 %r8, [%d3]; add.u32 %r7, %r7, %r8;
add.u32 %r6, %r6, %r0; setp.lt.u32 %p2, %r6, %r5; @%p2 bra sum;
mul.wide.u32 %d4, %thread, 4; add.u64 %d4, %a3, %d4; st.global.u32 [%d4], %r7;
"""
FENCE = "membar.gl;"
ATOMIC = "atom.global.add.u32 %r4, [%a2], 1;"


def _reduce(device: Device, threads: int, blocks: int, seed: int, **pieces: str) -> None:
    data = np.arange(threads * blocks, dtype=np.uint32)
    source, partial = device.put(data), device.machine.allocate(data.nbytes)
    counter, target = device.put(np.zeros(1, np.uint32)), device.put(np.zeros(threads, np.uint32))
    text = kernel_text(4, REDUCTION.format(**pieces), inside=BOX)
    device.run(text, source, partial, counter, target, grid=(blocks, 1, 1), block=(threads, 1, 1), seed=seed)
    result = device.get(target, threads, np.uint32)
    np.testing.assert_array_equal(result, (data + 1).reshape(blocks, threads).sum(0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "pieces",
    [
        {"fence": FENCE, "barrier": "bar.sync 0;", "atomic": ATOMIC},
        {"fence": "fence.acq_rel.gpu;", "barrier": "bar.sync 0;", "atomic": ATOMIC.replace("atom", "atom.relaxed.gpu")},
        {"fence": "", "barrier": "bar.sync 0;", "atomic": FENCE + ATOMIC},
        {"fence": "", "barrier": "bar.sync 0;", "atomic": ATOMIC.replace("atom.", "atom.acq_rel.gpu.")},
        {"fence": "", "barrier": "bar.sync 0;", "atomic": ATOMIC.replace("atom.", "atom.release.sys.")},
    ],
    ids=["membar", "fence", "thread 0's fence", "acq_rel", "release"],
)  # fmt: skip
def test_the_last_block_adds_up_what_all_wrote(seed: int, pieces: dict[str, str]) -> None:
    with Device() as device:
        _reduce(device, 64, 6, seed, **pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        {"fence": "", "barrier": "bar.sync 0;", "atomic": ATOMIC},
        {"fence": "membar.cta;", "barrier": "bar.sync 0;", "atomic": ATOMIC},
        {"fence": "", "barrier": "", "atomic": FENCE + ATOMIC},
        {"fence": "", "barrier": "bar.sync 0;", "atomic": ATOMIC.replace("atom.", "atom.acq_rel.cta.")},
        {"fence": "", "barrier": "bar.sync 0;", "atomic": ATOMIC + FENCE},
    ],
    ids=["no fence", "fence of the block alone", "no barrier before the fence", "scope of the block", "too late"],
)
def test_a_reduction_without_order_is_named(pieces: dict[str, str]) -> None:
    with Device() as device, pytest.raises(EmulatorFault, match="a race: this reads") as caught:
        _reduce(device, 64, 6, 0, **pieces)
    assert caught.value.kind == FaultKind.RACE_READ_AFTER_WRITE
    assert caught.value.text.startswith("mul.wide.u32 %d3")
    assert re.search(r"which thread \(\d+, 0, 0\) of block \(\d, 0, 0\) has written", str(caught.value))


FLAG = """
setp.ne.u32 %p0, %block, 0; setp.ne.u32 %p1, %thread, 0;
mul.wide.u32 %d0, %thread, 4; add.u64 %d1, %a0, %d0; add.u64 %d2, %a2, %d0;
@%p0 bra reader;
st.global.u32 [%d1], %thread;
bar.sync 0;
@%p1 bra done;
{publish}
bra done;
reader:
@%p1 bra together;
poll:
{poll}
setp.eq.u32 %p2, %r0, 0; @%p2 bra poll;
{acquired}
together:
{barrier}
ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("publish", "poll", "acquired"),
    [
        ("membar.gl; st.volatile.global.u32 [%a1], 1;", "ld.volatile.global.u32 %r0, [%a1];", "membar.gl;"),
        ("st.release.gpu.global.u32 [%a1], 1;", "ld.acquire.gpu.global.u32 %r0, [%a1];", ""),
        ("membar.gl; red.global.add.u32 [%a1], 1;", "atom.global.or.b32 %r0, [%a1], 0;", "membar.gl;"),
        ("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%a1], 1;", "ld.relaxed.sys.global.u32 %r0, [%a1];",
         "fence.acq_rel.gpu;"),
    ],
    ids=["volatile", "release and acquire", "atomics", "relaxed"],
)  # fmt: skip
def test_a_flag_hands_data_to_another_block(publish: str, poll: str, acquired: str, seed: int) -> None:
    with Device() as device:
        data, flag = device.machine.allocate(256), device.put(np.zeros(1, np.uint32))
        target = device.put(np.zeros(64, np.uint32))
        pieces = {"publish": publish, "poll": poll, "acquired": acquired}
        text = kernel_text(3, FLAG.format(barrier="bar.sync 0;", **pieces))
        device.run(text, data, flag, target, grid=(2, 1, 1), block=(64, 1, 1), seed=seed)
        assert device.get(target, 64, np.uint32).tolist() == [*range(64)]


def test_only_the_polling_warp_has_acquired() -> None:
    """Without a barrier after thread 0's polling the other warp reads unordered."""
    pieces = {
        "publish": "membar.gl; st.volatile.global.u32 [%a1], 1;", "poll": "ld.volatile.global.u32 %r0, [%a1];",
        "acquired": "membar.gl;",
    }  # fmt: skip
    with Device() as device:
        data, flag = device.machine.allocate(256), device.put(np.zeros(1, np.uint32))
        target = device.put(np.zeros(64, np.uint32))
        text = kernel_text(3, FLAG.format(barrier="", **pieces))
        with pytest.raises(EmulatorFault, match=r"a race|nothing has written") as caught:
            device.run(text, data, flag, target, grid=(2, 1, 1), block=(64, 1, 1))
        assert caught.value.kind in (FaultKind.RACE_READ_AFTER_WRITE, FaultKind.UNINITIALIZED)


def test_blocks_that_write_one_place() -> None:
    with Device() as device:
        target = device.put(np.zeros(4, np.uint32))
        fault = device.fault(
            FaultKind.RACE_WRITE_AFTER_WRITE, kernel_text(1, "st.global.u32 [%a0+4], %block;"), target,
            grid=(3, 1, 1), block=(1, 1, 1),
        )  # fmt: skip
        assert fault.block == (1, 0, 0)
        assert "which thread (0, 0, 0) of block (0, 0, 0) has written another value to" in str(fault)
        device.run(kernel_text(1, "st.global.u32 [%a0+4], 9;"), target, grid=(3, 1, 1), block=(1, 1, 1))
        device.run(kernel_text(1, "st.volatile.global.u32 [%a0+4], %block;"), target, grid=(3, 1, 1), block=(1, 1, 1))


def test_a_write_after_another_blocks_read() -> None:
    body = """setp.eq.u32 %p0, %block, 0; @%p0 bra first;
    st.global.u32 [%a0], 5; bra done;
    first: ld.global.u32 %r0, [%a0];"""
    with Device() as device:
        target = device.put(np.zeros(1, np.uint32))
        fault = device.fault(
            FaultKind.RACE_WRITE_AFTER_READ, kernel_text(1, body), target, grid=(2, 1, 1), block=(1, 1, 1)
        )
        assert "warp 0 of block (0, 0, 0) has read" in str(fault)


def test_threads_of_one_block_race_in_device_memory_too() -> None:
    body = """mul.wide.u32 %d0, %thread, 4; add.u64 %d1, %a0, %d0; xor.b64 %d2, %d1, 128;
    st.global.u32 [%d1], %thread; {barrier} ld.global.u32 %r0, [%d2];"""
    with Device() as device:
        target = device.machine.allocate(256)
        device.run(kernel_text(1, body.format(barrier="bar.sync 0;")), target, block=(64, 1, 1))
        device.fault(FaultKind.RACE_READ_AFTER_WRITE, kernel_text(1, body.format(barrier="")), target, block=(64, 1, 1))


def test_launches_are_ordered() -> None:
    """What one launch wrote, the next may read and overwrite: also by other blocks."""
    write = """mov.u32 %r0, %nctaid.x; sub.u32 %r0, %r0, %block; mul.wide.u32 %d0, %block, 4; add.u64 %d0, %a0, %d0;
    st.global.u32 [%d0], %r0;"""
    shift = """add.u32 %r0, %block, 1; rem.u32 %r0, %r0, 7; mul.wide.u32 %d0, %r0, 4; add.u64 %d1, %a0, %d0;
    mul.wide.u32 %d2, %block, 4; add.u64 %d3, %a1, %d2; ld.global.nc.u32 %r1, [%d1]; st.global.u32 [%d3], %r1;"""
    with Device() as device:
        first, second = device.machine.allocate(28), device.machine.allocate(28)
        for _ in range(3):
            device.run(kernel_text(1, write), first, grid=(7, 1, 1), block=(1, 1, 1))
            device.run(kernel_text(2, shift), first, second, grid=(7, 1, 1), block=(1, 1, 1))
            device.run(kernel_text(2, shift), second, first, grid=(7, 1, 1), block=(1, 1, 1))
        assert device.get(first, 7, np.uint32).tolist() == [5, 4, 3, 2, 1, 7, 6]


def test_nc_loads_of_what_the_launch_writes() -> None:
    body = "st.global.u32 [%a0], 1; bar.sync 0;\nld.global.nc.u32 %r0, [%a0];"
    with Device() as device:
        target = device.put(np.zeros(1, np.uint32))
        fault = device.fault(FaultKind.NC_WRITTEN, kernel_text(1, body), target, block=(1, 1, 1))
        assert fault.text == "ld.global.nc.u32 %r0, [%a0];"
        assert "thread (0, 0, 0) of block (0, 0, 0) has written in this launch" in str(fault)


def test_histograms_by_atomics() -> None:
    """Atomics on many addresses by all blocks, after a fence that makes each of them publish."""
    num_bins = TABLE_LIMIT + 1000
    body = f"""mov.u32 %r0, %ntid.x; mad.lo.u32 %r1, %block, %r0, %thread; membar.gl;
    mov.u32 %r2, 0;
    loop:
    mad.lo.u32 %r3, %r1, 31, %r2; mul.lo.u32 %r3, %r3, 7; rem.u32 %r3, %r3, {num_bins};
    mul.wide.u32 %d0, %r3, 4; add.u64 %d0, %a0, %d0; red.global.add.u32 [%d0], 1;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p0, %r2, 31; @%p0 bra loop;"""
    with Device() as device:
        bins = device.put(np.zeros(num_bins, np.uint32))
        device.run(kernel_text(1, body), bins, grid=(10, 1, 1), block=(64, 1, 1))
        thread, step = np.meshgrid(np.arange(640), np.arange(31))
        expected = np.bincount(((thread * 31 + step) * 7 % num_bins).ravel(), minlength=num_bins)
        np.testing.assert_array_equal(device.get(bins, num_bins, np.uint32), expected)


def test_plain_reads_of_a_counter_that_others_add_to() -> None:
    body = "red.global.add.u32 [%a0], 1; {read}"
    with Device() as device:
        counter = device.put(np.zeros(1, np.uint32))
        device.run(kernel_text(1, body.format(read="ld.relaxed.gpu.global.u32 %r0, [%a0];")), counter, grid=(4, 1, 1))
        device.fault(
            FaultKind.RACE_WRITE_AFTER_READ, kernel_text(1, body.format(read="ld.global.u32 %r0, [%a0];")), counter,
            grid=(4, 1, 1),
        )  # fmt: skip


def test_clocks_do_not_remember_blocks_that_are_gone() -> None:
    """Hundreds of blocks in the same place, each with its own shared memory and its own part of the output."""
    body = (
        EXCHANGE.format(barrier="bar.sync 0;", flip=128, after="")
        + """
    mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %block, %r2, %thread; mul.wide.u32 %d0, %r3, 4; add.u64 %d0, %a0, %d0;
    st.global.u32 [%d0], %r1;"""
    )
    with Device() as device:
        target = device.machine.allocate(4 * 64 * 300)
        text = kernel_text(1, body, inside=BOX)
        for checks in (Checks.ALL, Checks.RACES):
            device.run(text, target, grid=(300, 1, 1), block=(64, 1, 1), checks=checks)
        result = device.get(target, (300, 64), np.uint32)
        np.testing.assert_array_equal(result, np.broadcast_to(np.arange(64) ^ 32, (300, 64)))


DOUBLE_BUFFER = f"""{AT}
mov.u32 %r10, 0; mov.u32 %r12, 0;
loop:
and.b32 %r11, %r10, {{buffers}}; shl.b32 %r11, %r11, 9;
add.u32 %r13, %r10, %thread; add.u32 %r14, %r62, %r11; st.shared.u32 [%r14], %r13;
bar.sync 0;
xor.b32 %r15, %r61, 384; add.u32 %r15, %r15, %r60; add.u32 %r15, %r15, %r11;
ld.shared.u32 %r16, [%r15]; add.u32 %r12, %r12, %r16;
add.u32 %r10, %r10, 1; setp.lt.u32 %p0, %r10, 9; @%p0 bra loop;
mul.wide.u32 %d0, %thread, 4; add.u64 %d0, %a0, %d0; st.global.u32 [%d0], %r12;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_two_buffers_need_one_barrier_a_round(seed: int) -> None:
    with Device() as device:
        target = device.put(np.zeros(128, np.uint32))
        device.run(kernel_text(1, DOUBLE_BUFFER.format(buffers=1), inside=BOX), target, block=(128, 1, 1), seed=seed)
        expected = [sum(range(9)) + 9 * (thread ^ 96) for thread in range(128)]
        assert device.get(target, 128, np.uint32).tolist() == expected
        text = kernel_text(1, DOUBLE_BUFFER.format(buffers=0), inside=BOX)
        with pytest.raises(EmulatorFault, match="a race: this"):
            device.run(text, target, block=(128, 1, 1), seed=seed)


# --- clusters and mbarriers ---

CLUSTER = f"""{AT}
mov.u32 %r0, %cluster_ctarank; shl.b32 %r1, %r0, 8; add.u32 %r1, %r1, %thread; st.shared.u32 [%r62], %r1;
{{first}}
xor.b32 %r2, %r0, 1; mapa.shared::cluster.u32 %r3, %r62, %r2;
ld.shared::cluster.u32 %r4, [%r3];
{{second}}
mad.lo.u32 %r5, %block, 64, %thread; mul.wide.u32 %d0, %r5, 4; add.u64 %d0, %a0, %d0; st.global.u32 [%d0], %r4;
"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_a_cluster_meet(seed: int) -> None:
    options = {"grid": (8, 1, 1), "block": (64, 1, 1), "cluster": (2, 1, 1), "seed": seed}
    with Device() as device:
        target = device.put(np.zeros(512, np.uint32))
        device.run(kernel_text(1, CLUSTER.format(first=MEET, second=MEET), inside=BOX), target, **options)  # type: ignore[arg-type]
        expected = [((block & 1) ^ 1) * 256 + thread for block in range(8) for thread in range(64)]
        assert device.get(target, 512, np.uint32).tolist() == expected
        text = kernel_text(1, CLUSTER.format(first="bar.sync 0;", second=MEET), inside=BOX)
        with pytest.raises(EmulatorFault) as caught:
            device.run(text, target, **options)  # type: ignore[arg-type]
        assert caught.value.kind in (
            FaultKind.RACE_READ_AFTER_WRITE, FaultKind.RACE_WRITE_AFTER_READ, FaultKind.UNINITIALIZED,
        )  # fmt: skip


MEET_RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"


@pytest.mark.parametrize(
    ("fence", "is_enough"),
    [
        ("", False), ("fence.acq_rel.cluster;", True), ("fence.release.sync_restrict::shared::cta.cluster;", True),
        ("fence.mbarrier_init.release.cluster;", False),
    ],
)  # fmt: skip
def test_a_relaxed_arrival_shows_what_a_fence_has_covered(fence: str, is_enough: bool) -> None:
    options = {"grid": (8, 1, 1), "block": (64, 1, 1), "cluster": (2, 1, 1)}
    with Device() as device:
        target = device.put(np.zeros(512, np.uint32))
        text = kernel_text(1, CLUSTER.format(first=fence + MEET_RELAXED, second=MEET), inside=BOX)
        if not is_enough:
            with pytest.raises(EmulatorFault) as caught:
                device.run(text, target, **options)  # type: ignore[arg-type]
            assert caught.value.kind == FaultKind.RACE_READ_AFTER_WRITE
            return
        device.run(text, target, **options)  # type: ignore[arg-type]
        expected = [((block & 1) ^ 1) * 256 + thread for block in range(8) for thread in range(64)]
        assert device.get(target, 512, np.uint32).tolist() == expected
        text = kernel_text(1, CLUSTER.format(first=MEET_RELAXED + fence, second=MEET), inside=BOX)  # too late
        with pytest.raises(EmulatorFault, match="a race: this reads"):
            device.run(text, target, **options)  # type: ignore[arg-type]


MBARRIER = """
setp.ne.u32 %p0, %thread, 0; mov.u32 %r59, barrier;
@%p0 bra ready;
mbarrier.init.shared::cta.b64 [%r59], 64; mbarrier.init.shared::cta.b64 [%r59+8], 64;
ready:
bar.sync 0;
setp.ge.u32 %p1, %thread, 64; and.b32 %r20, %thread, 63; mov.u32 %r10, 0; mov.u32 %r12, 0;
mov.u32 %r60, box; shl.b32 %r61, %r20, 2; add.u32 %r62, %r60, %r61;
@%p1 bra consumer;
producer:
setp.eq.u32 %p2, %r10, 0; @%p2 bra filled;
sub.u32 %r11, %r10, 1; and.b32 %r11, %r11, 1;
empty: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r59+8], %r11; @!%p3 bra empty;
filled:
mad.lo.u32 %r13, %r10, 1000, %r20; st.shared.u32 [%r62], %r13;
mbarrier.arrive.shared::cta.b64 %d1, [%r59];
add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, 6; @%p4 bra producer;
bra done;
consumer:
and.b32 %r11, %r10, 1;
full: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r59], %r11; @!%p3 bra full;
{early}
xor.b32 %r14, %r61, 128; add.u32 %r14, %r14, %r60; ld.shared.u32 %r15, [%r14]; add.u32 %r12, %r12, %r15;
{late}
add.u32 %r10, %r10, 1; setp.lt.u32 %p4, %r10, 6; @%p4 bra consumer;
mul.wide.u32 %d0, %r20, 4; add.u64 %d0, %a0, %d0; st.global.u32 [%d0], %r12;
"""
EMPTIED = "mbarrier.arrive.shared::cta.b64 %d2, [%r59+8];"


@pytest.mark.parametrize("seed", SEEDS)
def test_mbarriers_order_what_arrivals_follow(seed: int) -> None:
    inside = BOX + ".shared .align 8 .b8 barrier[16];"
    with Device() as device:
        target = device.put(np.zeros(64, np.uint32))
        text = kernel_text(1, MBARRIER.format(early="", late=EMPTIED), inside=inside)
        device.run(text, target, block=(128, 1, 1), seed=seed)
        expected = [sum(1000 * step for step in range(6)) + 6 * (index ^ 32) for index in range(64)]
        assert device.get(target, 64, np.uint32).tolist() == expected
        text = kernel_text(1, MBARRIER.format(early=EMPTIED, late=""), inside=inside)
        with pytest.raises(EmulatorFault, match="a race: this"):
            device.run(text, target, block=(128, 1, 1), seed=seed)
