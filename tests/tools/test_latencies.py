"""The model of kernels' times meets an H200's measured rows, each family by rates that were found without it."""

from __future__ import annotations

import dataclasses

import pytest

from tools.kernel_costs import latencies
from tools.kernel_costs.latencies import BATCHES, STEPS, Rates, Row, errors, fit, measured_rows, predicted

MOST_MEDIAN, MOST_ERROR = 0.10, 0.30


def test_rows_are_predicted_without_their_family() -> None:
    rows = measured_rows()
    assert len(rows) >= 40
    assert len({row.family for row in rows}) >= 8
    pairs = list(predicted(rows))
    assert {row for row, _ in pairs} == set(rows)
    middle, worst = errors(pairs)
    assert middle <= MOST_MEDIAN
    assert worst <= MOST_ERROR


def test_a_familys_own_rows_change_nothing_of_its_prediction() -> None:
    rows = [row for row in measured_rows() if row.family in ("gemv", "skinny")]
    slower = [dataclasses.replace(row, seconds=3 * row.seconds) if row.family == "gemv" else row for row in rows]
    before, after = ({row.case: modelled for row, modelled in predicted(each)} for each in (rows, slower))
    for row in rows:
        assert (before[row.case] == after[row.case]) == (row.family == "gemv"), row


def test_rates_are_found_again() -> None:
    rates = Rates(7e-6, 4.3e12, 6e11, 6e12)
    given = [
        Row("gemv", f"{number}", *work, 0.0)
        for number, work in enumerate(((5e7, 0, 0), (2e8, 0, 0), (0, 6e6, 0), (0, 2e7, 0), (0, 0, 1e8), (0, 0, 4e8)))
    ]
    found = fit([dataclasses.replace(row, seconds=rates.seconds(row)) for row in given])
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(rates), rel=0.02)


def test_steps_are_predicted_by_a_chain_of_products() -> None:
    """Neighbours that fit only shorten a step, never below the stream of its bytes."""
    middle, worst = errors([(step, step.before_s()) for step in STEPS])
    assert middle <= MOST_MEDIAN
    assert worst <= MOST_ERROR
    for step in STEPS:
        assert step.least_s < step.now_s() < step.before_s()


def test_steps_of_several_sequences_are_predicted_by_rates_of_single_kernels() -> None:
    rates = fit(measured_rows())
    pairs = [(step, step.before_s(rates)) for step in BATCHES]
    middle, worst = errors([*pairs, *((step, step.before_s()) for step in STEPS)])
    assert middle <= MOST_MEDIAN
    assert worst <= MOST_ERROR
    assert all(step.now_s(rates) <= modelled for step, modelled in pairs)


def test_the_page_marks_what_was_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [row for row in measured_rows() if row.family in ("gemv", "skinny")]
    monkeypatch.setattr(latencies, "measured_rows", lambda: few)
    text = latencies.page()
    assert all(row.case in text for row in few)
    assert "now, modelled, never measured" in text
    assert f"{len(few)} rows, each family's by the others" in text
