"""Handles sequences that outgrow a model's ``rotary_switch`` (longrope): all of their tokens are then rotated
otherwise, and have to be recomputed."""

from __future__ import annotations

from runtime.engine.scheduling.host_pool import HostPool
from runtime.engine.scheduling.prefix_cache import RotatedPrefixes
from runtime.engine.scheduling.sequence import Sequence


def is_at_switch(sequence: Sequence, switch: int) -> bool:
    """Whether the next token that a running sequence computes is its first beyond the switch."""
    return sequence.num_computed == switch and not sequence.rotary_offset and not sequence.is_drawing_last


def choose_rotation(sequence: Sequence, switch: int, host_pool: HostPool | None) -> None:
    """Choose the rotation of a waiting sequence, whose tokens are all known. Its swapped content is dropped if that was
    rotated otherwise."""
    if sequence.rotary_offset or sequence.num_tokens <= switch:
        return
    sequence.rotary_offset = switch
    sequence.chain.salt = RotatedPrefixes(sequence.request.cache_salt, switch)
    if sequence.host_slots:
        assert host_pool is not None
        host_pool.give([slot for slots in sequence.host_slots for slot in slots])
        sequence.host_slots, sequence.first_pages, sequence.num_computed = [], [], 0


def within_switch(drafts: list[int], sequence: Sequence, start: int, switch: int) -> list[int]:
    """The draft tokens after the token at ``start`` that are rotated as it is."""
    return drafts if sequence.rotary_offset else drafts[: switch - start - 1]
