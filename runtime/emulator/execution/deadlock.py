"""The lines of a deadlock's message: which warps wait, and for what."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.emulator.execution.residency import S_BLOCKS, S_IS_RUNNING, S_NUM_BLOCKS, SLOT_FIELDS, Slot
from runtime.emulator.execution.warp_state import (
    BLOCK_FIELDS,
    BLOCK_NUM_WARPS,
    BLOCK_WARPS,
    BLOCK_X,
    BLOCK_Z,
    BLOCKED,
    EXITED,
    WARP_FIELDS,
    WARP_LIVE,
    WARP_PCS,
    WARP_SITE,
    WARP_STATE,
)
from runtime.emulator.translation.program import LoadedKernel

_MAX_LINES = 24


def who_waits(slots: Iterable[Slot], kernel: LoadedKernel) -> list[str]:
    """A line for each block and place where its warps wait, for the clusters that are resident."""
    lines = []
    for slot in slots:
        header = slot.words(slot.address, SLOT_FIELDS)
        if header[S_IS_RUNNING]:
            for address in slot.words(int(header[S_BLOCKS]), int(header[S_NUM_BLOCKS])):
                lines += _of_block(slot, int(address), kernel)
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"… and {len(lines) - _MAX_LINES} more"]
    return lines


def _of_block(slot: Slot, address: int, kernel: LoadedKernel) -> list[str]:
    block = slot.words(address, BLOCK_FIELDS)
    places: dict[tuple[str, int], list[int]] = {}
    for index in range(int(block[BLOCK_NUM_WARPS])):
        warp = slot.words(int(block[BLOCK_WARPS]) + index * WARP_FIELDS * 8, WARP_FIELDS)
        if warp[WARP_STATE] == EXITED:
            place = ("have exited", -1)
        elif warp[WARP_STATE] == BLOCKED:
            place = ("wait at", int(warp[WARP_SITE]))
        else:
            counters = slot.words(int(warp[WARP_PCS]), 16).view(np.int32)
            live = [int(counters[lane]) for lane in range(32) if int(warp[WARP_LIVE]) >> lane & 1]
            place = ("poll at", min(live))
        places.setdefault(place, []).append(index)
    name = tuple(int(value) for value in block[BLOCK_X : BLOCK_Z + 1])
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
