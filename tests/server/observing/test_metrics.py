"""What `/metrics` says after known traffic, read by Prometheus' own parser; and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.observing import metrics
from server.observing.meter import Histogram, one_two_five
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.real_server import Real, serving_real
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

DASHBOARD = Path(metrics.__file__).parents[1] / "deploy" / "grafana-dashboard.json"

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "request_success",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_params_max_tokens",
)  # fmt: skip

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


@pytest.fixture(scope="module")
def real(tiny_folder: Path) -> Iterator[Real]:
    with serving_real(tiny_folder, load_format="dummy", seed=0, num_blocks=600, max_num_seqs=64) as server:
        yield server


def scrape(http: httpx.Client) -> Samples:
    """Values by name and labels."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            by_labels = samples.setdefault(sample.name, {})
            assert labels not in by_labels, f"{sample.name}{labels} stands there twice"
            by_labels[labels] = sample.value
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    found = [value for key, value in samples[name].items() if set(labels.items()) <= set(key)]
    assert found, (name, labels)
    return sum(found)


def complete(http: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Hello, world", "max_tokens": 5, "ignore_eos": True, **fields}
    return http.post("/v1/completions", json=body)


@pytest.mark.parametrize("prefix", ["vllm:", "xserv:"])
def test_names_types_and_labels_are_vllms(real: Real, prefix: str) -> None:
    assert complete(real.http, real.model).status_code == 200
    families = {family.name: family for family in text_string_to_metric_families(real.http.get("/metrics").text)}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            family = families[prefix + name]
            assert family.type == kind
            for sample in family.samples:
                further = {"finished_reason"} if name == "request_success" else set()
                assert set(sample.labels) - {"le"} == {"model_name", "engine"} | further
                assert sample.labels["model_name"] == real.model
                assert sample.labels["engine"] == "0"
    buckets = [s.labels["le"] for s in families[f"{prefix}time_to_first_token_seconds"].samples if "le" in s.labels]
    assert buckets[:4] == ["0.001", "0.005", "0.01", "0.02"]
    assert buckets[-2:] == ["2560.0", "+Inf"]


def test_traffic_is_counted(real: Real) -> None:
    """Three requests of two choices, a stop string, an abort by the client, and one that is refused."""
    wait_until(lambda: real.num_used_blocks == 0)
    before = scrape(real.http)
    for _ in range(3):
        assert complete(real.http, real.model, n=2).status_code == 200
    text = complete(real.http, real.model, max_tokens=60, seed=1).json()["choices"][0]["text"]
    stopped = complete(real.http, real.model, max_tokens=60, seed=1, stop=[text[2]]).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    body = {"model": real.model, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with real.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    assert complete(real.http, real.model, n=0).status_code == 400
    after: Samples = {}

    def has_ended() -> bool:
        """The stream, too, of which the server hears when its connection has gone."""
        after.update(scrape(real.http))
        return added("xserv:http_requests_total", handler="/v1/completions", status="200") == 6

    def added(name: str, **labels: str) -> float:
        known = any(set(labels.items()) <= set(key) for key in before.get(name, ()))
        return total(after, name, **labels) - (total(before, name, **labels) if known else 0)

    wait_until(has_ended)
    wait_until(lambda: real.num_used_blocks == 0)
    after.update(scrape(real.http))
    for prefix in ("vllm:", "xserv:"):
        ended = {reason: added(f"{prefix}request_success_total", finished_reason=reason) for reason in
                 ("stop", "length", "abort", "error")}  # fmt: skip
        assert ended == {"stop": 1, "length": 7, "abort": 1, "error": 0}
        assert added(f"{prefix}e2e_request_latency_seconds_count") == 9
        assert added(f"{prefix}time_to_first_token_seconds_count") == 9
        assert added(f"{prefix}request_params_n_sum") == 3 * 2 * 2 + 3
        assert added(f"{prefix}request_prompt_tokens_sum") == 8 * 12 + 1
        generated = added(f"{prefix}generation_tokens_total")
        assert generated >= 3 * 2 * 5 + 60 + 1
        measured = added(f"{prefix}inter_token_latency_seconds_count")
        assert 0 < measured <= generated - 9
        assert added(f"{prefix}time_per_output_token_seconds_count") == measured
        assert added(f"{prefix}prompt_tokens_total") == 5 * 12 + 1
        queries, hits = (added(f"{prefix}prefix_cache_{name}_total") for name in ("queries", "hits"))
        assert queries >= 5 * 12
        assert added("xserv:prefix_cache_missed_total") == queries - hits
        steps = added(f"{prefix}iteration_tokens_total_count")
        assert 60 <= steps <= added("xserv:num_steps_total") + 1
        assert added(f"{prefix}iteration_tokens_total_sum") >= generated
        for phase in ("queue", "prefill", "decode", "inference"):
            assert added(f"{prefix}request_{phase}_time_seconds_count") >= 8
        assert added(f"{prefix}request_queue_time_seconds_sum") >= 0
        e2e, parts = (added(f"{prefix}{name}_seconds_sum") for name in
                      ("e2e_request_latency", "request_inference_time"))  # fmt: skip
        assert e2e >= parts > 0
    route = "/v1/completions"
    assert added("xserv:http_requests_total", handler=route, method="POST", status="200") == 6
    assert added("xserv:http_requests_total", handler=route, method="POST", status="400") == 1


def test_gauges_while_requests_run(real: Real) -> None:
    body = {"model": real.model, "prompt": "x", "max_tokens": 3500, "ignore_eos": True, "stream": True, "n": 3}
    with real.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(40):
            next(lines)
        with httpx.Client(base_url=real.url, timeout=TIMEOUT_S) as other:
            samples = scrape(other)
    assert total(samples, "vllm:num_requests_running") == 3
    assert 0 < total(samples, "vllm:kv_cache_usage_perc") <= 1
    assert total(samples, "xserv:open_requests") == 1
    assert total(samples, "xserv:engine_up") == 1


def test_every_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram((1, 8, 16))
    for value in (0, 1, 1.5, 8, 16, 17, 1e9):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five(99) == (1, 2, 5, 10, 20, 50)


@pytest.mark.parametrize("max_tokens", [1, 200])
def test_a_stop_string_counts_as_a_stop_whatever_the_engine_says(
    tokenizer: Tokenizer, fake_engine: FakeEngineClient, max_tokens: int
) -> None:
    """The engine ends the first by its length; the second it may have ended before it hears of the stop."""
    with serving(fake_engine, tokenizer) as served:
        body = {"prompt": "x", "max_tokens": max_tokens, "stop": ["G"], "model": "fake-model"}
        choice = served.http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        wait_until(lambda: "vllm:request_success_total" in scrape(served.http))
        samples = scrape(served.http)
        assert total(samples, "vllm:request_success_total", finished_reason="stop") == 1
        assert total(samples, "vllm:request_success_total") == 1


def test_a_dead_engine_is_seen(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    with serving(fake_engine, tokenizer) as served:
        assert total(scrape(served.http), "xserv:engine_up") == 1
        fake_engine.die()
        samples = scrape(served.http)
        assert total(samples, "xserv:engine_up") == 0
        assert "vllm:num_requests_running" not in samples
        assert served.http.get("/ready").status_code == 503


def test_clients_make_no_new_series(served: Served) -> None:
    """Neither by paths nor by methods nor by names."""
    for path in ("/a", "/b", "/v1/models/x"):
        served.http.get(path)
    served.http.request("PURGE", "/a")
    handlers = {dict(labels)["handler"] for labels in scrape(served.http)["xserv:http_requests_total"]}
    assert "none" in handlers
    assert not {"/a", "/b", "/v1/models/x"} & handlers


def test_two_servers_share_nothing(served: Served, tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    with serving(fake_engine, tokenizer) as other:
        other.http.get("/v1/models")
        assert total(scrape(other.http), "xserv:http_requests_total", handler="/v1/models") == 1


def test_names_keep_their_colons_whatever_is_accepted(served: Served) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=1.0.0;escaping=underscores;q=0.5"
    response = served.http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nvllm:time_to_first_token_seconds_bucket{" in response.text


def test_the_dashboard_asks_for_what_there_is(real: Real) -> None:
    """Every panel's expression names metrics that this server has, with labels that they have."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["title"] == "xserv"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) > 10
    assert complete(real.http, real.model).status_code == 200  # what counts answers is there behind the first
    samples = scrape(real.http)
    samples["xserv:lost_log_lines"] = samples["xserv:open_requests"]  # only `serve` has a log
    for panel in dashboard["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            names = re.findall(r"(?:vllm:|xserv:|process_)[a-z0-9_]+", target["expr"])
            assert names, target["expr"]
            for name in names:
                assert name in samples, f"{panel['title']}: no metric {name}"
                labels = {label for key in samples[name] for label, _ in key}
                used = re.findall(r"by \((\w+)\)", target["expr"])
                used += ["model_name"] * ("model_name" in target["expr"])
                assert set(used) <= labels, (panel["title"], used, labels)


def test_speculation_is_counted(tiny_folder: Path) -> None:
    """The answer repeats itself, since nothing else is allowed: what is proposed is drawn."""
    with serving_real(tiny_folder, load_format="dummy", seed=0, num_blocks=600, speculation="ngram") as server:
        body = {"prompt": [5, 6, 7] * 9, "max_tokens": 150, "allowed_token_ids": [6], "ignore_eos": True}
        for _ in range(10):  # looks are rare where steps are so short
            assert server.http.post("/v1/completions", json=body).status_code == 200
        samples = scrape(server.http)
    for prefix in ("vllm:spec_decode_", "xserv:spec_decode_"):
        (drafts,), (tried,), (kept,) = (
            samples[f"{prefix}{name}_total"].values()
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        )
        by_position = samples[f"{prefix}num_accepted_tokens_per_pos_total"]
        assert 0 < drafts <= tried
        assert 0 < kept <= tried
        assert sum(by_position.values()) == kept
        assert {dict(labels)["position"] for labels in by_position} == set("0123456")
