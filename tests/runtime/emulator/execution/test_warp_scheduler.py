"""Order of warps and blocks, blocks that wait for each other, what happens when nobody can go on."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks
from tests.runtime.emulator.running import entry, run

TICKET = """
    setp.ne.u32 %p0, %r3, 0;
    @%p0 bra OUT;
    atom.global.add.u32 %r0, [%d1], 1;
    OUT:
"""


def work_items(seed: int) -> list[int]:
    """In which order the warps of eight blocks drew their work items."""
    return run(TICKET, 128, 8, seed=seed)[:, ::32].reshape(-1).tolist()  # type: ignore[no-any-return]


def test_the_natural_order_and_shuffled_ones() -> None:
    assert work_items(0) == list(range(32))
    orders = {tuple(work_items(seed)) for seed in range(1, 6)}
    assert len(orders) == 5
    assert all(sorted(order) == list(range(32)) for order in orders)
    assert work_items(3) == work_items(3)


def test_block_and_cluster_indices() -> None:
    body = """
        mov.u32 %r4, %cluster_ctaid.x;
        mov.u32 %r5, %clusterid.x;
        mov.u32 %r6, %cluster_ctarank;
        mov.u32 %r7, %nclusterid.x;
        mov.u32 %r8, %cluster_nctaid.x;
        mov.u32 %r9, %nctaid.x;
        mad.lo.u32 %r0, %r5, 10, %r4;
        mad.lo.u32 %r0, %r6, 100, %r0;
        mad.lo.u32 %r0, %r7, 1000, %r0;
        mad.lo.u32 %r0, %r8, 10000, %r0;
        mad.lo.u32 %r0, %r9, 100000, %r0;
    """
    expected = [b // 2 * 10 + b % 2 + b % 2 * 100 + 3000 + 20000 + 600000 for b in range(6)]
    assert run(body, 32, 6, cluster=2)[:, 0].tolist() == expected


@pytest.mark.parametrize("seed", [0, 7])
def test_a_block_may_wait_for_a_later_one(seed: int) -> None:
    """Every block waits until all of the grid have arrived: all have to be resident at once."""
    body = """
        setp.ne.u32 %p0, %r1, 0;
        @%p0 bra MEET;
        atom.global.add.release.gpu.u32 %r4, [%d1], 1;
        WAIT:
        ld.global.acquire.gpu.u32 %r5, [%d1];
        setp.lt.u32 %p1, %r5, 9;
        @%p1 bra WAIT;
        MEET:
        bar.sync 0;
        mov.u32 %r0, 1;
    """
    assert run(body, 64, 9, seed=seed).all()


def test_lanes_of_a_warp_may_wait_for_each_other() -> None:
    """Lane 0 spins on what lane 31 writes after the branch."""
    body = """
        setp.ne.u32 %p0, %r3, 0;
        @%p0 bra OTHERS;
        WAIT:
        ld.global.relaxed.gpu.u32 %r0, [%d1];
        setp.eq.u32 %p1, %r0, 0;
        @%p1 bra WAIT;
        bra OUT;
        OTHERS:
        setp.eq.u32 %p2, %r3, 31;
        mov.u32 %r4, 77;
        @%p2 st.global.relaxed.gpu.u32 [%d1], %r4;
        OUT:
    """
    assert run(body)[0].tolist() == [77] + [0] * 31


def test_a_spin_lock_counts_right() -> None:
    body = """
        mov.u32 %r4, 0;
        AGAIN:
        atom.global.acquire.gpu.cas.b32 %r5, [%d1], 0, 1;
        setp.ne.u32 %p0, %r5, 0;
        @%p0 bra AGAIN;
        ld.global.relaxed.gpu.u32 %r0, [%d1+4];
        add.u32 %r6, %r0, 1;
        st.global.relaxed.gpu.u32 [%d1+4], %r6;
        st.global.release.gpu.u32 [%d1], 0;
    """
    for seed in (0, 5):
        result = run(body, 64, 4, seed=seed)
        assert sorted(result.reshape(-1).tolist()) == list(range(256))


def test_two_threads_give_what_one_gives() -> None:
    kernel = entry("mad.lo.u32 %r0, %r2, 1000, %r1;\nmul.lo.u32 %r0, %r0, %r0;")
    one, two = (run(kernel, 256, 1200, num_threads=n, checks=Checks.MEMORY) for n in (1, 2))
    thread = np.arange(256, dtype=np.uint32)
    for block in range(1200):
        assert one[block].tolist() == ((block * 1000 + thread) ** 2).tolist()
    assert np.array_equal(one, two)


def test_a_fault_on_either_thread_stops_the_launch() -> None:
    kernel = entry("setp.eq.u32 %p0, %r2, 1100;\n@%p0 trap;")
    with pytest.raises(EmulatorFault) as caught:
        run(kernel, 256, 1200, checks=Checks.MEMORY)
    assert caught.value.kind == FaultKind.TRAP
    assert caught.value.block == (1100, 0, 0)


def test_waiting_in_circles_is_a_deadlock() -> None:
    """Two warps that wait at different barriers for each other."""
    body = """
        setp.ge.u32 %p0, %r1, 32;
        @%p0 bra SECOND;
        bar.sync 1, 64;
        bra OUT;
        SECOND:
        bar.sync 2, 64;
        OUT:
        mov.u32 %r0, 1;
    """
    with pytest.raises(EmulatorFault) as caught:
        run(body, 64, 2)
    assert caught.value.kind == FaultKind.DEADLOCK
    message = str(caught.value)
    assert "block (0, 0, 0): warps 0 wait at line" in message
    assert "bar.sync 1, 64;" in message
    assert "bar.sync 2, 64;" in message


def test_polling_for_what_never_comes() -> None:
    body = "WAIT:\nld.global.relaxed.gpu.u32 %r4, [%d1];\nsetp.eq.u32 %p0, %r4, 0;\n@%p0 bra WAIT;"
    with pytest.raises(EmulatorFault) as caught:
        run(body, 64, checks=Checks.NONE)
    assert caught.value.kind == FaultKind.DEADLOCK
    assert "block (0, 0, 0): warps 0-1 poll at line" in str(caught.value)
    assert "ld.global.relaxed.gpu.u32" in str(caught.value)
