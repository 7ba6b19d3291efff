"""The program `xserv`: its help, what it does not import, its errors."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runtime.cli import app
from runtime.commands.options import EngineOptions, LlmOptions, SamplingOptions
from tests.runtime.commands.running import ROOT, STORIES, invoke, needs_stories

HEAVY = {
    *("numpy", "numba", "llvmlite", "ml_dtypes", "safetensors", "huggingface_hub", "regex", "jinja2", "msgspec"),
    *("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "rich", "prompt_toolkit", "asyncio", "httpx"),
    *("numba_kernels", "models", "tokenizer", "runtime.text.pipeline", "runtime.text.formats"),
    *(f"runtime.bench.{path.stem}" for path in (ROOT / "runtime" / "bench").iterdir() if path.stem != "options"),
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


def test_an_interrupt_while_modules_are_imported_has_no_traceback() -> None:
    interrupts = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer.core":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from xserv.command import main
main()
"""
    result = subprocess.run([sys.executable, "-c", interrupts], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_help_names_every_command() -> None:
    status, out, _ = invoke("--help")
    assert status == 0
    for command in ("chat", "generate", "serve", "tokenize", "info", "perplexity", "kernels", "bench"):
        assert re.search(rf"^  {command}\b", out, re.MULTILINE)
        assert invoke(command, "--help")[0] == 0
    for benchmark in ("serve", "streaming", "peers", "memory", "overhead", "products"):
        assert invoke("bench", benchmark, "--help")[0] == 0


def test_usage_shows_an_argument_as_its_words_or_its_name() -> None:
    for arguments, usage in ((["deploy"], "ray"), (["bench", "states"], "TRACE"), (["rank"], "QUERY FILE"),
                             (["serve"], "[[NAME=]MODEL]..."), (["quantize"], "PATH|HUB_ID OUT")):  # fmt: skip
        assert invoke(*arguments, "-h")[1].splitlines()[0].endswith(f"{arguments[-1]} [OPTIONS] {usage}")
    assert "Missing argument 'FILE'" in invoke("embed")[2]


@pytest.mark.parametrize(
    "arguments", [["-h"], ["serve", "-h"], ["kernels", "build", "-h"], ["bench", "streaming", "-h"]]
)
def test_h_is_help(arguments: list[str]) -> None:
    assert invoke(*arguments) == invoke(*arguments[:-1], "--help")
    assert invoke(*arguments)[0] == 0


def test_version() -> None:
    assert invoke("--version") == (0, f"xserv {version('xserv')}\n", "")


def test_help_stands_under_headings() -> None:
    def headings(*arguments: str) -> list[str]:
        return re.findall(r"^(\w.*):$", invoke(*arguments, "--help")[1], re.MULTILINE)

    assert headings() == ["Options", "Use a model", "Look at one", "Measure and compile"]
    engine = ["Model", "Memory and batches", "Execution", "Scheduling", "Adapters"]
    assert headings("chat") == ["Arguments", "Options", *engine, "Sampling"]
    of_server = ["Limits of the server", "Answers", "Several models", "Keys and addresses", "Operations"]
    assert headings("serve") == ["Arguments", "Options", *engine, *of_server]
    assert headings("bench", "streaming")[1:6] == engine
    text = invoke("serve", "--help")[1]
    assert text.index("Keys and addresses:") < text.index("--api-key") < text.index("Operations:")


@needs_stories
def test_the_model_may_be_an_argument() -> None:
    named, given = (json.loads(invoke("info", *words, str(STORIES), "--json")[1]) for words in (["--model"], []))
    assert named["model"] == given["model"]
    status, out, err = invoke("generate", str(STORIES), "-p", "Once", "--max-tokens", "2", "--device", "cpu")
    said = [line for line in err.splitlines() if not line.startswith("compiling for this processor")]
    assert (status, said, len(out.splitlines())) == (0, [], 1)
    for command in ("chat", "serve"):
        assert invoke(command, "/nowhere/at/all")[::2] == invoke(command, "--model", "/nowhere/at/all")[::2]
    assert "beside --model" in invoke("info", "a", "--model", "b")[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.exhaustive_cases("fish")
def test_completion(shell: str, tmp_path: Path) -> None:
    """The script for a shell, and what the program answers when the shell asks as that script does."""

    def run(environment: dict[str, str], *arguments: str) -> str:
        ours = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **environment}
        done = subprocess.run(
            [sys.executable, "-m", "runtime.cli", *arguments],
            cwd=ROOT, timeout=60, capture_output=True, text=True, env={**os.environ, **ours},
        )  # fmt: skip
        return done.stdout

    script = run({}, "--show-completion", shell)
    assert "_XSERV_COMPLETE" in script
    assert "xserv" in script
    asked = {
        "bash": {"COMP_WORDS": "xserv ser", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "xserv ser"},
        "fish": {"_TYPER_COMPLETE_ARGS": "xserv ser", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    answer = run({"_XSERV_COMPLETE": f"complete_{shell}", **asked})
    assert "serve" in answer
    assert "generate" not in answer
    run({}, "--install-completion", shell)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_XSERV_COMPLETE" in path.read_text() for path in written), written


def test_defaults_are_those_of_the_library() -> None:
    from runtime.engine.config import EngineConfig
    from runtime.engine.make_engine import build_engine
    from runtime.engine.sampling_params import SamplingParams
    from runtime.llm import LLM

    settings = {field.name for field in fields(EngineConfig)}
    given = EngineOptions().arguments()
    assert EngineConfig(**{name: value for name, value in given.items() if name in settings}) == EngineConfig()
    for options, function in ((EngineOptions, build_engine), (LlmOptions, LLM)):
        parameters = inspect.signature(function).parameters
        for name, value in options().arguments().items():
            assert name in settings or value == parameters[name].default, (function, name)
    reachable = EngineOptions(
        max_model_len=1, max_num_batched_tokens=1, kv_cache_bytes=1, seed=1, prefill_chunk=1,
        prefill_chunk_stages="64,32,2,99", overlap=True, max_cpu_loras=1,
    )  # fmt: skip
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
        (["perplexity", "/nowhere/text"], 1, "/nowhere/text: No such file"),
        (["perplexity"], 2, "Missing argument 'TEXT'"),
        (["info", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["info", "--prefill-chunk-stages", "a,b"], 2, "prefill_chunk_stages must be integers"),
        (["info", "--prefill-chunk-stages", "64,32"], 2, "(high, low, stages, over_tokens)"),
        (["info", "--prefill-chunk", "64", "--batching", "orca"], 2, "computes whole"),
        (["info", "--preemption", "swap"], 2, "needs swap_space_bytes"),
        (["tokenize", "--decode", "one"], 2, "'one' is no token id"),
        (["bench", "tokenizer", "--num-rounds", "1"], 2, "bench tokenizer was removed: `xserv bench peers --workloads"),
        (["bench", "budget", "--help"], 2, "bench budget was removed: `xserv bench stalls --tpot-ratio R` measures"),
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
