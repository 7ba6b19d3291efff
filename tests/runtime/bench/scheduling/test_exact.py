"""Scheduling never changes an answer: ids and the bits of every log probability, under a dozen schedules."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.exact import SCHEDULES, bench_exact, differences, engine_maker, make_requests, serve
from tests.models.folders import load_golden, write_model


@pytest.mark.parametrize("num_requests", [80, pytest.param(300, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_the_demo_model_gives_the_same_bits_under_every_schedule(num_requests: int) -> None:
    make = engine_maker({"device": "cpu", "seed": 0}, exact=True)
    report = bench_exact(make, make, num_requests=num_requests, num_rounds=0, max_model_len=64)
    assert [(row["name"], row["first"]) for row in report["schedules"] if row["num_different"]] == []
    assert report["is_exact"]
    assert report["num_choices"] > num_requests
    preempted = [row["name"] for row in report["schedules"] if row["num_preemptions"] >= num_requests // 80]
    assert len(preempted) >= 4, preempted
    assert len(report["schedules"]) >= 12


@pytest.mark.exhaustive  # a minute; the fuzz on an emulated GPU runs in exact mode each time
@pytest.mark.emulator
def test_a_qwen3_gives_the_same_bits_on_an_emulated_gpu(tmp_path: Path) -> None:
    """Exact mode where the default mode is not: its products of few rows and its decodes add in other orders."""
    folder = write_model(tmp_path, load_golden("qwen3_tied_gqa4"))
    arguments = {"model": folder, "device": "emulated:sm_80", "dtype": "bfloat16", "block_size": 8, "seed": 0}
    report = bench_exact(
        engine_maker(arguments, exact=True), engine_maker(arguments, exact=False),
        num_requests=12, num_schedules=5, num_rounds=0, max_model_len=64,
    )  # fmt: skip
    assert [(row["name"], row["first"]) for row in report["schedules"] if row["num_different"]] == []
    assert sum(row["num_preemptions"] for row in report["schedules"]) >= 2

    answers = []
    for schedule in (SCHEDULES[0], SCHEDULES[1]):
        settings = {key: value for key, value in schedule.settings.items() if key != "num_blocks"}
        engine = engine_maker(arguments, exact=False)({"max_model_len": 64, "num_blocks": 64, **settings})
        answers.append(serve(engine, make_requests(12, 64, engine.info.vocab_size), schedule.arrivals))
    assert differences(*answers), "the default mode is as exact: this test proves nothing"


def test_a_single_bit_is_a_difference() -> None:
    make = engine_maker({"device": "cpu", "seed": 0}, exact=True)
    requests = make_requests(12, 64, make({"max_model_len": 64, "num_blocks": 64}).info.vocab_size)
    one, other = (serve(make({"max_model_len": 64, "num_blocks": 64}), requests, "together") for _ in range(2))
    assert differences(one, other) == []
    key = next(iter(other))
    first = other[key].logprobs[0]
    other[key].logprobs[0] = msgspec.structs.replace(first, logprob=first.logprob * (1 + 2**-22))
    assert differences(one, other) == ["r0 choice 0: logprob 0"]
    other[key].token_ids[-1] ^= 1
    assert differences(one, other) == [f"r0 choice 0: token {len(other[key].token_ids) - 1}"]
    other[key].token_ids.pop()
    assert differences(one, other) == [f"r0 choice 0: token {len(other[key].token_ids)}"]


def test_a_failed_request_is_no_measurement() -> None:
    make = engine_maker({"device": "cpu", "seed": 0}, exact=True)
    engine = make({"max_model_len": 64, "num_blocks": 64})
    requests = make_requests(2, 64, engine.info.vocab_size)
    engine.executor.model = None  # type: ignore[assignment]
    with pytest.raises(BenchmarkError, match="request r0 ended with error"):
        serve(engine, requests, "together")
    with pytest.raises(BenchmarkError, match="--num-schedules 1 must be 2 to"):
        bench_exact(make, make, num_schedules=1)
