"""`bench accuracy`: the numbers of answers and texts, against a running server of ours and against its own library."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoints.hub import BUNDLED_MODEL
from runtime import LLM, SamplingParams
from runtime.bench.accuracy.bench_accuracy import pieces_of
from runtime.bench.accuracy.gsm8k import (
    SAMPLE,
    SHOTS,
    Problem,
    as_messages,
    as_text,
    flexible_number,
    read_problems,
    strict_number,
)  # fmt: skip
from tests.runtime.bench.running import bench
from tests.runtime.commands.running import invoke
from tests.server.real_server import Real, serving_real
from tools.demo_model import tasks

TEXT = "<|user|>What is 17 plus 25?<|end|><|assistant|>17 plus 25 is 42.<|end|>\n" * 12


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving_real(BUNDLED_MODEL, device="cpu", kv_cache_bytes=1 << 24) as served:
        yield served


@pytest.mark.parametrize("path", [SAMPLE, SHOTS])
def test_our_problems_are_right(path: Path) -> None:
    problems = read_problems(path)
    assert len({problem.question for problem in problems}) == len(problems) >= 8
    for problem in problems:
        steps = re.findall(r"<<([\d+*/(). -]+)=([\d.]+)>>", problem.answer)
        assert steps, problem.answer
        for step, result in steps:
            assert eval(step) == pytest.approx(float(result)), problem.answer
        assert Decimal(steps[-1][1]) == problem.number


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", 7, 7),
        ("#### 1,234.50 and then #### 9", "1234.5", 9),
        ("#### $18.", 18, 18),
        ("She earns $1,200.", None, 1200),
        ("#### -5", -5, -5),
        ("nothing", None, None),
        ("#### ,.", None, None),
    ],
)
def test_the_number_of_an_answer(text: str, strict: Any, flexible: Any) -> None:
    wanted = [None if each is None else Decimal(str(each)) for each in (strict, flexible)]
    assert [strict_number(text), flexible_number(text)] == wanted


def test_the_prompt() -> None:
    shots, asked = [Problem("One?", "1\n#### 1"), Problem("Two?", "#### 2")], Problem("Three?", "#### 3")
    text = "Question: One?\nAnswer: 1\n#### 1\n\nQuestion: Two?\nAnswer: #### 2\n\nQuestion: Three?\nAnswer:"
    assert as_text(asked, shots) == text
    assert [turn["role"] for turn in as_messages(asked, shots)] == ["user", "assistant"] * 2 + ["user"]


@given(
    words=st.lists(st.text("abcß", min_size=1, max_size=12), min_size=3, max_size=80),
    context=st.integers(1, 40), scored=st.integers(1, 60),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_each_character_behind_the_context_is_scored_once(words: list[str], context: int, scored: int) -> None:
    text = " ".join(words)
    if len(text) <= context:
        return
    pieces = pieces_of(text, context, scored)
    told = "".join(piece.text[piece.first_scored :] for piece in pieces)
    assert text.endswith(told)
    assert text.startswith(pieces[0].text)
    assert all(0 < piece.first_scored < len(piece.text) and piece.text in text for piece in pieces)
    assert all(piece.text[piece.first_scored] == " " for piece in pieces)


def test_problems_on_our_server(real: Real, tmp_path: Path) -> None:
    """The bundled model's own sums, as a chat without examples; a broken-off run goes on."""
    turns = tasks.held_out_questions("sum_2", 12, 3)
    problems, records = tmp_path / "sums.jsonl", tmp_path / "records.jsonl"
    rows = [{"question": turn.question, "answer": f"#### {flexible_number(turn.answer)}"} for turn in turns]
    rows[-1]["answer"] = "#### -1"  # nobody answers so
    problems.write_text("\n".join(map(json.dumps, rows)))
    command = (
        "accuracy", "--url", real.url, "--gsm8k", str(problems), "--num-shots", "0", "--endpoint", "chat",
        "--max-tokens", "40", "--records", str(records),
    )  # fmt: skip
    report = bench(*command)["gsm8k"]
    with LLM(device="cpu") as llm:
        answers = llm.chat(
            [[{"role": "user", "content": turn.question}] for turn in turns],
            SamplingParams(temperature=0.0, max_tokens=40),
        )
    right = [tasks.is_exact(turn, answer.outputs[0].text) for turn, answer in zip(turns, answers, strict=True)]
    assert (report["num_problems"], report["num_right_strict"]) == (12, 0)
    assert report["num_right_flexible"] == sum(right[:-1]) > 8
    lines = records.read_text().splitlines(keepends=True)
    assert len(lines) == 13
    records.write_text("".join(lines[:6]) + lines[6][:20])  # as a killed run leaves it
    assert bench(*command)["gsm8k"] == report
    assert sorted(records.read_text().splitlines(keepends=True)) == sorted(lines)
    status, _, err = invoke("bench", *command, "--max-tokens", "41")
    assert (status, err.count("\n"), "was made with max_tokens 40, now it is 41" in err) == (2, 1, True)


def test_our_problems_as_completions(real: Real) -> None:
    report = bench("accuracy", "--url", f"{real.url}/v1", "--limit", "3", "--num-shots", "2", "--max-tokens", "8")
    assert (report["gsm8k"]["num_problems"], report["gsm8k"]["num_shots"]) == (3, 2)
    assert report["gsm8k"]["finish_reasons"].keys() <= {"length", "stop"}


@pytest.mark.parametrize("way", ["echo", "prompt_logprobs"])
def test_perplexity_on_our_server(real: Real, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways give what the engine says of the same pieces."""
    monkeypatch.setattr("runtime.bench.accuracy.bench_accuracy.WAYS", (way,))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ("accuracy", "--url", real.url, "--perplexity", str(text), "--context", "90", "--piece", "200")
    report = bench(*command)["perplexity"]
    assert report["way"] == way
    pieces = pieces_of(TEXT, 90, 200)
    with LLM(device="cpu") as llm:
        encode = llm.get_tokenizer().encode
        wanted: list[float] = []
        for piece in pieces:
            ids, behind = encode(piece.text), len(encode(piece.text[: piece.first_scored]))
            (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
            entries = (output.prompt_logprobs or [])[behind:]
            wanted += [entry[token].logprob for entry, token in zip(entries, ids[behind:], strict=True) if entry]
    assert report["num_scored_tokens"] == len(wanted)
    assert report["nats_per_token"] == pytest.approx(-sum(wanted) / len(wanted), rel=1e-5)
    assert report["num_scored_characters"] == sum(len(piece.text) - piece.first_scored for piece in pieces)


def test_a_server_that_scores_no_prompt(tmp_path: Path) -> None:
    """It ignores `echo`, as llama.cpp's own server does, and knows no prompt_logprobs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if "prompt_logprobs" in body:
                self.answer(400, {"error": {"message": "unknown field prompt_logprobs"}})
            else:
                self.answer(
                    200, {"choices": [{"text": "five", "logprobs": {"text_offset": [0], "token_logprobs": [-1]}}]}
                )

        def answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        status, _, err = invoke("bench", "accuracy", "--url", url, "--perplexity", str(text))
        server.shutdown()
        thread.join()
    assert (status, err.count("\n")) == (1, 1)
    assert "scores no prompt, so it has no perplexity here; echo: " in err
    assert "unknown field prompt_logprobs" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "problems.jsonl:1 is no JSON object"),
        ('{"question": "q"}', "problems.jsonl:1 must have the texts 'question' and 'answer'"),
        ('{"question": "q", "answer": "5"}', "problems.jsonl:1: its answer must end with '#### '"),
        ("\n", "problems.jsonl has no problem"),
    ],
)
def test_bad_problems(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "problems.jsonl").write_text(content)
    status, _, err = invoke("bench", "accuracy", "--url", "http://x", "--gsm8k", str(tmp_path / "problems.jsonl"))
    assert (status, err.count("\n"), words in err) == (2, 1, True), err
    status, _, err = invoke("bench", "accuracy", "--url", "http://x", "--num-shots", "99")
    assert (status, "--num-shots is 99, but" in err) == (2, True)
