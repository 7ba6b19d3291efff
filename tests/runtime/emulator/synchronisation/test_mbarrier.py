"""mbarrier objects: phases, counts, transactions, waits, and what is done to them that must not be."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from tests.runtime.emulator.tensor_harness import launch_text

TEXT = """
.visible .entry k(.param .u64 out)
{{
.reg .b32 %r<20>; .reg .b64 %d<9>; .reg .pred %p<6>; .shared .align 8 .b8 bar[64]; .shared .align 4 .b8 word[256];
mov.u32 %r0, %tid.x; mov.u32 %r9, 0; mov.u32 %r8, word;
ld.param.u64 %d1, [out]; mul.wide.u32 %d2, %r0, 4; add.u64 %d1, %d1, %d2;
setp.eq.u32 %p1, %r0, 0; setp.lt.u32 %p2, %r0, 32;
{body}
st.global.u32 [%d1], %r9;
ret;
}}
"""


def run(body: str, threads: int = 32, **options: object) -> np.ndarray:
    return launch_text(TEXT.format(body=body), [np.zeros(threads, np.uint32)], threads=threads, **options)[0]


def fault(body: str, threads: int = 32) -> EmulatorFault:
    with pytest.raises(EmulatorFault) as caught:
        run(body, threads)
    return caught.value


def init(count: int) -> str:
    return f"@%p1 mbarrier.init.shared::cta.b64 [bar], {count};\nbar.sync 0;\n"


def wait(parity: int, label: str, form: str = "try_wait") -> str:
    return f"{label}: mbarrier.{form}.parity.shared.b64 %p3, [bar], {parity};\n@!%p3 bra {label};\n"


SEEN = "selp.u32 %r9, 1, 0, %p3;\n"


@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_producer_and_consumer_take_turns(form: str, seed: int) -> None:
    """Warp 0 writes eight values one by one, warp 1 adds them up; two barriers pass a word to and fro."""
    body = f"""
@%p1 mbarrier.init.shared.b64 [bar], 32;
@%p1 mbarrier.init.shared.b64 [bar + 8], 32;
bar.sync 0;
mov.u32 %r1, 0; mov.u32 %r2, 0;
mul.lo.u32 %r3, %r0, 4; and.b32 %r3, %r3, 127; add.u32 %r3, %r3, %r8;
@!%p2 bra CONSUME;
PRODUCE: xor.b32 %r4, %r2, 1;
E: mbarrier.{form}.parity.shared.b64 %p3, [bar + 8], %r4;
@!%p3 bra E;
add.u32 %r5, %r1, %r0;
st.shared.u32 [%r3], %r5;
mbarrier.arrive.shared.b64 %d4, [bar];
xor.b32 %r2, %r2, 1; add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 8;
@%p4 bra PRODUCE;
bra DONE;
CONSUME: mbarrier.{form}.parity.shared.b64 %p3, [bar], %r2;
@!%p3 bra CONSUME;
ld.shared.u32 %r5, [%r3];
add.u32 %r9, %r9, %r5;
mbarrier.arrive.release.cta.shared::cta.b64 _, [bar + 8];
xor.b32 %r2, %r2, 1; add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 8;
@%p4 bra CONSUME;
DONE:
"""
    out = run(body, 64, seed=seed)
    assert np.array_equal(out[32:], 28 + 8 * np.arange(32))


def test_a_wait_by_state() -> None:
    body = (
        init(3)
        + """
@!%p1 bra END;
mbarrier.arrive.shared.b64 %d4, [bar];
mbarrier.test_wait.shared.b64 %p3, [bar], %d4;
selp.u32 %r1, 100, 0, %p3;
mbarrier.arrive.shared.b64 %d5, [bar], 2;
mbarrier.test_wait.shared.b64 %p3, [bar], %d4;
selp.u32 %r2, 10, 0, %p3;
add.u32 %r9, %r1, %r2;
END:
"""
    )
    assert run(body)[0] == 10  # not after one arrival; after all


def test_no_complete_and_drop() -> None:
    """Two of three leave for good: the next phases expect one arrival."""
    body = (
        init(3)
        + """
@!%p1 bra END;
mbarrier.arrive.noComplete.shared.b64 %d4, [bar], 1;
mbarrier.arrive_drop.shared.b64 %d5, [bar], 2;
mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0;
selp.u32 %r9, 1, 0, %p3;
mbarrier.arrive.shared.b64 _, [bar];
mbarrier.test_wait.parity.shared.b64 %p3, [bar], 1;
@%p3 add.u32 %r9, %r9, 2;
END:
"""
    )
    assert run(body)[0] == 3


def test_transactions_hold_a_phase_open() -> None:
    body = (
        init(1)
        + """
@!%p1 bra END;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 64;
mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32;
mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0;
selp.u32 %r9, 4, 0, %p3;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 90;
mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0;
@%p3 add.u32 %r9, %r9, 2;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 6;
mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0;
@%p3 add.u32 %r9, %r9, 1;
END:
"""
    )
    assert run(body)[0] == 1


@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_a_phase_that_never_ends_is_a_deadlock(form: str) -> None:
    caught = fault(init(33) + "mbarrier.arrive.shared.b64 _, [bar];\n" + wait(0, "W", form))
    assert caught.kind == FaultKind.DEADLOCK
    assert f"mbarrier.{form}" in caught.text


def test_an_mbarrier_orders_what_the_race_checker_sees() -> None:
    """Without the wait the same store and load are a race."""
    store = "@%p2 st.shared.u32 [%r8], %r0;\n".replace("%p2", "%p1")
    good = (
        init(32) + store + "@%p2 mbarrier.arrive.shared.b64 _, [bar];\n" + wait(0, "W") + "ld.shared.u32 %r9, [%r8];\n"
    )
    assert not run(good, 64).any()
    bad = init(32) + store + "@!%p2 bra L;\nmbarrier.arrive.shared.b64 _, [bar];\nL: ld.shared.u32 %r9, [%r8];\n"
    assert fault(bad, 64).kind != FaultKind.DEADLOCK


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("mbarrier.arrive.shared.b64 _, [bar];", FaultKind.MBARRIER_INVALID),
        ("@%p1 mbarrier.init.shared.b64 [bar], 0;", FaultKind.MBARRIER_ARRIVALS),
        ("@%p1 mbarrier.init.shared.b64 [bar], 1048576;", FaultKind.MBARRIER_ARRIVALS),
        ("@%p1 mbarrier.init.shared.b64 [bar + 4], 1;", FaultKind.ASYNC_ALIGNMENT),
        (init(31) + "mbarrier.arrive.noComplete.shared.b64 %d4, [bar], 1;", FaultKind.MBARRIER_ARRIVALS),
        (init(1) + "@%p1 mbarrier.arrive.shared.b64 _, [bar], 2;", FaultKind.MBARRIER_ARRIVALS),
        (init(1) + "@%p1 mbarrier.arrive.noComplete.shared.b64 %d4, [bar], 1;", FaultKind.MBARRIER_ARRIVALS),
        (
            init(1) + "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048576;",
            FaultKind.MBARRIER_TRANSACTIONS,
        ),
        (init(1) + "@%p1 mbarrier.inval.shared.b64 [bar];\nbar.sync 0;\n" + wait(1, "W"), FaultKind.MBARRIER_INVALID),
        ("mbarrier.init.b64 [%d1], 1;", FaultKind.NOT_SHARED),
    ],
)
def test_misuse(body: str, kind: FaultKind) -> None:
    caught = fault(body)
    assert caught.kind == kind
    assert "mbarrier" in caught.text
