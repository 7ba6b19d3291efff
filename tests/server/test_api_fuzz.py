"""A thousand requests, right, wrong and spoilt, by the server's own description of itself
(tools/serving/fuzz_api.py sends more): no 5xx, no hang, no answer that is not described."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.real_server import serving_real
from tests.waiting import wait_until
from tools.serving.fuzz_api import Fuzzer


@pytest.mark.filterwarnings("ignore::DeprecationWarning:schemathesis")
@pytest.mark.parametrize("num_cases", [150, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_cases_of_every_kind(tiny_folder: Path, num_cases: int) -> None:
    with serving_real(tiny_folder, load_format="dummy", max_model_len=64, num_blocks=512) as real:
        fuzzer = Fuzzer(real.url, seed=20_261_127)
        fuzzer.run(num_cases)
        fuzzer.check_rest()
        wait_until(lambda: real.num_used_blocks == 0)  # of those that have left, too
    record = fuzzer.record
    assert record.failures == []
    assert record.num_cases >= num_cases
    kinds = {route.rpartition("(")[2] for route in record.statuses}
    assert kinds == {"positive)", "negative)", "spoilt)", "raw)"}
    accepted = {route for route, counts in record.statuses.items() if counts["200"]}
    paths = ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/api/chat", "/api/generate",
             "/pooling", "/rerank")  # fmt: skip
    assert {f"POST {path} (positive)" for path in paths} <= accepted
