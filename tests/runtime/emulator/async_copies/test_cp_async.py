"""cp.async: what lands, when, and what must not be touched until then."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks
from runtime.emulator.translation.lowering import UnsupportedInstruction
from tests.runtime.emulator.tensor_harness import launch_text

TEXT = """
.visible .entry k(.param .u64 out, .param .u64 in)
{{
.reg .b32 %r<20>; .reg .b64 %d<9>; .reg .pred %p<4>; .shared .align 16 .b8 tile[2048]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x;
ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out];
mul.wide.u32 %d2, %r0, 16; add.u64 %d0, %d0, %d2; add.u64 %d1, %d1, %d2;
mul.lo.u32 %r1, %r0, 16; mov.u32 %r2, tile; add.u32 %r1, %r1, %r2;
setp.eq.u32 %p1, %r0, 0;
{body}
ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r1];
st.global.v4.u32 [%d1], {{%r4, %r5, %r6, %r7}};
ret;
}}
"""
COPY = "cp.async.cg.shared.global [%r1], [%d0], 16;\n"
WAIT = "cp.async.commit_group;\ncp.async.wait_group 0;\n"


def run(body: str, threads: int = 32, **options: object) -> np.ndarray:
    data = np.arange(4 * 128, dtype=np.uint32).reshape(128, 4) + 1000
    out, _ = launch_text(TEXT.format(body=body), [np.zeros((threads, 4), np.uint32), data], threads=threads, **options)
    return out


def fault(body: str, threads: int = 32, **options: object) -> EmulatorFault:
    with pytest.raises(EmulatorFault) as caught:
        run(body, threads, **options)
    return caught.value


EXPECTED = np.arange(128 * 4, dtype=np.uint32).reshape(128, 4) + 1000


@pytest.mark.parametrize("wait", [WAIT, "cp.async.wait_all;\n"])
@pytest.mark.parametrize("threads", [1, 32, 45])
def test_a_copy_lands_at_its_wait(wait: str, threads: int) -> None:
    assert np.array_equal(run(COPY + wait, threads), EXPECTED[:threads])


def test_every_width() -> None:
    body = "".join(
        f"cp.async.ca.shared.global [%r1 + {at}], [%d0 + {at}], {size};\n" for at, size in ((0, 4), (4, 4), (8, 8))
    )
    assert np.array_equal(run(body + WAIT), EXPECTED[:32])


def test_what_the_source_lacks_is_zero() -> None:
    out = run("and.b32 %r3, %r0, 15;\ncp.async.ca.shared.global [%r1], [%d0], 16, %r3;\n" + WAIT)
    for lane in range(32):
        expected = EXPECTED[lane].view(np.uint8).copy()
        expected[lane & 15 :] = 0
        assert np.array_equal(out[lane].view(np.uint8), expected)


def test_ignored_source() -> None:
    body = "setp.lt.u32 %p2, %r0, 10;\ncp.async.cg.shared.global [%r1], [%d0], 16, %p2;\n" + WAIT
    out = run(body)
    assert not out[:10].any()
    assert np.array_equal(out[10:], EXPECTED[10:32])


def test_a_wait_leaves_the_last_groups_in_flight() -> None:
    two = COPY + "cp.async.commit_group;\ncp.async.cg.shared.global [%r1 + 1024], [%d0], 16;\ncp.async.commit_group;\n"
    assert np.array_equal(run(two + "cp.async.wait_group 1;\n"), EXPECTED[:32])
    assert fault(two + "cp.async.wait_group 2;\n").kind == FaultKind.IN_FLIGHT
    assert fault(two + "cp.async.wait_group 1;\nld.shared.u32 %r4, [%r1 + 1024];\n").kind == FaultKind.IN_FLIGHT


def test_lanes_commit_for_themselves() -> None:
    """Lane 0 alone has committed a second, empty group: waiting for all but one lands its copy and no other's."""
    body = COPY + "cp.async.commit_group;\n@%p1 cp.async.commit_group;\ncp.async.wait_group 1;\n"
    caught = fault(body)
    assert caught.kind == FaultKind.IN_FLIGHT
    assert caught.thread == (1, 0, 0)


def test_a_missing_wait_is_named() -> None:
    caught = fault(COPY + "cp.async.commit_group;\n")
    assert caught.kind == FaultKind.IN_FLIGHT
    assert "ld.shared.v4.u32" in caught.text


def test_a_missing_wait_before_the_barrier() -> None:
    """Each thread reads its neighbour's bytes: a barrier does not land anything."""
    swap = "xor.b32 %r3, %r0, 32;\nmul.lo.u32 %r1, %r3, 16;\nadd.u32 %r1, %r1, %r2;\n"
    out = run(COPY + WAIT + "bar.sync 0;\n" + swap, 64)
    assert np.array_equal(out, EXPECTED[np.arange(64) ^ 32])
    assert fault(COPY + "cp.async.commit_group;\nbar.sync 0;\n" + swap, 64).kind == FaultKind.IN_FLIGHT
    assert fault(COPY + WAIT + swap, 64).kind in (FaultKind.IN_FLIGHT, FaultKind.UNINITIALIZED)


def test_a_store_to_bytes_in_flight() -> None:
    caught = fault(COPY + "st.shared.u32 [%r1], %r0;\n" + WAIT)
    assert caught.kind == FaultKind.IN_FLIGHT
    assert "st.shared" in caught.text


def test_two_copies_to_the_same_bytes() -> None:
    assert fault(COPY + COPY + WAIT).kind == FaultKind.IN_FLIGHT


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("cp.async.cg.shared.global [%r1], [%d0 + 4], 16;\n", FaultKind.ASYNC_ALIGNMENT),
        ("cp.async.ca.shared.global [%r1 + 2], [%d0], 4;\n", FaultKind.ASYNC_ALIGNMENT),
        ("cp.async.cg.shared.global [%r1], [%d0 + 2048], 16;\n", FaultKind.OUT_OF_BOUNDS),
        ("cp.async.cg.shared.global [%r1 + 2048], [%d0], 16;\n", FaultKind.OUT_OF_BOUNDS),
        ("mov.u32 %r3, 17;\ncp.async.cg.shared.global [%r1], [%d0], 16, %r3;\n", FaultKind.ASYNC_SIZE),
    ],
)
def test_bad_operands(body: str, kind: FaultKind) -> None:
    caught = fault(body + WAIT)
    assert caught.kind == kind
    assert "cp.async" in caught.text


def test_bad_forms_are_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match=r"cp\.async"):
        run("cp.async.cg.shared.global [%r1], [%d0], 8;\n")


INIT = "@%p1 mbarrier.init.shared.b64 [bar], {count};\nbar.sync 0;\n"
TRY = "TRY: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0;\n@!%p3 bra TRY;\n"


@pytest.mark.parametrize(
    ("count", "arrive"),
    [
        (64, "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];\n"),
        (64, "cp.async.mbarrier.arrive.shared.b64 [bar];\nmbarrier.arrive.shared.b64 _, [bar];\n"),
    ],
)
def test_an_mbarrier_follows_the_copies(count: int, arrive: str) -> None:
    swap = "xor.b32 %r3, %r0, 32;\nmul.lo.u32 %r1, %r3, 16;\nadd.u32 %r1, %r1, %r2;\n"
    out = run(INIT.format(count=count) + COPY + arrive + TRY + swap, 64)
    assert np.array_equal(out, EXPECTED[np.arange(64) ^ 32])


def test_without_checks_a_missing_wait_shows_in_the_result() -> None:
    out = run("mov.u32 %r3, 7;\nst.shared.v4.u32 [%r1], {%r3, %r3, %r3, %r3};\n" + COPY + "cp.async.commit_group;\n",
              checks=Checks(0))  # fmt: skip
    assert np.all(out == 7)
