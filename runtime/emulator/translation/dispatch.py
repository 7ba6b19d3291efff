"""The frame around a kernel's chunks: the choice of the lanes that run next, and their reconvergence.

Each lane has a program counter (an instruction's index) in the warp's array, valid while the lane does not run. While
all live lanes run together, a branch goes straight to its target. Otherwise the lanes' counters are written and the
smallest one runs next, with every lane at that place: structured code reconverges by itself. Lanes that block or
yield are set aside until no other lane can run; then `run` returns.
"""

from __future__ import annotations

from typing import Any

from runtime.emulator.execution.fault import FaultKind
from runtime.emulator.execution.state import (
    BLOCKED,
    DONE,
    DONE_BUT_YIELD,
    EXITED,
    FAILED,
    FAULT,
    YIELDED,
    Launch,
    Warp,
)  # fmt: skip
from runtime.emulator.translation.basic_blocks import Block
from runtime.emulator.translation.instructions import TABLE
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.ptx import Operand
from runtime.emulator.translation.registers import SLOT_KINDS
from runtime.emulator.translation.vectors import I32, LONG, WORD, intrinsic, mask_of, splat, truths_of

Value = Any
_NOWHERE = 0x7FFFFFFF


def translate(low: Lowering) -> None:
    """Fills `low.function` with the whole kernel."""
    low.flow = Flow(low)
    low.flow.translate()


class Flow:
    """Chunks and the jumps between them. `target(i)` is the block to branch to for going on at instruction i."""

    def __init__(self, low: Lowering) -> None:
        self.low, self.builder = low, low.builder
        add = low.function.append_basic_block
        self.entry, self.pick, self.go, self.part, self.fault, self.idle = map(
            add, ("entry", "pick", "go", "part", "fault", "idle")
        )
        self.bodies: dict[int, Any] = {}
        self.targets: dict[tuple[int, bool], Any] = {}
        self.end = len(low.kernel.instructions)

    # --- the whole ---

    def translate(self) -> None:
        low, builder = self.low, self.builder
        builder.position_at_end(self.entry)
        self.active = builder.alloca(WORD)  # the lanes that run
        self.next = builder.alloca(WORD)  # where they go on
        self.some = builder.alloca(WORD)  # those of them that take a branch
        self.elsewhere = builder.alloca(WORD)  # where those go on
        registers = low.warp_field(Warp.registers)
        low.registers = {kind: builder.inttoptr(registers, kind.as_pointer()) for kind in SLOT_KINDS}
        low.launch = builder.inttoptr(low.warp_field(Warp.launch), LONG.as_pointer())
        low.counters = builder.inttoptr(low.launch_field(Launch.counters), LONG.as_pointer())
        self.pcs = builder.inttoptr(low.warp_field(Warp.pcs), I32.as_pointer())
        low.set_warp_field(Warp.stalled, low.i64(0))
        low.set_warp_field(Warp.has_yielded, low.i64(0))
        builder.branch(self.pick)
        self.body(0)
        for block in low.blocks:
            self._translate_block(block)
        if self.end in self.bodies:
            builder.position_at_end(self.bodies[self.end])
            low.begin_chunk(self.end, builder.load(self.active))
            self._exit_some(low.chunk_mask, None)
        self._frame()

    def _translate_block(self, block: Block) -> None:
        low = self.low
        low.block = block
        self._begin(block.start)
        for index in range(block.start, block.end):
            low.begin_instruction(index)
            if low.wgmma:
                low.wgmma.watch(low)
            TABLE.lower(low, low.instruction)
            low.end_instruction()
            if low.yield_result is not None:
                self._after_blocking(index + 1)
            elif index + 1 in self.bodies and index + 1 < block.end:  # where lanes without the guard went ahead
                self._finish(index + 1)
                self.builder.branch(self.target(index + 1))
                self._begin(index + 1)
        if not low.is_terminated:
            self.jump(block.end)

    def _begin(self, index: int) -> None:
        """The builder goes to the body of a chunk that begins at `index`."""
        self.head, self.first = self.body(index), index
        self.needs: tuple[FaultKind, int] | None = None  # why its lanes have to be together
        self.code = self.low.function.append_basic_block(f"code{index}")
        self.builder.position_at_end(self.code)
        self.low.begin_chunk(index, self.builder.load(self.active))

    def _after_blocking(self, index: int) -> None:
        """After a call that may have yielded: a chunk's border before `index`."""
        low, builder = self.low, self.builder
        result = low.yield_result
        self._finish(index)
        yields = builder.icmp_unsigned("==", result, low.i32(DONE_BUT_YIELD))
        builder.cbranch(yields, self.target(index, yields=True), self.target(index))
        if index < low.block.end:
            self._begin(index)
        else:
            low.is_terminated = True

    def _frame(self) -> None:
        low, builder = self.low, self.builder
        # go: the active lanes' counters become `next`
        builder.position_at_end(self.go)
        lanes = truths_of(builder, builder.load(self.active))
        builder.store(builder.select(lanes, low.splat(builder.load(self.next)), builder.load(self.pcs)), self.pcs)
        builder.branch(self.pick)
        # part: those of `some` become `elsewhere`, the other active lanes' `next`
        builder.position_at_end(self.part)
        lanes = truths_of(builder, builder.load(self.active))
        some = truths_of(builder, builder.load(self.some))
        rest = builder.select(lanes, low.splat(builder.load(self.next)), builder.load(self.pcs))
        builder.store(builder.select(some, low.splat(builder.load(self.elsewhere)), rest), self.pcs)
        builder.branch(self.pick)
        # pick: the smallest counter among the lanes that can run
        builder.position_at_end(self.pick)
        live = builder.trunc(low.warp_field(Warp.live), WORD)
        stalled = builder.trunc(low.warp_field(Warp.stalled), WORD)
        ready = builder.and_(live, builder.not_(stalled))
        some_ready = low.function.append_basic_block("ready")
        builder.cbranch(builder.icmp_unsigned("==", ready, low.i32(0)), self.idle, some_ready)
        builder.position_at_end(some_ready)
        counters = builder.select(truths_of(builder, ready), builder.load(self.pcs), splat(I32, _NOWHERE))
        smallest = intrinsic(builder, "vector.reduce.umin", WORD, [counters], types=[I32])
        there = mask_of(builder, builder.icmp_unsigned("==", counters, low.splat(smallest)))
        builder.store(builder.and_(there, ready), self.active)
        nowhere = low.function.append_basic_block("nowhere")
        switch = builder.switch(smallest, nowhere)
        for index, body in sorted(self.bodies.items()):
            switch.add_case(low.i32(index), body)
        builder.position_at_end(nowhere)
        builder.unreachable()
        # idle: no lane can run
        builder.position_at_end(self.idle)
        exited, waiting, parked, blocked = map(
            low.function.append_basic_block, ("exited", "waiting", "parked", "blocked")
        )
        builder.cbranch(builder.icmp_unsigned("==", live, low.i32(0)), exited, waiting)
        builder.position_at_end(exited)
        builder.ret(low.i32(EXITED))
        builder.position_at_end(waiting)
        is_parked = builder.icmp_unsigned("==", low.warp_field(Warp.parked), builder.zext(live, LONG))
        builder.cbranch(is_parked, parked, blocked)
        builder.position_at_end(parked)
        low.invoke("report_parked", live, 0)
        builder.ret(low.i32(FAULT))
        builder.position_at_end(blocked)
        yielded = builder.icmp_unsigned("!=", low.warp_field(Warp.has_yielded), low.i64(0))
        builder.ret(builder.select(yielded, low.i32(YIELDED), low.i32(BLOCKED)))
        builder.position_at_end(self.fault)
        builder.ret(low.i32(FAULT))

    # --- places ---

    def body(self, index: int) -> Any:
        """The code at instruction `index` for any `active`; it becomes a point where lanes can resume."""
        if index not in self.bodies:
            self.bodies[index] = self.low.function.append_basic_block(f"at{index}")
        return self.bodies[index]

    def target(self, index: int, yields: bool = False) -> Any:
        """The branch target for the active lanes to go on at `index`: straight there when they are all live lanes."""
        if (index, yields) in self.targets:
            return self.targets[index, yields]
        low, builder = self.low, self.builder
        block = low.function.append_basic_block(f"{'yield' if yields else 'enter'}{index}")
        self.targets[index, yields] = block
        body = self.body(index)
        with builder.goto_block(block):
            if yields:
                self._stall()
                low.set_warp_field(Warp.has_yielded, low.i64(1))
                builder.store(low.i32(index), self.next)
                builder.branch(self.go)
            else:
                away = low.function.append_basic_block(f"away{index}")
                live = builder.trunc(low.warp_field(Warp.live), WORD)
                together = builder.icmp_unsigned("==", builder.load(self.active), live)
                builder.cbranch(together, body, away)
                builder.position_at_end(away)
                builder.store(low.i32(index), self.next)
                builder.branch(self.go)
        return block

    def _stall(self, lanes: Value = None) -> None:
        """Sets lanes aside until no other lane of the warp can run."""
        low, builder = self.low, self.builder
        lanes = builder.load(self.active) if lanes is None else lanes
        stalled = low.warp_field(Warp.stalled)
        low.set_warp_field(Warp.stalled, builder.or_(stalled, builder.zext(lanes, LONG)))

    def polls(self, target: int) -> bool:
        """Whether a jump from this instruction back to `target` closes a loop that waits for memory to change."""
        loop = self.low.kernel.instructions[target : self.low.site + 1]
        return any(_is_polling(instruction.parts) for instruction in loop)

    # --- ends of chunks ---

    def _finish(self, index: int | None) -> None:
        """Code before leaving a chunk: live registers to memory, a fault seen, the chunk counted."""
        low, builder = self.low, self.builder
        low.flush(index)
        self._fill_head()
        last = low.site + 1 if index is None else index
        if low.status is not None:
            on = low.function.append_basic_block("sound")
            builder.cbranch(builder.icmp_unsigned("==", low.status, low.i32(0)), on, self.fault)
            builder.position_at_end(on)
            low.status = None
        if last > self.first:
            self._count(len(low.chunks))
            low.chunks.append((self.first, last))

    def _count(self, number: int) -> None:
        low, builder = self.low, self.builder
        lanes = builder.zext(intrinsic(builder, "ctpop", WORD, [low.chunk_mask]), LONG)
        for array, index, step in (
            (low.launch, Launch.steps.index, low.i64(1)),
            (low.counters, 2 * number, low.i64(1)),
            (low.counters, 2 * number + 1, lanes),
        ):
            place = builder.gep(array, [low.i64(index)])
            builder.store(builder.add(builder.load(place), step), place)

    def jump(self, index: int) -> None:
        """The chunk ends; its lanes go on at `index`."""
        yields = self.polls(index)
        self._finish(None)
        self.builder.branch(self.target(index, yields))
        self.low.is_terminated = True

    def branch(self, index: int, otherwise: int) -> None:
        """The chunk ends; the lanes of `low.mask` go on at `index`, its others at `otherwise`."""
        low, builder = self.low, self.builder
        taken, lanes = low.mask, low.chunk_mask
        yields = self.polls(index)
        self._finish(None)
        low.is_terminated = True
        if self.is_exit(index):
            self._exit_some(taken, self.target(otherwise))
            return
        if self.is_exit(otherwise):
            self._exit_some(builder.and_(lanes, builder.not_(taken)), self.target(index, yields))
            return
        some, parted = map(low.function.append_basic_block, ("some", "parted"))
        builder.cbranch(builder.icmp_unsigned("==", taken, low.i32(0)), self.target(otherwise), some)
        builder.position_at_end(some)
        builder.cbranch(builder.icmp_unsigned("==", taken, lanes), self.target(index, yields), parted)
        builder.position_at_end(parted)
        if yields:
            self._stall(taken)
            low.set_warp_field(Warp.has_yielded, low.i64(1))
        self._part(taken, index, otherwise)

    def _part(self, some: Value, index: int, otherwise: int) -> None:
        builder = self.builder
        self.body(index)
        self.body(otherwise)
        builder.store(some, self.some)
        builder.store(self.low.i32(index), self.elsewhere)
        builder.store(self.low.i32(otherwise), self.next)
        builder.branch(self.part)

    def leave_to(self, indices: list[int]) -> None:
        """The chunk ends; an operation has set the lanes' counters, each to one of `indices`."""
        yields = any(self.polls(index) for index in indices)
        self._finish(None)
        for index in indices:
            self.body(index)
        if yields:
            self._stall()
            self.low.set_warp_field(Warp.has_yielded, self.low.i64(1))
        self.builder.branch(self.pick)
        self.low.is_terminated = True

    def is_exit(self, index: int) -> bool:
        """Whether the thread's end is all that comes at `index`: lanes that go there have ended."""
        if index >= self.end:
            return True
        instruction = self.low.kernel.instructions[index]
        return instruction.guard is None and instruction.parts[0] in ("ret", "exit")

    def exit(self, lanes: Value, otherwise: int | None) -> None:
        """The chunk ends; `lanes` of it have ended, the others go on at `otherwise`."""
        self._finish(None)
        self.low.is_terminated = True
        self._exit_some(lanes, None if otherwise is None else self.target(otherwise))

    def _exit_some(self, lanes: Value, others: Any) -> None:
        low, builder = self.low, self.builder
        if others is not None:
            leave = low.function.append_basic_block("leave")
            builder.cbranch(builder.icmp_unsigned("==", lanes, low.i32(0)), others, leave)
            builder.position_at_end(leave)
        left = builder.and_(low.chunk_mask, builder.not_(lanes))
        live = builder.and_(builder.trunc(low.warp_field(Warp.live), WORD), builder.not_(lanes))
        low.set_warp_field(Warp.live, live)
        builder.store(left, self.active)
        if low.has_loose_barriers:
            low.invoke("lanes_exited", lanes, low.site)
        if others is None:
            builder.branch(self.pick)
        else:
            builder.cbranch(builder.icmp_unsigned("==", left, low.i32(0)), self.pick, others)

    # --- instructions that wait ---

    def resume_here(self) -> None:
        low, builder = self.low, self.builder
        site = low.site
        if low.chunk_start != site:
            self._finish(site)
            builder.branch(self.target(site))
            self._begin(site)
            low.begin_instruction(site)
        if low.instruction.guard is None:
            return
        parted, skip, all_of = map(low.function.append_basic_block, ("parted", "skip", "all"))
        builder.cbranch(builder.icmp_unsigned("==", low.mask, low.chunk_mask), all_of, skip)
        builder.position_at_end(skip)
        builder.cbranch(builder.icmp_unsigned("==", low.mask, low.i32(0)), self.target(site + 1), parted)
        builder.position_at_end(parted)
        self._part(low.mask, site, site + 1)
        builder.position_at_end(all_of)

    def leave_if_blocked(self, result: Value) -> None:
        """After a call that may block: a fault leaves `run`, RETRY sets the lanes aside at this instruction."""
        low, builder = self.low, self.builder
        leave, retry, on = map(low.function.append_basic_block, ("leave", "retry", "on"))
        goes_on = builder.or_(
            builder.icmp_unsigned("==", result, low.i32(DONE)),
            builder.icmp_unsigned("==", result, low.i32(DONE_BUT_YIELD)),
        )
        builder.cbranch(goes_on, on, leave)
        builder.position_at_end(leave)
        builder.cbranch(builder.icmp_unsigned("==", result, low.i32(FAILED)), self.fault, retry)
        builder.position_at_end(retry)
        self._stall()
        low.set_warp_field(Warp.site, low.i64(low.site))
        builder.store(low.i32(low.site), self.next)
        builder.branch(self.go)
        builder.position_at_end(on)

    def converge(self, kind: FaultKind) -> None:
        """All live lanes of the warp run this chunk together: they wait for each other where it begins.

        `kind` is the fault when they cannot; FaultKind.DEADLOCK lets lanes exit instead of coming.
        """
        low, builder = self.low, self.builder
        if self.needs is None or self.needs[0] == FaultKind.DEADLOCK:
            self.needs = (kind, low.site)
        if low.instruction.guard is not None and low.chunk_start != low.site and kind != FaultKind.DEADLOCK:
            apart, on = map(low.function.append_basic_block, ("apart", "on"))
            none = builder.icmp_unsigned("==", low.mask, low.i32(0))
            whole = builder.icmp_unsigned("==", low.mask, low.chunk_mask)
            builder.cbranch(builder.or_(none, whole), on, apart)
            builder.position_at_end(apart)
            low.invoke("report_divergence", low.mask, low.site, kind)
            builder.branch(self.fault)
            builder.position_at_end(on)

    def gather(self, members: Operand) -> None:
        """This instruction runs once the live lanes of its member mask are here."""
        self.low.resume_here()
        self.leave_unless_gathered("gather_members", self.low.slot(members, 32))

    def leave_unless_gathered(self, name: str, *arguments: Value) -> None:
        """Calls an operation of control.py, which sets the lanes aside itself unless it returns DONE."""
        low, builder = self.low, self.builder
        on, ask = map(low.function.append_basic_block, ("gathered", "ask"))
        result = low.invoke(name, low.chunk_mask, low.site, *arguments)
        builder.cbranch(builder.icmp_unsigned("==", result, low.i32(DONE)), on, ask)
        builder.position_at_end(ask)
        builder.cbranch(builder.icmp_unsigned("==", result, low.i32(FAILED)), self.fault, self.pick)
        builder.position_at_end(on)

    def _fill_head(self) -> None:
        """The chunk's prologue, known once the chunk has been translated."""
        low, builder = self.low, self.builder
        with builder.goto_block(self.head):
            if self.needs is None:
                builder.branch(self.code)
                return
            kind, site = self.needs
            gather = low.function.append_basic_block("gather")
            live = builder.trunc(low.warp_field(Warp.live), WORD)
            missing = builder.zext(builder.xor(live, builder.load(self.active)), LONG)
            loose = builder.or_(missing, low.warp_field(Warp.parked))
            builder.cbranch(builder.icmp_unsigned("==", loose, low.i64(0)), self.code, gather)
            builder.position_at_end(gather)
            ask = low.function.append_basic_block("ask")
            result = low.invoke("gather_all", builder.load(self.active), site, self.first, kind)
            builder.cbranch(builder.icmp_unsigned("==", result, low.i32(DONE)), self.code, ask)
            builder.position_at_end(ask)
            builder.cbranch(builder.icmp_unsigned("==", result, low.i32(FAILED)), self.fault, self.pick)


_POLLING = {"volatile", "acquire", "relaxed", "acq_rel"}


def _is_polling(parts: tuple[str, ...]) -> bool:
    if parts[0] == "ld":
        return not _POLLING.isdisjoint(parts)
    if parts[0] == "mbarrier":
        return parts[1] in ("test_wait", "try_wait")
    return parts[0] in ("atom", "nanosleep")
