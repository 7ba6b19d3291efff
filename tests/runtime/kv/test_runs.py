"""Pairs of blocks as runs and waves."""

from __future__ import annotations

from runtime.kv.runs import Run, waves_of


def test_pairs_that_follow_one_another_are_one_run() -> None:
    blocks, slots = ("block", 20), ("host slot", 20)
    pairs = [(5, 1), (3, 7), (6, 2), (4, 0), (7, 4), (3, 9)]
    assert waves_of("swap_out", pairs, blocks, slots) == [[Run(3, 7, 1), Run(3, 9, 1), Run(4, 0, 3), Run(7, 4, 1)]]
    assert waves_of("swap_out", [(index, index + 2) for index in range(18)], blocks, slots) == [[Run(0, 2, 18)]]
    assert waves_of("swap_out", [], blocks, slots) == []


def test_pairs_whose_order_matters_arewaves_of() -> None:
    blocks, slots = ("block", 20), ("host slot", 20)
    assert waves_of("swap_out", [(3, 7), (4, 8), (5, 7)], blocks, slots) == [[Run(3, 7, 2)], [Run(5, 7, 1)]]
    assert waves_of("swap_in", [(3, 4), (4, 5)], slots, blocks) == [[Run(3, 4, 2)]]
    assert waves_of("copies", [(3, 4), (4, 5)], blocks, blocks) == [[Run(3, 4, 1)], [Run(4, 5, 1)]]
    assert waves_of("copies", [(3, 9), (8, 3), (2, 4)], blocks, blocks) == [
        [Run(3, 9, 1)],
        [Run(2, 4, 1), Run(8, 3, 1)],
    ]
    assert waves_of("copies", [(3, 3), (4, 5)], blocks, blocks) == [[Run(4, 5, 1)]]
    assert waves_of("copies", [(3, 3)], blocks, blocks) == []
