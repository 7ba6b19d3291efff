"""The program `xserv`: its help, what it does not import, its errors."""

from __future__ import annotations

import inspect
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.cli import app
from runtime.commands.options import EngineOptions, LlmOptions, SamplingOptions
from tests.runtime.commands.running import ROOT, STORIES, invoke, needs_stories

HEAVY = {
    *("numpy", "numba", "llvmlite", "ml_dtypes", "safetensors", "huggingface_hub", "regex", "jinja2", "msgspec"),
    *("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "rich", "prompt_toolkit", "asyncio", "httpx"),
    *("numba_kernels", "models", "tokenizer", "runtime.text.pipeline", "runtime.text.formats", "runtime.bench"),
    *("server.app", "server.serve", "server.openai_api.schema", "server.service"),
    *("runtime.engine.make_engine", "runtime.engine.process.client", "runtime.engine.engine"),
    *("runtime.engine.scheduling.sequence", "runtime.tensor.tensor", "runtime.ops", "runtime.llm"),
}


# Start-up and help


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "serve", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "runtime.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert result.returncode == 0
    assert "Usage: xserv" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported  # the list was read
    prefixes = {".".join(name.split(".")[: depth + 1]) for name in imported for depth in range(3)}
    assert prefixes & HEAVY == set()
    if arguments == ["--help"]:
        assert "pydantic" not in prefixes  # typer's own, as soon as there are options to convert


def test_help_names_every_command() -> None:
    status, out, _ = invoke("--help")
    assert status == 0
    for command in ("chat", "generate", "serve", "tokenize", "info", "kernels", "bench"):
        assert re.search(rf"^  {command}\b", out, re.MULTILINE)
        assert invoke(command, "--help")[0] == 0
    for benchmark in ("latency", "throughput", "serve", "streaming", "peers", "allocator", "overhead"):
        assert invoke("bench", benchmark, "--help")[0] == 0


def test_defaults_are_those_of_the_library() -> None:
    from runtime.engine.config import EngineConfig, EngineSettings
    from runtime.engine.make_engine import build_engine
    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM

    settings = {field.name for field in fields(EngineConfig)}
    assert EngineSettings.__annotations__.keys() == settings
    given = EngineOptions().arguments()
    assert EngineConfig(**{name: value for name, value in given.items() if name in settings}) == EngineConfig()
    for options, function in ((EngineOptions, build_engine), (LlmOptions, LLM)):
        parameters = inspect.signature(function).parameters
        for name, value in options().arguments().items():
            assert name in settings or value == parameters[name].default, (function, name)
    reachable = EngineOptions(
        max_model_len=1, kv_cache_bytes=1, seed=1, prefill_chunk=1, prefill_chunk_stages="64,32,2,99", overlap=True
    )
    assert settings - reachable.arguments().keys() == {"num_blocks", "max_waiting", "max_waiting_tokens"}
    assert LlmOptions().arguments().keys().isdisjoint({"model", "seed", "tokenizer"})
    assert {field.name for field in fields(SamplingOptions)} <= set(SamplingParams.__struct_fields__)


def test_engine_options_in_their_units() -> None:
    options = EngineOptions(swap_space=0.5, ageing=3.0, prefill_chunk_stages="512, 128,4,8192", overlap=False)
    arguments = options.arguments()
    assert arguments["swap_space_bytes"] == 1 << 29
    assert arguments["ageing_s"] == 3.0
    assert arguments["prefill_chunk_stages"] == (512, 128, 4, 8192)
    assert arguments["overlap"] == "off"


# Errors


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nope"], 2, "No such command 'nope'"),
        (["bench"], 2, "Missing command"),
        (["generate", "--nope"], 2, "No such option: --nope"),
        (["generate", "--temperature", "hot", "-p", "x"], 2, "--temperature"),
        (["generate"], 2, "give --prompt"),
        (["generate", "-p", "x", "--model", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["generate", "-p", "x", "--device", "cuda"], 2, "cuda"),
        (["generate", "-p", "x", "--device", "tpu"], 2, "tpu"),
        (["generate", "--prompt-file", "/nowhere/prompts"], 1, "/nowhere/prompts: No such file"),
        (["info", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["info", "--prefill-chunk-stages", "a,b"], 2, "prefill_chunk_stages must be integers"),
        (["info", "--prefill-chunk-stages", "64,32"], 2, "(high, low, stages, over_tokens)"),
        (["info", "--prefill-chunk", "64", "--batching", "orca"], 2, "computes whole"),
        (["info", "--preemption", "swap"], 2, "needs swap_space_bytes"),
        (["tokenize", "--decode", "one"], 2, "'one' is no token id"),
        (["bench", "peers", "--peer-python", "/nowhere/python"], 1, "pip install torch transformers"),
        (["bench", "peers", "--workloads", "burst,prefil"], 1, "'prefil' is none of decode-1, prefill, decode-8"),
        (["bench", "serve", "--request-rate", "0"], 1, "--request-rate"),
        (["bench", "serve", "--base-url", "ftp://x"], 1, "--base-url"),
        (["bench", "serve", "--metric-percentiles", "101"], 2, "--metric-percentiles"),
    ],
)
def test_errors_are_one_line_on_stderr(arguments: list[str], status: int, words: str) -> None:
    found, out, err = invoke(*arguments)
    assert (found, out) == (status, "")
    assert err.count("\n") == 1
    assert err.startswith("xserv: error: ")
    assert words in err


def test_port_in_use_is_said_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, out, err = invoke("serve", "--port", port, "--model", "/nowhere/at/all")
    assert (status, out) == (1, "")
    assert f"port {port}" in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    result = CliRunner().invoke(app, ["generate", "--debug", "-p", "x", "--device", "cuda:99"])
    assert type(result.exception).__name__ in ("NoDriverError", "InvalidDeviceError")


@needs_stories
def test_broken_model_folder_is_one_line(tmp_path: Path) -> None:
    shutil.copy(STORIES / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    status, _, err = invoke("generate", "-p", "x", "--model", str(tmp_path))
    assert status == 2
    assert err.count("\n") == 1
    assert "model.safetensors" in err
