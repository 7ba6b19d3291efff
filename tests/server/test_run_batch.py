"""`xserv run-batch`: answers in order, equal to the server's, each once, however often the run is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.progress import SILENT
from server import run_batch as module
from server.config import ServerConfig
from server.run_batch import BatchFileError, BatchStoppedError, run_batch
from tests.server.real_server import serving_real
from tests.waiting import TIMEOUT_S

CHAT = "/v1/chat/completions"
DEMO = Path(__file__).parents[2] / "models" / "demo"
ROOT = Path(__file__).parents[2]
ENGINE: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16}


def line(number: int, url: str = CHAT, **fields: Any) -> str:
    body: dict[str, Any] = {"max_tokens": 1 + number % 7, "temperature": number % 2, "seed": number}
    if url == CHAT:
        body["messages"] = [{"role": "user", "content": f"What is {number}?"}]
    asked = {"custom_id": f"line {number}", "method": "POST", "url": url, "body": {**body, **fields}}
    return json.dumps(asked)


def run(source: Path, target: Path, **options: Any) -> tuple[int, int]:
    return run_batch(source, target, DEMO, reporter=SILENT, in_process=True, **{**ENGINE, **options})


def answers(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def said(answer: Any) -> tuple[str, Any]:
    """What of an answer is the same in each run."""
    body = answer["response"]["body"]
    return answer["custom_id"], [(c["message"], c["finish_reason"]) for c in body["choices"]]


def test_answers_are_the_servers_in_order(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wrong = [
        ("no JSON", None, "it is no request"),
        (json.dumps({"custom_id": "x"}), "x", "method"),
        (line(1), "line 1", "is an earlier line's"),
        (line(80, "/v1/files"), "line 80", "url must be one of"),
        (line(81, stream=True), "line 81", "body.stream must be false"),
        (json.dumps({"custom_id": 5, "method": "POST", "url": CHAT, "body": {}}), None, "custom_id"),
    ]
    more = [line(90, temperature=-1), line(91, "/v1/completions", prompt="One and"), line(92, model="other")]
    sound = [line(number) for number in range(30)]
    lines = [*sound, "", *(text for text, _, _ in wrong), *more]
    source.write_text("\n".join(lines), encoding="utf-8-sig")  # with a byte order mark, as Windows' editors write
    assert run(source, target, concurrency=5) == (39, 8)
    found = answers(target)
    assert [each["id"] for each in found] == [f"batch_req_{number}" for number in range(1, 40)]
    for place, answer, (_, custom_id, problem) in zip(range(32, 38), found[30:36], wrong, strict=True):
        assert (answer["custom_id"], answer["response"]) == (custom_id, None)
        assert answer["error"]["message"].startswith(f"line {place}: ")  # in the file, whose 31st is empty
        assert problem in answer["error"]["message"]
    assert [each["response"]["status_code"] for each in found[36:]] == [400, 200, 404]
    assert found[36]["response"]["body"]["error"]["param"] == "temperature"
    assert found[37]["response"]["body"]["choices"][0]["text"]
    with serving_real(DEMO, **ENGINE) as real:
        for text, answer in zip(sound, found, strict=False):
            body = real.http.post(CHAT, json=json.loads(text)["body"]).json()
            asked = {"custom_id": answer["custom_id"], "response": {"body": body}}
            assert said(answer) == said(asked)
            assert answer["error"] is None
            assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
    before = target.read_bytes()
    assert run(source, target) == (0, 0), "nothing is left, and no engine is started"
    cut = before[: len(before) - 9]
    target.write_bytes(cut)
    assert run(source, target, config=ServerConfig(api_keys=("key",))) == (1, 1), "the line that was cut off"
    assert target.read_bytes() == before.replace(before.splitlines()[-1], target.read_bytes().splitlines()[-1])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"id": "batch_req_1", "custom_id": "other"}\n', "answers 'other', and in line 1 .* got 'line 0'"),
        ('{"id": "batch_req_1", "custom_id": "line 0"}\n{"id": "batch_req_2", "custom_id": "x"}\n', "has only 1 lines"),
        ("no answer\n", "line 1 is no answer"),
        ("no answer", "line 1 is no answer"),
        ('{"id":"batch_req_1","custom_id":"line 0"}\n{"id":"batch_req_2",', "line 2 is no answer"),
    ],
)
def test_an_output_of_another_input_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(0), encoding="utf-8")
    target.write_text(content, encoding="utf-8")
    with pytest.raises(BatchFileError, match=problem):
        run(source, target)
    assert target.read_text(encoding="utf-8") == content


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="is no file"):
        run(tmp_path / "none", tmp_path / "out")
    (tmp_path / "in").write_text(line(0), encoding="utf-8")
    with pytest.raises(BatchFileError, match="line 1 is no answer"):
        run(tmp_path / "in", tmp_path / "in")
    assert (tmp_path / "in").read_text(encoding="utf-8") == line(0)
    with pytest.raises(BatchFileError, match="cannot be written"):
        run(tmp_path / "in", tmp_path / "no" / "out")
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/full"), tmp_path):
        with pytest.raises(BatchFileError, match="is no file"):
            run(tmp_path / "in", target)


def test_an_engine_that_stays_away_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line gets its refusal for an answer; the next run goes on from there."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(number) for number in range(6)), encoding="utf-8")
    post = module._post

    async def away(app: Any, path: str, body: bytes) -> tuple[int, str, bytes]:
        if b"What is 3?" in body:
            return 503, "", b"the engine is down"
        return await post(app, path, body)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_post", away)
        patched.setattr(module, "RETRY_WAITS_S", (0.0, 0.0))
        with pytest.raises(BatchStoppedError, match="line 4 is still answered with 503 after 0 s: the engine is down"):
            run(source, target)
    written = answers(target)
    assert [each["custom_id"] for each in written] == ["line 0", "line 1", "line 2"]
    assert run(source, target) == (3, 0)
    assert [each["custom_id"] for each in answers(target)] == [f"line {number}" for number in range(6)]


def killed_and_resumed(tmp_path: Path, num_lines: int, num_kills: int) -> None:
    """Kills a run at random moments, finishes it, and compares it with one that nobody killed."""
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("\n".join(map(line, range(num_lines))), encoding="utf-8")
    rng = random.Random(5)
    command = [sys.executable, "-m", "runtime.cli", "run-batch", str(source), str(target), "--model", str(DEMO)]
    options = ["--max-model-len", "256", "--max-num-seqs", "16", "--concurrency", "16", "--quiet"]
    counts = sorted(rng.sample(range(1, num_lines), num_kills))
    for count in counts:
        with subprocess.Popen([*command, *options], cwd=ROOT, start_new_session=True) as process:
            end = time.monotonic() + 20 * TIMEOUT_S
            while (target.read_bytes().count(b"\n") if target.exists() else 0) < count and process.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
        num_done = target.read_bytes().count(b"\n")
        if num_done < num_lines:  # else it was killed too late
            with target.open("ab") as file:  # as if it had been killed within a line
                file.write(b'{"id":"batch_re')
    assert run(source, target) == (num_lines - num_done, 0)
    assert run(source, whole) == (num_lines, 0)
    found = answers(target)
    assert [each["custom_id"] for each in found] == [f"line {number}" for number in range(num_lines)]
    assert list(map(said, found)) == list(map(said, answers(whole)))


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 60, 1)


@pytest.mark.exhaustive
def test_ten_thousand_lines_killed_and_resumed(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, 10_000, 5)
