"""Pairs of blocks as runs and waves."""

from __future__ import annotations

from runtime.kv.transfer import Run, waves_of


def test_pairs_that_follow_one_another_are_one_run() -> None:
    pairs = [(5, 1), (3, 7), (6, 2), (4, 0), (7, 4), (3, 9)]
    assert waves_of(pairs) == [[Run(3, 7, 1), Run(3, 9, 1), Run(4, 0, 3), Run(7, 4, 1)]]
    assert waves_of([(index, index + 2) for index in range(18)]) == [[Run(0, 2, 18)]]
    assert waves_of([]) == []


def test_pairs_whose_order_matters_are_waves() -> None:
    assert waves_of([(3, 7), (4, 8), (5, 7)]) == [[Run(3, 7, 2)], [Run(5, 7, 1)]]
    assert waves_of([(3, 4), (4, 5)]) == [[Run(3, 4, 2)]]
    assert waves_of([(3, 4), (4, 5)], is_within=True) == [[Run(3, 4, 1)], [Run(4, 5, 1)]]
    assert waves_of([(3, 9), (8, 3), (2, 4)], is_within=True) == [
        [Run(3, 9, 1)],
        [Run(2, 4, 1), Run(8, 3, 1)],
    ]
    assert waves_of([(3, 3), (4, 5)], is_within=True) == [[Run(4, 5, 1)]]
    assert waves_of([(3, 3)], is_within=True) == []
