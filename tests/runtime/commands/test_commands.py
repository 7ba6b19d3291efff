"""`generate`, `tokenize`, `info` and `serve`: what they print where, and how they end."""

from __future__ import annotations

import json
import math
import re
import select
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.runtime.commands.running import ROOT, invoke, needs_stories, run


@needs_stories
def test_generate_json_is_one_object_a_completion(stories: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n\nLily\n")
    result = run(
        *("generate", "--model", str(stories), "--prompt", "The cat", "--prompt-file", str(prompts)),
        *("--json", "--temperature", "0", "--max-tokens", "6", "--logprobs", "2"),
    )
    assert (result.returncode, result.stderr) == (0, "")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [item["prompt"] for item in objects] == ["The cat", "Once upon a time", "Lily"]
    assert [item["prompt_index"] for item in objects] == [0, 1, 2]
    for item in objects:
        assert len(item["token_ids"]) == 6
        assert item["finish_reason"] == "length"
        assert isinstance(item["text"], str)
        assert len(item["logprobs"]) == 6
        assert all(math.isfinite(entry["logprob"]) for entry in item["logprobs"])


@needs_stories
def test_generate_plain_ids_and_choices(stories: Path, tmp_path: Path) -> None:
    common = ("--model", str(stories), "--max-tokens", "5", "--temperature", "0")
    status, out, _ = invoke("generate", *common, "-p", "Once upon a time")
    assert status == 0
    [text] = out.splitlines()
    ids = invoke("tokenize", "--model", str(stories), "--json", "Once upon a time")[1]
    joined = ",".join(map(str, json.loads(ids)["ids"]))
    assert invoke("generate", *common, "--prompt-token-ids", joined)[1].splitlines() == [text]
    status, out, _ = invoke(
        *("generate", "--model", str(stories), "-p", "Lily", "--n", "3", "--temperature", "1"),
        *("--seed", "7", "--max-tokens", "8", "--json"),
    )
    objects = [json.loads(line) for line in out.splitlines()]
    assert [item["index"] for item in objects] == [0, 1, 2]
    assert len({tuple(item["token_ids"]) for item in objects}) > 1
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text('{"prompt": "Lily"}\n{"prompt_token_ids": [1, 403]}\n')
    status, out, _ = invoke("generate", *common, "--prompt-file", str(jsonl), "--json")
    assert [json.loads(line)["prompt_token_ids"][-1] for line in out.splitlines()][1] == 403
    jsonl.write_text('{"text": "Lily"}\n')
    status, out, err = invoke("generate", *common, "--prompt-file", str(jsonl))
    assert status == 2
    assert "prompts.jsonl:1" in err


@needs_stories
def test_model_without_a_tokenizer_gives_ids(stories: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stories / name, tmp_path)
    common = ("generate", "--model", str(tmp_path), "--temperature", "0", "--max-tokens", "4")
    status, out, _ = invoke(*common, "--prompt-token-ids", "1 403")
    assert status == 0
    assert re.fullmatch(r"\d+ \d+ \d+ \d+\n", out)
    status, _, err = invoke(*common, "-p", "text")
    assert status == 2
    assert "tokenizer" in err


@needs_stories
def test_tokenize_there_and_back(stories: Path) -> None:
    text = "Once upon a time, é 😀"
    common = ("tokenize", "--model", str(stories))
    status, out, _ = invoke(*common, "--json", text)
    answer = json.loads(out)
    assert (status, answer["text"], len(answer["ids"])) == (0, text, len(answer["tokens"]))
    plain = [line.split("\t") for line in invoke(*common, text)[1].splitlines()]
    assert [int(token_id) for token_id, _ in plain] == answer["ids"]
    assert [token for _, token in plain] == answer["tokens"]
    assert invoke(*common, stdin=text + "\n")[1].splitlines()[1:] == invoke(*common, text)[1].splitlines()[1:]
    ids = list(map(str, answer["ids"]))
    assert invoke(*common, "--decode", "--skip-special-tokens", *ids)[1].strip() == text
    assert json.loads(invoke(*common, "--decode", "--json", stdin=str(answer["ids"]))[1])["ids"] == answer["ids"]
    bare = json.loads(invoke(*common, "--json", "--no-add-special-tokens", text)[1])["ids"]
    assert answer["ids"][-len(bare) :] == bare
    assert len(bare) < len(answer["ids"])


@needs_stories
def test_info_adds_up(stories: Path) -> None:
    status, out, _ = invoke(
        "info", "--model", str(stories), "--json", "--kv-cache-memory-bytes", "4000000", "--block-size", "8"
    )
    assert status == 0
    report = json.loads(out)
    memory, model = report["memory"], report["model"]
    devices = {device["device"]: device for device in report["devices"]}
    assert devices["cpu"]["is_usable"]
    assert devices["cuda:0"]["is_usable"] or "--device cpu" in devices["cuda:0"]["description"]  # or what to do
    assert model["vocab_size"] == 512
    assert memory["weight_bytes"] >= 260_032 * 2
    assert memory["block_size"] == 8
    assert memory["num_tokens"] == memory["num_blocks"] * 8
    assert 0 < memory["kv_cache_bytes"] <= 4_000_000
    assert memory["kv_bytes_per_token"] * memory["num_tokens"] == memory["kv_cache_bytes"]
    text = invoke("info", "--model", str(stories))[1]
    for word in ("cuda:0", "weights", "KV cache", "tokens that fit"):
        assert word in text


def test_info_promises_no_memory_that_is_not_there() -> None:
    status, out, error = invoke("info", "--kv-cache-memory-bytes", str(1 << 50))
    assert (status, out) == (2, "")
    assert "are free on the device" in error


@needs_stories
def test_serve_answers_and_leaves_on_sigterm(stories: Path) -> None:
    command = [sys.executable, "-m", "runtime.cli", "serve", "--port", "0", "--model", str(stories)]
    with subprocess.Popen(
        [*command, "--served-model-name", "tales"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 240)[0]
            match = re.search(r"tales at (http://\S+)/v1", process.stdout.readline())
            assert match
            with urllib.request.urlopen(f"{match[1]}/v1/models", timeout=60) as answer:
                assert json.load(answer)["data"][0]["id"] == "tales"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
