"""`generate`, `tokenize`, `info` and `serve`: what they print where, and how they end; streams as shells give them;
vLLM's `--speculative-config` as ours."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from runtime.commands import serve as serving
from runtime.commands.answers import with_adapter
from runtime.commands.generate import read_prompts
from runtime.commands.info_report import as_text, memory
from runtime.commands.options import EngineOptions, options_of
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.messages import CacheGroupInfo, EngineInfo
from runtime.errors import InvalidArgumentError
from runtime.kv.kinds import FULL, Window
from runtime.llm import LoRARequest
from tests.models.adapter_cases import CASES, write_adapter
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


LAYER = 16 * 1024  # bytes of a page of one layer
GEMMA_3_1B = EngineInfo(
    model_name="gemma",
    model_path="gemma",
    architecture="Gemma3ForCausalLM",
    device="cpu",
    dtype="bfloat16",
    vocab_size=100,
    eos_token_ids=(),
    max_model_len=8192,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    max_waiting=8,
    block_size=16,
    num_blocks=7100,
    kv_cache_bytes=7100 * 4 * LAYER,
    weight_bytes=1,
    cache_groups=(
        CacheGroupInfo(FULL, 4, 0),
        *[CacheGroupInfo(Window(512), 4, 0)] * 4,
        *[CacheGroupInfo(Window(512), 3, 1)] * 2,
    ),
)


def test_a_sequence_holds_its_windows_and_while_it_is_computed_a_step_besides() -> None:
    report = memory(GEMMA_3_1B)
    full, windowed = report["cache_groups"]
    assert (full["window"], full["num_layers"], full["num_groups"], full["num_padding"]) == (None, 4, 1, 0)
    assert (windowed["window"], windowed["num_layers"], windowed["num_groups"]) == (512, 22, 6)
    assert windowed["num_padding"] == 2
    assert full["bytes_per_sequence"] == 512 * 4 * LAYER
    assert windowed["bytes_per_sequence"] == 6 * 33 * 4 * LAYER, "32 pages, and one of which a token is seen"
    assert report["bytes_per_sequence"] == (512 + 6 * 33) * 4 * LAYER
    assert report["prompt_bytes_per_sequence"] == (512 + 6 * (33 + 128)) * 4 * LAYER
    assert report["full_bytes_per_sequence"] == 512 * 26 * LAYER
    assert report["bytes_per_sequence"] < 0.35 * report["full_bytes_per_sequence"]
    assert report["num_full_length_sequences"] == 7100 // (512 + 6 * 33)
    text = as_text({"devices": [], "model": {"max_model_len": 8192}, "memory": report})
    assert "22 layers in 6 groups, room for 2 more" in text
    assert "21.3% of" in text


def test_layers_that_are_alike_are_as_ever() -> None:
    report = memory(msgspec.structs.replace(GEMMA_3_1B, cache_groups=(CacheGroupInfo(FULL, 4, 0),)))
    assert report["num_tokens"] == 7100 * 16
    assert report["kv_bytes_per_token"] * report["num_tokens"] == report["kv_cache_bytes"]
    assert report["bytes_per_sequence"] == report["prompt_bytes_per_sequence"] == report["full_bytes_per_sequence"]
    assert "windows" not in as_text({"devices": [], "model": {"max_model_len": 8192}, "memory": report})


def test_an_adapter_brings_its_rank_and_its_base(tmp_path: Path) -> None:
    folder, rank = write_adapter(tmp_path / "own", "llama"), CASES["llama"].fields["r"]
    for model, taken in ((None, "base"), ("mine", "mine")):
        for least in (1, 64):
            arguments, request = with_adapter({"model": model, "max_lora_rank": least}, folder)
            assert arguments == {"model": taken, "enable_lora": True, "max_lora_rank": max(rank, least)}
            assert request == LoRARequest("own", 1, str(folder))
    assert with_adapter({"model": None}, None) == ({"model": None}, None)


def shell(command: str, **environment: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (">&-", b"stdout is closed: nothing can be written"),
        (">/dev/full", b"No space left on device"),
        ("| true", b""),  # as other programs, whose output nobody reads any more
        (">&- 2>&-", b""),
    ],
)
def test_output_that_cannot_be_written_is_an_error_without_a_traceback(given: str, error: bytes) -> None:
    program = "import time; time.sleep(0.3); from runtime.cli import main; main()"
    status, out, err = shell(f'{sys.executable} -c "$PROGRAM" --version {given}', PROGRAM=program)
    assert status == 1
    assert out == b""
    assert err == (b"xserv: error: " + error + b"\n" if error else b"")


def test_a_locale_that_knows_ascii_alone_is_taken_for_utf_8() -> None:
    program = (
        "import sys; from runtime.commands.group import prepare_streams; prepare_streams(); "
        "print(sys.stdin.read() + chr(0x20ac))"
    )
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, out, err = shell(f"printf 'h\\303\\251' | {sys.executable} -c \"$PROGRAM\"", PROGRAM=program, **posix)
    assert (status, out, err) == (0, "hé€\n".encode(), b"")
    status, out, err = shell(
        f"printf 'h\\351' | {sys.executable} -c \"$PROGRAM\"", PROGRAM=program, PYTHONIOENCODING="latin-1"
    )
    assert (status, out, err) == (0, b"h\xe9\\u20ac\n", b"")


def test_a_file_of_prompts_in_another_encoding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    for content, problem in (
        ("hé".encode("utf-16"), "is UTF-16, must be UTF-8: save it as UTF-8"),
        ("hé".encode("utf-32"), "is UTF-32, must be UTF-8: save it as UTF-8"),
        ("a\nhé".encode("latin-1"), "line 2 has the byte 0xe9"),
    ):
        file.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=problem) as caught:
            read_prompts(file)
        assert str(file) in str(caught.value)
    file.write_bytes("hé".encode("utf-8-sig"))
    assert read_prompts(file) == ["hé"]
    assert "byte order mark" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 5}', {"speculation": "ngram", "num_speculative_tokens": 5}),
        ('{"method": "suffix"}', {"speculation": "suffix"}),
        ('{"model": "x", "num_speculative_tokens": 4}', {"speculation": "draft:x", "num_speculative_tokens": 4}),
        (
            '{"model": "x", "draft_sample_method": "probabilistic"}',
            {"speculation": "draft:x", "speculation_acceptance": "rejection"},
        ),
        (
            '{"model": "x", "rejection_sample_method": "standard"}',
            {"speculation": "draft:x", "speculation_acceptance": "rejection"},
        ),
        ('{"model": "x", "draft_sample_method": "greedy"}', {"speculation": "draft:x"}),
        ('{"method": "eagle3", "model": "x"}', {"speculation": "eagle3:x"}),
        ('{"method": "dflash", "model": "x"}', {"speculation": "dflash:x"}),
        ('{"method": "dspark", "model": "x"}', {"speculation": "dflash:x"}),
        ('{"method": "mtp", "num_speculative_tokens": 1}', {"speculation": "mtp", "num_speculative_tokens": 1}),
        ('{"method": "deepseek_mtp"}', {"speculation": "mtp"}),
        ('{"method": "mtp", "model": "x"}', {"speculation": "mtp:x"}),
        ('{"model": "[ngram]", "num_speculative_tokens": 3}', {"speculation": "ngram", "num_speculative_tokens": 3}),
    ],
)
def test_what_it_stands_for(text: str, options: dict[str, Any]) -> None:
    assert options_of(text) == options
    arguments = EngineOptions(speculative_config=text).arguments()
    assert {name: arguments[name] for name in options} == options
    EngineConfig(**{name: arguments[name] for name in ("speculation", "num_speculative_tokens")})


def test_keys_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xserv"):
        assert options_of('{"method": "ngram", "prompt_lookup_max": 4}') == {"speculation": "ngram"}
    assert [record.getMessage() for record in caplog.records if record.name == "xserv.commands"] == [
        "--speculative-config: prompt_lookup_max has no effect: the longest agreement is looked for"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON"),
        ("[1]", "JSON object"),
        ("{}", "method must be one of draft_model, eagle3, dflash, dspark, ngram, suffix, mtp, got None"),
        ('{"method": 3}', "got 3"),
        ('{"method": "magic"}', "got 'magic'"),
        ('{"method": "eagle", "model": "x"}', "'eagle' is not built"),
        ('{"method": "eagle3"}', "model must be an EAGLE-3 drafter, got None"),
        ('{"method": "dflash"}', "model must be a DFlash drafter, got None"),
        ('{"method": "draft_model"}', "model must be a draft model, got None"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "got '5'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "got 0"),
        ('{"method": "ngram", "ngram_size": 3}', "no key 'ngram_size'"),
        ('{"model": "x", "rejection_sample_method": "block"}', "must be one of standard, got 'block'"),
        ('{"model": "x", "draft_sample_method": 1}', "greedy, probabilistic, got 1"),
    ],
)
def test_others_are_refused(text: str, problem: str) -> None:
    with pytest.raises(RequestError, match="--speculative-config") as caught:
        EngineOptions(speculative_config=text).arguments()
    assert problem in str(caught.value)


def test_two_that_differ_are_refused() -> None:
    with pytest.raises(RequestError, match="--speculation suffix and --speculative-config say different things"):
        EngineOptions(speculation="suffix", speculative_config='{"method": "ngram"}').arguments()


def test_serve_needs_no_model_and_takes_one_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(serving, "_serve", SimpleNamespace(serve=lambda model, **_: asked.append(model)))
    for arguments in ([], ["a"], ["a", "b=c"], ["--model", "a"]):
        assert invoke("serve", *arguments)[0] == 0
    assert asked == [None, ["a"], ["a", "b=c"], "a"]
    assert invoke("serve", "a", "--model", "b")[0] == 2
