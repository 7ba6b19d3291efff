"""Control flow, instructions of whole warps (exits, barriers, fences, traps), and lanes that wait for each other.

A group that comes alone before an instruction which lanes execute together is parked: set aside until the lanes that it
needs stand at the same place. Lanes that end after others parked before an `.aligned` instruction have gone another
way: that is a divergence, found here, or by `report_parked` when all that live are parked at different places.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def"

from __future__ import annotations

from typing import Any

from llvmlite import ir

from numba_kernels.cache import njit
from runtime.emulator.execution.fault import FaultKind, report
from runtime.emulator.execution.state import DONE, DONE_BUT_YIELD, FAILED, RETRY
from runtime.emulator.memory.pointers import trailing_zeros
from runtime.emulator.races.clocks import SCOPE_CLUSTER, SCOPE_CTA, SCOPE_GPU
from runtime.emulator.races.vector_clocks import on_fence, on_warp_barrier
from runtime.emulator.translation.basic_blocks import targets_of
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.operations import operation
from runtime.emulator.translation.ptx import Address, Instruction, Integer, Operand, Symbol, Vector
from runtime.emulator.translation.vectors import WORD


@njit
def _park(warp, mask, needed, site, pc, kind):
    """Sets the lanes of `mask` aside at `pc`; where all of `needed` are there now, they may all run."""
    if warp.parked == 0:
        warp.parked_live = warp.live
    warp.parked |= mask
    warp.parked_kind = kind
    warp.site = site
    warp.stalled |= mask
    pcs = warp.pcs
    all_here = True
    for lane in range(32):
        if (mask >> lane) & 1:
            pcs[lane] = pc
        elif (needed >> lane) & 1 and pcs[lane] != pc:
            all_here = False
    if all_here:
        warp.stalled &= ~needed
    return RETRY


@operation("gather_all", "ll")
def gather_all(warp, mask, site, pc, kind):
    """The lanes of `mask` are about to run the chunk at `pc` whose instruction `site` needs all live lanes."""
    lanes, live = mask, warp.live
    if lanes != live:
        return _park(warp, lanes, live, site, pc, kind)
    before = warp.parked_live
    strict = kind != FaultKind.DEADLOCK
    warp.parked = 0
    warp.parked_live = 0
    if strict and before != live:
        missing = before & ~live
        return report(warp, kind, site, trailing_zeros(missing), 0, live, before, 0, 0)
    return DONE


@operation("gather_members", "p")
def gather_members(warp, mask, site, members):
    """Each lane of `mask` needs the live lanes of its own member mask beside it at instruction `site`."""
    lanes, live = mask, warp.live
    needed = 0
    for lane in range(32):
        if (lanes >> lane) & 1:
            wanted = int(members[lane])
            if (wanted >> lane) & 1 == 0:
                report(warp, FaultKind.LANE_NOT_IN_MASK, site, lane, 0, wanted, 0, 0, 0)
                return FAILED
            needed |= wanted & live
    if needed & ~lanes:
        return _park(warp, lanes, needed | lanes, site, site, FaultKind.DEADLOCK)
    warp.parked &= ~lanes
    return DONE


@operation("report_parked", "")
def report_parked(warp, mask, site):
    """All live lanes are parked, and not at one place."""
    kind, live, parked = warp.parked_kind, warp.live, warp.parked
    pcs = warp.pcs
    lane = trailing_zeros(live)
    here = 0
    for other in range(32):
        if (live >> other) & 1 and pcs[other] == pcs[lane]:
            here |= 1 << other
    return report(warp, kind, warp.site, lane, 0, here, parked, 0, 0)


@operation("report_divergence", "l")
def report_divergence(warp, mask, site, kind):
    """The guard of an `.aligned` instruction holds for some of the lanes alone."""
    lanes = mask
    return report(warp, kind, site, trailing_zeros(lanes), 0, lanes, warp.live, 0, 0)


def lower_branch(low: Lowering, ins: Instruction) -> None:
    low.only("uni")
    (target,) = targets_of(low.kernel, ins)
    if ins.guard is None:
        low.flow.jump(target)
    else:
        low.flow.branch(target, low.site + 1)


def lower_branch_by_index(low: Lowering, ins: Instruction) -> None:
    low.only("idx", "uni")
    targets = targets_of(low.kernel, ins)
    if ins.guard is not None:
        raise low.refuse("a guard")
    table_type = ir.ArrayType(WORD, len(targets))
    table = ir.GlobalVariable(low.ir, table_type, f"targets{low.site}")
    table.linkage, table.global_constant = "internal", True
    table.initializer = ir.Constant(table_type, [ir.Constant(WORD, target) for target in targets])
    pointer = low.builder.bitcast(table, WORD.as_pointer())
    low.call("branch_by_index", low.slot(ins.operands[0], 32), pointer, len(targets))
    low.flow.leave_to(targets)


@operation("branch_by_index", "ppl")
def branch_by_index(warp, mask, site, indices, targets, count):
    pcs = warp.pcs
    for lane in range(32):
        if (mask >> lane) & 1:
            index = int(indices[lane])
            if index >= count:
                return report(warp, FaultKind.BRANCH_INDEX, site, lane, 0, index, count, 0, 0)
            pcs[lane] = int(targets[index])
    return DONE


def lower_exit(low: Lowering, ins: Instruction) -> None:
    low.only("uni")
    low.flow.exit(low.mask, None if ins.guard is None else low.site + 1)


def lower_trap(low: Lowering, ins: Instruction) -> None:
    low.only()
    low.call("trap")
    low.flow.exit(low.mask, None if ins.guard is None else low.site + 1)


@operation("trap", "")
def trap(warp, mask, site):
    return report(warp, FaultKind.TRAP, site, trailing_zeros(mask), 0, 0, 0, 0, 0)


@operation("sleep", "")
def sleep(warp, mask, site):
    return DONE_BUT_YIELD


@operation("warp_barrier", "")
def warp_barrier(warp, mask, site):
    on_warp_barrier(warp)
    return DONE


_RED = {"popc": 0, "and": 1, "or": 2}


def lower_barrier(low: Lowering, ins: Instruction) -> None:
    """bar{.cta}.sync|arrive|red and barrier{.cta}.… with or without .aligned; bar is always aligned."""
    parts = [part for part in ins.parts[1:] if part not in ("cta", "aligned")]
    low.resume_here()
    if ins.parts[0] == "bar" or "aligned" in ins.parts:
        low.flow.converge(FaultKind.DIVERGENT_BARRIER)
    operands = list(ins.operands)
    match parts:
        case ["sync"]:
            low.call("barrier_sync", *_which(low, operands), blocks=True)
        case ["arrive"]:
            if len(operands) != 2:
                raise low.refuse("needs a thread count")
            low.call("barrier_arrive", *_which(low, operands))
        case ["red", ("popc" | "and" | "or") as kind, ("u32" | "pred")]:
            result, predicate = operands.pop(0), low.predicate(operands.pop())
            pointer = low.destination(result, 32) if kind == "popc" else low.predicate_destination(result)
            low.call("barrier_red", *_which(low, operands), predicate, _RED[kind], pointer, blocks=True)
        case _:
            raise low.refuse("this form of barrier")


def _which(low: Lowering, operands: list[Operand]) -> tuple[Any, Any, int]:
    """The barrier's number and its thread count, as slots, and whether there is a count."""
    if len(operands) not in (1, 2):
        raise low.refuse(f"{len(operands)} operands")
    count = operands[1] if len(operands) == 2 else Integer(0)
    return low.slot(operands[0], 32), low.slot(count, 32), int(len(operands) == 2)


def lower_fence(low: Lowering, ins: Instruction) -> None:
    """Every access here is complete in the program's order: a fence matters to the race checker alone. A fence
    restricted to shared memory counts for device memory, too: a race there may be missed, but none is invented."""
    if ins.parts[1:] not in _RESTRICTED:
        low.only(*_SCOPES, "sc", "acq_rel", "acquire", "release")
    scopes = [_SCOPES[part] for part in ins.parts[1:] if part in _SCOPES]
    if len(scopes) != 1:
        raise low.refuse("needs one scope")
    low.call("fence", scopes[0])


_RESTRICTED = (
    ("release", "sync_restrict::shared::cta", "cluster"), ("acquire", "sync_restrict::shared::cluster", "cluster"),
)  # fmt: skip
_SCOPES = {"cta": SCOPE_CTA, "cluster": SCOPE_CLUSTER, "gl": SCOPE_GPU, "gpu": SCOPE_GPU, "sys": SCOPE_GPU}


@operation("fence", "l")
def fence(warp, mask, site, scope):
    on_fence(warp, scope)
    if scope >= SCOPE_CLUSTER:
        warp.hides_barrier = 0
    return DONE


_ASSERT_FAIL = "__assertfail"


def lower_store_argument(low: Lowering, ins: Instruction) -> None:
    """An argument of the call that follows, kept for lower_call."""
    address, value = ins.operands
    arguments = {variable.name for variable in low.kernel.variables if variable.space == "param"}
    if not isinstance(address, Address) or not isinstance(address.base, Symbol) or address.base.name not in arguments:
        raise low.refuse("a store to something that is no call's argument")
    if address.offset or isinstance(value, Vector) or ins.guard is not None:
        raise low.refuse("an argument that is no single value")
    low.call_arguments[address.base.name] = low.value(value, ins.parts[-1])


def lower_call(low: Lowering, ins: Instruction) -> None:
    """Only an assertion's failure, __assertfail(message, file, line, function, char size); the rest is inlined."""
    low.only("uni")
    match ins.operands:
        case (Symbol(name), Vector(items)) if name == _ASSERT_FAIL and len(items) == 5:
            message, file, line = (low.call_arguments[item.name] for item in items[:3] if isinstance(item, Symbol))
            low.call("assertion_failed", low.spill(message), low.spill(file), low.spill(line))
        case _:
            names = [operand.name for operand in ins.operands if isinstance(operand, Symbol)]
            raise low.refuse(f"a call of {', '.join(names) or 'an address'}")


@operation("assertion_failed", "qqp")
def assertion_failed(warp, mask, site, messages, files, lines):
    if mask == 0:
        return DONE
    lane = trailing_zeros(mask)
    return report(warp, FaultKind.ASSERT, site, lane, 0, messages[lane], files[lane], lines[lane], 0)
