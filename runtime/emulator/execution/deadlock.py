"""The lines of a deadlock's message: which warps wait, and for what."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_int32

from runtime.emulator.execution.residency import Slot
from runtime.emulator.execution.state import BLOCKED, EXITED, Block, Warp
from runtime.emulator.translation.program import LoadedKernel

_MAX_LINES = 24


def who_waits(slots: Iterable[int], kernel: LoadedKernel) -> list[str]:
    """A line for each block and place where its warps wait, for the clusters at these addresses that are resident."""
    lines = []
    for slot in map(Slot, slots):
        if slot.is_running:
            for rank in range(slot.num_blocks):
                lines += _of_block(Block(Slot(slot.blocks)[rank]), kernel)
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"… and {len(lines) - _MAX_LINES} more"]
    return lines


def _of_block(block: Block, kernel: LoadedKernel) -> list[str]:
    places: dict[tuple[str, int], list[int]] = {}
    for index in range(block.num_warps):
        warp = Warp(block.warps + index * Warp.size_bytes)
        if warp.state == EXITED:
            place = ("have exited", -1)
        elif warp.state == BLOCKED:
            place = ("wait at", warp.site)
        else:
            counters = (c_int32 * 32).from_address(warp.pcs)
            place = ("poll at", min(counters[lane] for lane in range(32) if warp.live >> lane & 1))
        places.setdefault(place, []).append(index)
    name = block.x, block.y, block.z
    lines = []
    for (what, site), warps in sorted(places.items(), key=lambda item: item[0][1]):
        text = f"block {name}: warps {ranges(warps)} {what}"
        if site >= 0:
            line = kernel.kernel.instructions[site].line
            text += f" line {line}: {kernel.module.lines[line - 1].strip()}"
        lines.append(text)
    return lines


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    words: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], -2]:
        if number == previous + 1:
            previous = number
            continue
        words.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(words)
