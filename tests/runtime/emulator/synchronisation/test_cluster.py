"""Clusters, distributed shared memory, multicast, elect, setmaxnreg, dependent launches."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.async_copies.tensor_map import F32, encode
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.tensor_harness import launch_text

MBARRIER = "mbarrier::complete_tx::bytes"
TEXT = """
.visible .entry k(.param .u64 out, .param .u64 in, .param .align 64 .b8 map[128]){directives}
{{
.reg .b32 %r<30>; .reg .b64 %d<12>; .reg .pred %p<6>;
.shared .align 128 .b8 tile[1024]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, tile; mov.u32 %r9, 0; mov.u32 %r4, %ctaid.x;
setp.eq.u32 %p1, %r0, 0;
ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out]; mov.b64 %d2, map; cvta.param.u64 %d2, %d2;
mov.u32 %r3, %ntid.x; mad.lo.u32 %r3, %r3, %r4, %r0; mul.wide.u32 %d3, %r3, 4; add.u64 %d1, %d1, %d3;
mul.lo.u32 %r5, %r0, 4; add.u32 %r5, %r5, %r2;
{body}
st.global.u32 [%d1], %r9;
ret;
}}
"""
ARRIVE, WAIT = "barrier.cluster.arrive.release.aligned;\n", "barrier.cluster.wait.acquire.aligned;\n"
SYNC = ARRIVE + WAIT
DATA = np.arange(256, dtype=np.uint32) * 5 + 1


def run(
    body: str, threads: int = 32, blocks: int = 2, cluster: int = 2, directives: str = "", tensor: object = bytes(128),
    data: np.ndarray = DATA, **options: object,
) -> np.ndarray:  # fmt: skip
    out = np.zeros((blocks, threads), np.uint32)
    kernel = TEXT.format(body=body, directives=directives)
    return launch_text(kernel, [out, data, tensor], threads=threads, blocks=blocks, cluster=cluster, **options)[0]


def fault(body: str, **options: object) -> EmulatorFault:
    with pytest.raises(EmulatorFault) as caught:
        run(body, **options)
    return caught.value


PEER = "xor.b32 %r6, %r1, 1;\nmapa.shared::cluster.u32 %r7, %r5, %r6;\n"
MARK = "add.u32 %r8, %r3, 100;\nst.shared.u32 [%r5], %r8;\n"


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("blocks", [2, 6])
def test_a_block_reads_its_peer(seed: int, blocks: int) -> None:
    body = MARK + SYNC + PEER + "ld.shared::cluster.u32 %r9, [%r7];\n" + SYNC
    out = run(body, threads=64, blocks=blocks, seed=seed)
    expected = np.arange(blocks * 64).reshape(blocks, 64) + 100
    assert np.array_equal(out, expected.reshape(-1, 2, 64)[:, ::-1].reshape(blocks, 64))


def test_a_block_writes_to_its_peer_by_a_generic_address() -> None:
    body = "cvt.u64.u32 %d5, %r5;\ncvta.shared.u64 %d5, %d5;\nxor.b32 %r6, %r1, 1;\nmapa.u64 %d6, %d5, %r6;\n"
    body += "add.u32 %r8, %r3, 7;\nst.u32 [%d6], %r8;\n" + SYNC + "ld.shared.u32 %r9, [%r5];\n"
    assert np.array_equal(run(SYNC + body), (np.arange(64).reshape(2, 32) + 7)[::-1])


def test_a_read_without_the_cluster_barrier() -> None:
    assert fault(MARK + PEER + "ld.shared::cluster.u32 %r9, [%r7];\n" + SYNC).kind == FaultKind.UNINITIALIZED


def test_a_peer_that_has_exited() -> None:
    body = MARK + SYNC + "setp.eq.u32 %p2, %r1, 0;\n@%p2 bra END;\nmov.u32 %r10, 0;\n"
    body += "SPIN: bar.sync 0;\nadd.u32 %r10, %r10, 1; setp.lt.u32 %p3, %r10, 9;\n@%p3 bra SPIN;\n"
    body += PEER + "ld.shared::cluster.u32 %r9, [%r7];\nEND:\n"
    caught = fault(body, threads=64)
    assert caught.kind == FaultKind.BLOCK_EXITED
    assert "ld.shared::cluster" in caught.text


def test_a_rank_that_does_not_exist() -> None:
    assert fault("mapa.shared::cluster.u32 %r7, %r5, 2;\n").kind == FaultKind.CLUSTER_RANK


def test_misuse_of_the_cluster_barrier() -> None:
    assert fault(ARRIVE + ARRIVE).kind == FaultKind.CLUSTER_BARRIER
    assert fault(WAIT).kind == FaultKind.CLUSTER_BARRIER
    assert fault("@%p1 " + ARRIVE + WAIT).kind == FaultKind.DIVERGENT_ALIGNED


def test_a_cluster_barrier_that_one_block_skips_is_a_deadlock() -> None:
    """Warp 0 of block 1 waits for warp 1 at another barrier first."""
    body = "setp.lt.u32 %p4, %r0, 32;\nsetp.eq.and.u32 %p2, %r1, 1, %p4;\n@%p2 bar.sync 1, 64;\n" + SYNC
    caught = fault(body, threads=64)
    assert caught.kind == FaultKind.DEADLOCK
    assert "barrier.cluster.wait" in str(caught)
    assert "bar.sync 1" in str(caught)


def test_exited_lanes_count_as_arrived() -> None:
    body = "setp.eq.u32 %p2, %r1, 0;\n@%p2 bra END;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    body += "mov.u32 %r9, 1;\nEND:\n"
    assert run(body)[:, 0].tolist() == [0, 1]


INIT = "@%p1 mbarrier.init.shared.b64 [bar], 1;\nfence.mbarrier_init.release.cluster;\n" + SYNC
TRY = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [bar], 0;\n@!%p3 bra W;\n"
REMOTE_BAR = "mov.u32 %r10, bar;\nxor.b32 %r6, %r1, 1;\nmapa.shared::cluster.u32 %r11, %r10, %r6;\n"


def test_a_remote_arrival() -> None:
    body = (
        INIT + REMOTE_BAR + MARK + "bar.sync 0;\n@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];\n"
    )
    body += TRY + PEER + "ld.shared::cluster.u32 %r9, [%r7];\n" + SYNC
    assert np.array_equal(run(body), (np.arange(64).reshape(2, 32) + 100)[::-1])


RELAXED = "barrier.cluster.arrive.relaxed.aligned;\n" + WAIT
REMOTE_ARRIVAL = REMOTE_BAR + "@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r11];\n" + TRY + SYNC


@pytest.mark.parametrize("fence", ["fence.mbarrier_init.release.cluster;\n", "fence.acq_rel.cluster;\n"])
def test_a_fence_and_a_relaxed_arrival_show_a_barrier(fence: str) -> None:
    init = "@%p1 mbarrier.init.shared.b64 [bar], 1;\n"
    assert not run(init + fence + RELAXED + REMOTE_ARRIVAL).any()
    assert fault(init + RELAXED + REMOTE_ARRIVAL).kind == FaultKind.MISSING_INIT_FENCE
    assert fault(init + "fence.acq_rel.cta;\n" + RELAXED + REMOTE_ARRIVAL).kind == FaultKind.MISSING_INIT_FENCE
    assert fault(fence + init + RELAXED + REMOTE_ARRIVAL).kind == FaultKind.MISSING_INIT_FENCE
    assert not run(init + SYNC + RELAXED + REMOTE_ARRIVAL).any()


@pytest.mark.parametrize("words", ["arrive.acquire", "wait.relaxed", "wait.release", "arrive.release.relaxed", "sync"])
def test_forms_that_there_are_not(words: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run(f"barrier.cluster.{words}.aligned;\n")


@pytest.mark.parametrize("seed", [0, 1])
def test_multicast_of_bytes(seed: int) -> None:
    """Block 0 loads for all four."""
    body = INIT + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;\nsetp.eq.and.u32 %p2, %r1, 0, %p1;\n"
    body += "mov.b16 %h0, 15;\n"
    body += f"@%p2 cp.async.bulk.shared::cluster.global.{MBARRIER}.multicast::cluster [tile], [%d0], 128, [bar], %h0;\n"
    body += TRY + "ld.shared.u32 %r9, [%r5];\n" + SYNC
    out = run(".reg .b16 %h<2>;\n" + body, blocks=4, cluster=4, seed=seed)
    assert np.array_equal(out, np.tile(DATA[:32], (4, 1)))


def test_multicast_of_a_tile() -> None:
    def tensor(addresses: list[int]) -> bytes:
        return encode(F32, addresses[1], [16, 16], [64], [8, 4], [1, 1])

    body = ".reg .b16 %h<2>;\n" + INIT + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;\n"
    body += "mov.b16 %h0, 3;\nmul.lo.u32 %r10, %r1, 128;\nadd.u32 %r11, %r10, %r2;\nmul.lo.u32 %r12, %r1, 4;\n"
    body += f"@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.{MBARRIER}.multicast::cluster "
    body += "[%r11], [%d2, {8, %r12}], [bar], %h0;\n" + TRY + "ld.shared.u32 %r9, [%r5];\n" + SYNC
    out = run(body, threads=64, tensor=tensor)
    expected = np.concatenate([DATA.reshape(16, 16)[4 * b : 4 * b + 4, 8:].reshape(-1) for b in range(2)])
    assert np.array_equal(out, np.tile(expected, (2, 1)))


def test_multicast_to_a_rank_outside() -> None:
    body = ".reg .b16 %h<2>;\n" + INIT + "mov.b16 %h0, 4;\n"
    body += f"@%p1 cp.async.bulk.shared::cluster.global.{MBARRIER}.multicast::cluster [tile], [%d0], 128, [bar], %h0;\n"
    assert fault(body).kind == FaultKind.CLUSTER_RANK


def test_elect() -> None:
    body = "mov.u32 %r8, 0;\nelect.sync %r8|%p2, -1;\n@%p2 add.u32 %r9, %r9, 100;\nadd.u32 %r9, %r9, %r8;\n"
    body += "setp.ge.u32 %p3, %r0, 7;\n@!%p3 bra L;\nelect.sync %r8|%p2, 0xFFFFFF80;\n@%p2 add.u32 %r9, %r9, 50;\nL:\n"
    out = run(body, blocks=1, cluster=1)[0]
    assert out.tolist() == [100] + [0] * 6 + [50] + [0] * 24
    assert fault("@%p1 elect.sync _|%p2, 3;\n", blocks=1, cluster=1).kind == FaultKind.LANE_NOT_IN_MASK


def test_register_budget() -> None:
    """168 registers each for three warpgroups: one gives up 128 of its own, the other two take 64 each."""
    body = "setp.lt.u32 %p2, %r0, 128;\n@!%p2 bra MORE;\nsetmaxnreg.dec.sync.aligned.u32 40;\nbra END;\n"
    body += "MORE: setmaxnreg.inc.sync.aligned.u32 {count};\nEND: bar.sync 0;\n"
    options = {"threads": 384, "blocks": 1, "cluster": 1, "directives": "\n.reqntid 384\n.minnctapersm 1\n"}
    run(body.format(count=232), **options)
    caught = fault(body.format(count=240), **options)
    assert caught.kind == FaultKind.DEADLOCK
    assert "setmaxnreg.inc" in str(caught)
    assert fault(body.format(count=24), **options).kind == FaultKind.REGISTER_BUDGET
    with pytest.raises(UnsupportedInstruction, match="multiple of 8"):
        run(body.format(count=44), **options)
    with pytest.raises(UnsupportedInstruction, match="maxntid"):
        run(body.format(count=232), threads=384, blocks=1, cluster=1)


def test_a_dependent_launch_waits_before_it_touches_memory() -> None:
    touch = "ld.global.u32 %r9, [%d0];\n"
    wait = "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\n"
    assert run(wait + touch, is_dependent=True)[0, 0] == DATA[0]
    assert run(touch)[0, 0] == DATA[0]
    for load in (touch, touch.replace("global", "global.nc")):
        caught = fault(load + wait, is_dependent=True)
        assert caught.kind == FaultKind.BEFORE_DEPENDENCY
        assert "ld.global" in caught.text


@pytest.mark.parametrize(
    "touch",
    [
        "ld.global.u32 %r9, [%d0];\n",
        "ld.global.nc.u32 %r9, [%d0];\n",
        "cp.async.ca.shared.global [%r5], [%d0], 4;\ncp.async.wait_all;\nld.shared.u32 %r9, [%r5];\n",
    ],
)
def test_a_dependent_launch_may_read_immutable_memory_early(touch: str) -> None:
    weights = DATA.copy()
    weights.flags.writeable = False
    wait = "griddepcontrol.wait;\n"
    assert run(touch + wait, is_dependent=True, data=weights)[0, 0] == DATA[0]
    caught = fault("st.global.u32 [%d0], %r9;\n" + wait, is_dependent=True, data=weights)
    assert caught.kind == FaultKind.BEFORE_DEPENDENCY
