"""Traces: both formats, what is refused, and tokens that keep the prefix structure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runtime.bench.load.traces import (
    MOONCAKE_BLOCK_LEN,
    Trace,
    TraceError,
    TraceRequest,
    beside_decodes,
    numbered,
    random_tokens,
    read_trace,
    shared_prefixes,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "traces"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_azure(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
    trace = read_trace(write(tmp_path / "conv.csv", AZURE + rows))
    assert trace.name == "conv"
    assert [(r.input_len, r.output_len, r.hash_ids) for r in trace.requests] == [(374, 44, ()), (396, 109, ())]
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[1].arrival_s == pytest.approx(4.314579)
    assert trace.longest == 505


def mooncake_line(timestamp: object = 0, input_length: object = 700, hash_ids: object = (3, 4)) -> str:
    ids = list(hash_ids) if isinstance(hash_ids, tuple) else hash_ids
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": 9, "hash_ids": ids}
    return json.dumps(row) + "\n"


def test_mooncake(tmp_path: Path) -> None:
    lines = mooncake_line(1000) + mooncake_line(4500, 1024, (3, 8))
    trace = read_trace(write(tmp_path / "conv.jsonl", lines))
    assert trace.requests == (TraceRequest(0.0, 700, 9, (3, 4)), TraceRequest(3.5, 1024, 9, (3, 8)))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "TIMESTAMP,ContextTokens\n", "lacks GeneratedTokens"),
        ("t.csv", AZURE + "yesterday,1,1\n", "t.csv:2: TIMESTAMP 'yesterday'"),
        ("t.csv", AZURE + "2023-11-16 18:15:50.9951690,0,1\n", "t.csv:2: ContextTokens '0'"),
        ("t.csv", AZURE + "2023-11-16 18:15:50.9951690,5,nan\n", "GeneratedTokens 'nan'"),
        ("t.csv", AZURE, "no request"),
        ("t.jsonl", mooncake_line() + "{\n", "t.jsonl:2: not JSON"),
        ("t.jsonl", "[]\n", "not a JSON object"),
        ("t.jsonl", mooncake_line(float("nan")), "timestamp nan"),
        ("t.jsonl", mooncake_line(True), "timestamp True"),
        ("t.jsonl", mooncake_line(hash_ids=(3,)), "1 hash_ids for input_length 700, which is 2 blocks"),
        ("t.jsonl", mooncake_line(hash_ids=(3, -4)), "hash_ids must be"),
        ("t.jsonl", mooncake_line(hash_ids=None), "hash_ids must be"),
        ("t.jsonl", mooncake_line(input_length=None), "input_length None"),
        ("t.txt", "", "is a .csv"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(write(tmp_path / name, text))
    assert words in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_prompts_are_equal_exactly_where_hashes_are() -> None:
    length = 2 * MOONCAKE_BLOCK_LEN + 40
    trace = Trace(
        "t", (TraceRequest(0, length, 1, (5, 6, 7)), TraceRequest(0, length, 1, (5, 6, 9)), TraceRequest(0, 30, 1))
    )
    for fill in (numbered, random_tokens(50_000)):
        first, second, third = (trace.prompt_ids(index, fill) for index in range(3))
        assert first.dtype == np.int32
        assert len(first) == length
        assert (first[:1024] == second[:1024]).all()
        assert (first[1024:] != second[1024:]).mean() > 0.9
        assert (third != first[:30]).mean() > 0.9
        assert (trace.prompt_ids(0, fill) == first).all()
    assert (trace.prompt_ids(2, random_tokens(9)) >= 0).all()
    assert (trace.prompt_ids(2, random_tokens(9)) < 9).all()


def test_scaled() -> None:
    trace = Trace("t", (TraceRequest(0, 1000, 10, (1, 2)), TraceRequest(8, 100, 900, (3,))))
    half = trace.scaled(rate=4.0, length=0.5)
    assert half.requests == (TraceRequest(0, 500, 5, (1, 2)), TraceRequest(2, 50, 450, (3,)))
    assert half.hash_block_len == 256
    assert len(set(half.prompt_ids(0, numbered))) == 2
    cut = trace.scaled(max_len=200)
    assert [(r.input_len, r.output_len) for r in cut.requests] == [(190, 10), (100, 100)]
    third = trace.scaled(length=1 / 3)  # 333 tokens, blocks of 171: what they do not cover is the request's own
    assert len(third.prompt_ids(0, numbered)) == 333
    for bad in ({"rate": 0.0}, {"length": float("nan")}, {"rate": float("inf")}, {"max_len": 1}):
        with pytest.raises(TraceError):
            trace.scaled(**bad)  # type: ignore[arg-type]
    with pytest.raises(TraceError):
        trace.head(0)


def test_beside_decodes() -> None:
    trace = beside_decodes(
        num_decodes=2, decode_len=50, context_len=4, prompt_len=400, num_prompts=2, first_s=1.0, gap_s=0.5
    )
    assert [(r.arrival_s, r.input_len, r.output_len) for r in trace.requests] == [
        (0.0, 4, 50), (0.0, 4, 50), (1.0, 400, 1), (1.5, 400, 1),
    ]  # fmt: skip
    with pytest.raises(TraceError):
        beside_decodes(num_decodes=2, decode_len=0, context_len=4, prompt_len=4, num_prompts=2, first_s=1.0, gap_s=0.5)


@pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data/traces")
@pytest.mark.parametrize(
    ("name", "count"), [("AzureLLMInferenceTrace_conv.csv", 19_366), ("mooncake_conversation.jsonl", 12_031)]
)
def test_the_recorded_traces(name: str, count: int) -> None:
    trace = read_trace(DATA / name)
    assert len(trace.requests) == count
    assert 3000 < trace.requests[-1].arrival_s < 4000


def test_a_multiplied_trace_has_other_users_beside_its_own() -> None:
    trace = Trace("t", (TraceRequest(0.0, 600, 2, (1, 2)), TraceRequest(3.0, 600, 2, (1, 3))))
    twice = trace.multiplied(2, spread_s=4.0)
    assert [request.arrival_s for request in twice.requests] == [0.0, 2.0, 3.0, 5.0]
    ids = [request.hash_ids for request in twice.requests]
    assert (ids[0], ids[2]) == ((1, 2), (1, 3))
    assert ids[1][0] == ids[3][0]
    assert not {*ids[1], *ids[3]} & {1, 2, 3}
    for copies, spread_s in ((0, 1.0), (2, -1.0), (1 << 30, 1.0)):
        with pytest.raises(TraceError):
            trace.multiplied(copies, spread_s)


def test_shared_prefixes_begin_alike_and_end_otherwise() -> None:
    made = shared_prefixes(num_requests=50, num_prefixes=3, prefix_len=20, own_len=8, output_len=2)
    prompts = [made.prompt_ids(index, numbered).tolist() for index in range(50)]
    assert {len(prompt) for prompt in prompts} == {28}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 3
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 50
    hot = shared_prefixes(num_requests=50, num_prefixes=3, prefix_len=20, own_len=8, output_len=2, hot_share=1.0)
    assert len({request.hash_ids[:5] for request in hot.requests}) == 1
    with pytest.raises(TraceError):
        shared_prefixes(num_requests=1, num_prefixes=0, prefix_len=1, own_len=1, output_len=1)
