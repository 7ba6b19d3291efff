"""The arena's bookkeeping: classes of sizes, splitting and merging, and an integrity check that can fail."""

from __future__ import annotations

import random

import pytest

from runtime.device.arena import GRANULE, Arena, Block, round_to_class, size_class

BASE = 1 << 40


def test_rounding_loses_little() -> None:
    rng = random.Random(5)
    for _ in range(20_000):
        size = int(2 ** rng.uniform(0, 40))
        rounded = round_to_class(size)
        assert rounded % GRANULE == 0
        assert size <= rounded
        assert rounded - size < max(GRANULE, size / 16 + GRANULE)
        assert round_to_class(rounded) == rounded
    assert round_to_class(0) == round_to_class(1) == GRANULE


def test_classes_are_in_the_order_of_sizes() -> None:
    classes = [size_class(granules) for granules in range(1, 5000)]
    assert classes == sorted(classes)
    assert size_class(1 << 30) - size_class(1 << 29) == 16
    for granules in range(1, 5000):  # whatever lies in the class of a rounded request is long enough for it
        request = round_to_class(granules * GRANULE) // GRANULE
        assert (
            size_class(request) > size_class(granules)
            or request == granules
            or size_class(request - 1) < size_class(request)
        )


def test_split_and_merge() -> None:
    arena = Arena()
    assert arena.take(GRANULE) is None
    arena.add_segment(BASE, 8 * GRANULE)
    blocks = [arena.take(GRANULE) for _ in range(8)]
    assert arena.take(GRANULE) is None
    assert [block.address for block in blocks if block] == [BASE + n * GRANULE for n in range(8)]
    assert arena.check_integrity() == (8 * GRANULE, 0)
    kept = [block for block in blocks if block is not None]
    for number in (1, 3, 5):  # none beside another
        arena.give(kept[number])
    assert (arena.free_bytes, arena.largest_free_bytes) == (3 * GRANULE, GRANULE)
    assert arena.take(2 * GRANULE) is None
    arena.give(kept[4])  # joins 3 and 5
    assert arena.largest_free_bytes == 3 * GRANULE
    assert arena.remove_free_segments() == []
    for number in (0, 2, 6, 7):
        arena.give(kept[number])
    assert arena.check_integrity() == (0, 8 * GRANULE)
    assert arena.remove_free_segments() == [(BASE, 8 * GRANULE)]
    assert arena.num_segments == 0
    assert arena.check_integrity() == (0, 0)


def test_the_best_class_is_taken_and_segments_are_not_joined() -> None:
    arena = Arena()
    arena.add_segment(BASE, 64 * GRANULE)
    arena.add_segment(BASE + 64 * GRANULE, 4 * GRANULE)  # right behind, but another piece of the driver's
    block = arena.take(3 * GRANULE)
    assert block is not None
    assert block.address == BASE + 64 * GRANULE
    arena.give(block)
    assert arena.largest_free_bytes == 64 * GRANULE
    assert len(arena.remove_free_segments()) == 2


def test_giving_back_twice_is_noticed() -> None:
    arena = Arena()
    arena.add_segment(BASE, 4 * GRANULE)
    block = arena.take(GRANULE)
    assert block is not None
    arena.give(block)
    with pytest.raises(AssertionError, match="twice"):
        arena.give(block)


def filled() -> tuple[Arena, list[Block]]:
    arena = Arena()
    arena.add_segment(BASE, 16 * GRANULE)
    blocks = [block for _ in range(5) if (block := arena.take(2 * GRANULE)) is not None]
    arena.give(blocks[1])
    arena.check_integrity()
    return arena, blocks


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda arena, blocks: setattr(blocks[0], "size", GRANULE), "gap or overlap"),
        (lambda arena, blocks: setattr(blocks[2], "address", BASE + GRANULE), "gap or overlap"),
        (lambda arena, blocks: setattr(blocks[3], "before", None), "does not know it"),
        (lambda arena, blocks: setattr(blocks[0], "is_free", True), "not merged"),
        (lambda arena, blocks: setattr(blocks[1], "is_free", False), "not free"),
        (lambda arena, blocks: setattr(blocks[4], "segment", 0), "of 1024 bytes"),
        (lambda arena, blocks: arena._remove(blocks[1]), "not in its bin"),
        (lambda arena, blocks: setattr(arena, "_filled", 0), "index of bins"),
    ],
)
def test_the_integrity_check_can_fail(damage: object, words: str) -> None:
    arena, blocks = filled()
    damage(arena, blocks)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=words):
        arena.check_integrity()
