"""What bulk copies and TMA tiles ask of device memory, counted where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.async_copies.tensor_map import U16, encode
from runtime.emulator.execution.counters import Traffic
from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 data, .param .align 64 .b8 map[128])
{{
.reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<4>;
.shared .align 1024 .b8 tile[8192]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r3, %cluster_ctarank;
ld.param.u64 %d0, [data]; mov.b64 %d2, map; cvta.param.u64 %d2, %d2;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {expect};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
setp.eq.and.u32 %p2, %r3, 0, %p1;
{body}
W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;
@!%p3 bra W;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ret;
}}
"""
DONE = "mbarrier::complete_tx::bytes"
TILE = f"@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.{DONE}"


def traffic(body: str, expect: int, *, cluster: int = 1, shape: tuple[int, int] = (13, 72)) -> Traffic:
    """What all copies in `body` ask for, of a matrix of 2-byte elements; its map's box is 8 rows of 64."""
    program = load(TEXT.format(body=body, expect=expect))
    machine = Machine(16 << 20)
    try:
        matrix = np.ones(shape, np.uint16)
        address = machine.allocate(matrix.nbytes)
        machine.write(address, matrix.tobytes())
        tensor = encode(U16, address, shape[::-1], [2 * shape[1]], (64, 8), (1, 1))
        parameters = address.to_bytes(8, "little") + bytes(56) + bytes(tensor)
        counters = launch(
            program.kernel("k"), machine, (cluster, 1, 1), (32, 1, 1), 0, parameters, (cluster, 1, 1),
            checks=Checks.ALL | Checks.TRAFFIC, variables=program.place(machine),
        )  # fmt: skip
        return sum(counters.traffic.values(), Traffic())
    finally:
        machine.close()


@pytest.mark.parametrize(("rank", "requests"), [(1, 1), (2, 1)])
def test_a_tile_counts_what_lies_inside_once_for_a_cluster(rank: int, requests: int) -> None:
    """Three rows of 56 elements lie inside, from byte 32 of rows of 144 bytes on."""
    multicast = ".multicast::cluster" if rank == 2 else ""
    mask = ", %h1" if rank == 2 else ""
    head = ".reg .b16 %h<2>; mov.b16 %h1, 3;\n" if rank == 2 else ""
    found = traffic(f"{head}{TILE}{multicast} [%r1], [%d2, {{16, 10}}], [bar]{mask};", 64 * 8 * 2, cluster=rank)
    assert (found.global_requests, found.global_bytes, found.global_sectors) == (requests, 3 * 112, 12)


def test_a_tile_outside_asks_for_nothing() -> None:
    found = traffic(f"{TILE} [%r1], [%d2, {{0, 13}}], [bar];", 64 * 8 * 2)
    assert (found.global_requests, found.global_bytes, found.global_sectors) == (1, 0, 0)


def test_plain_bytes_count_their_sectors() -> None:
    copy = f"@%p2 cp.async.bulk.shared::cluster.global.{DONE}"
    found = traffic(f"{copy} [%r1], [%d0], 96, [bar];\nadd.u64 %d1, %d0, 16; add.u32 %r2, %r1, 256;\n"
                    f"{copy} [%r2], [%d1], 96, [bar];", 192)  # fmt: skip
    assert (found.global_requests, found.global_bytes, found.global_sectors) == (2, 192, 3 + 4)


def test_stores_count_too() -> None:
    body = f"""{TILE} [%r1], [%d2, {{0, 0}}], [bar];
    X: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra X;
    fence.proxy.async.shared::cta;
    @%p2 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {{64, 0}}], [%r1];
    @%p2 cp.async.bulk.commit_group;
    @%p2 cp.async.bulk.wait_group 0;"""
    found = traffic(body, 64 * 8 * 2)
    assert found.global_requests == 2
    assert found.global_bytes == 8 * 128 + 8 * 16  # 8 elements of each row are left at column 64
