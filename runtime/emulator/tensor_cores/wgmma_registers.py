"""The registers that wgmma owns while it runs, and the code that watches other instructions touch them.

A byte for each such register lies in the register file: whether it was written since the last wgmma.fence, and
whether a wgmma in flight accumulates in it or reads it. Other instructions that name the register look there first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.emulator.protocols import Emitter
from runtime.emulator.translation.basic_blocks import definitions, registers_of
from runtime.emulator.translation.ptx import Kernel, Vector

WRITTEN, ACCUMULATES, IS_READ = 1, 2, 4


class WgmmaRegisters:
    """The accumulators and A fragments of all wgmma of a kernel.

    Attributes:
        index: register name → its byte among the state bytes.
        offset: of the state bytes in the register file, set by the translation.
    """

    def __init__(self, kernel: Kernel) -> None:
        names: dict[str, None] = {}
        for instruction in kernel.instructions:
            if instruction.opcode.startswith("wgmma.mma_async"):
                for operand in instruction.operands[:2]:
                    if isinstance(operand, Vector):
                        names.update(dict.fromkeys(register.name for register in registers_of(operand)))
        self.index = {name: number for number, name in enumerate(names)}
        self.offset = -1
        self._seen: dict[tuple[str, bool], None] = {}
        self._chunk = -1

    @property
    def size_bytes(self) -> int:
        return -(-len(self.index) // 64) * 64

    def __bool__(self) -> bool:
        return bool(self.index)

    def forget(self) -> None:
        """After a wgmma instruction: earlier checks no longer hold."""
        self._seen.clear()

    def watch(self, low: Emitter) -> None:
        """Emits the check of the state bytes before the current instruction."""
        instruction = low.instruction
        if instruction.opcode.startswith("wgmma.mma_async"):
            self.forget()
            return
        if low.chunk_start != self._chunk:
            self._chunk = low.chunk_start
            self.forget()
        written = definitions(instruction) & self.index.keys()
        named = {register.name for operand in instruction.operands for register in registers_of(operand)}
        self._check(low, sorted((named & self.index.keys()) - written), ACCUMULATES, False)
        self._check(low, sorted(written), ACCUMULATES | IS_READ, True)

    def _check(self, low: Emitter, names: Iterable[str], forbidden: int, writes: bool) -> None:
        fresh = [name for name in names if (name, writes) not in self._seen]
        if not fresh:
            return
        state: Any = None
        for name in fresh:
            self._seen[name, writes] = None
            place = low.state_byte(self.offset + self.index[name])
            value = low.builder.load(place)
            if writes:
                low.builder.store(low.builder.or_(value, value.type(WRITTEN)), place)
            state = value if state is None else low.builder.or_(state, value)
        low.call_if(low.builder.and_(state, state.type(forbidden)), "wgmma_touched")
