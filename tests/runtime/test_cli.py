"""The program `xserv`: what it prints where, how it ends, what it does not import, Ctrl-C on a terminal."""

from __future__ import annotations

import fcntl
import inspect
import json
import math
import os
import pty
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runtime.cli import app
from runtime.commands.options import EngineOptions, LlmOptions, SamplingOptions

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(), reason="../shared/data/models/stories260K is not there"
)

HEAVY = {
    *(
        "numpy",
        "numba",
        "llvmlite",
        "ml_dtypes",
        "safetensors",
        "huggingface_hub",
        "regex",
        "jinja2",
        "msgspec",
    ),
    *(
        "starlette",
        "uvicorn",
        "uvloop",
        "httptools",
        "prometheus_client",
        "rich",
        "prompt_toolkit",
        "asyncio",
    ),
    *("numba_kernels", "models", "tokenizer", "runtime.text.pipeline", "runtime.text.formats", "runtime.bench"),
    *("server.app", "server.serve", "server.openai_api.schema", "server.service"),
    *("runtime.engine.make_engine", "runtime.engine.process.client", "runtime.engine.engine"),
    "runtime.engine.scheduling.sequence",
    *("runtime.tensor.tensor", "runtime.ops", "runtime.llm", "httpx"),
}


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K with a chat template, so that it can be talked to."""
    folder = tmp_path_factory.mktemp("stories") / "stories260K"
    shutil.copytree(STORIES, folder, ignore=shutil.ignore_patterns("bytelevel", "golden*"))
    folder.chmod(0o755)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(*arguments: str, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        **options,
    )


def invoke(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """In this process: status, stdout, stderr."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr


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


# generate, tokenize, info


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
    assert (
        json.loads(invoke(*common, "--decode", "--json", stdin=str(answer["ids"]))[1])["ids"] == answer["ids"]
    )
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


# chat


@needs_stories
def test_chat_on_a_pipe(stories: Path, tmp_path: Path) -> None:
    lines = "Once upon a time\n\n/help\nLily and Tom\n"
    result = run(
        *("chat", "--model", str(stories), "--temperature", "0", "--max-tokens", "8"),
        stdin=lines,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 3  # three messages: /help is one, the empty line is none
    assert result.stdout.endswith("\n")
    assert "forget" not in result.stdout
    assert result.stderr.count("(the answer was cut at its most tokens)") == 3
    assert not (tmp_path / "xserv").exists()  # no history of what a pipe said


@needs_stories
def test_chat_forgets_its_oldest_turns_and_says_so(stories: Path) -> None:
    message = "Once upon a time there was a little girl named Lily. " * 7
    status, out, err = invoke(
        *(
            "chat",
            "--model",
            str(stories),
            "--temperature",
            "0",
            "--max-tokens",
            "4",
            "--max-model-len",
            "160",
        ),
        stdin=f"{message}\n{message}\n{message * 2}\nHello\n",
    )
    assert "the oldest 1 turns were forgotten" in err
    assert "there is room for" in err  # the third message is too long by itself
    assert len(out.splitlines()) == 4
    assert status == 1


@needs_stories
def test_chat_needs_a_template(stories: Path) -> None:
    status, out, err = invoke("chat", "--model", str(STORIES), stdin="hello\n")
    assert (status, out) == (2, "")
    assert "chat template" in err


SLOW_CHAT = """
import time
import urllib.request
from runtime.engine.engine import Engine
step = Engine.step
def slow_step(self, *arguments):
    time.sleep(0.05)
    return step(self, *arguments)
Engine.step = slow_step
from runtime.cli import main
main()
"""


PROMPT = re.escape("\x1b[?2004h")  # bracketed paste on: the line can be edited


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            os.execve(command[0], command, env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        self.text = ""

    def wait_for(self, pattern: str, timeout_s: float = 100.0) -> str:
        """Reads until the pattern has come; what was read until then is forgotten."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.text)):
            assert select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            data = os.read(self.fd, 4096).decode(errors="replace")
            if "\x1b[6n" in data:  # where is the cursor?
                os.write(self.fd, b"\x1b[1;1R")
            self.text += data
        self.text = self.text[match.end() :]
        return match.group()

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """Waits for the program's end; its status."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    os.read(self.fd, 4096)
                except OSError:
                    time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"still there: {self.text}")


@needs_stories
def test_ctrl_c_stops_the_answer_and_not_the_program(stories: Path, tmp_path: Path) -> None:
    terminal = Terminal(
        [
            sys.executable,
            "-c",
            SLOW_CHAT,
            "chat",
            "--model",
            str(stories),
            "--ignore-eos",
            "--temperature",
            "0",
        ],
        {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"},
    )
    terminal.wait_for(r"/help lists the commands")
    terminal.wait_for(PROMPT)
    terminal.type("Once upon a time\r")
    terminal.wait_for(re.escape("\x1b[?2004l"))  # the line was taken
    terminal.wait_for(r"very excited")  # the answer has begun, which does not repeat the prompt
    terminal.type("\x03")
    terminal.wait_for(PROMPT)
    terminal.type("/stats\r")
    stats = terminal.wait_for(r"\d+ answered \(stopped\)")
    assert 0 < int(stats.split()[0]) < 200
    terminal.wait_for(PROMPT)
    terminal.type("half a line\x03")  # at the prompt, Ctrl-C clears the line
    terminal.wait_for(PROMPT)
    terminal.type("/set temperature cold\r")
    terminal.wait_for(r"error: .*cold")
    terminal.wait_for(PROMPT)
    terminal.type("/exit\r")
    assert terminal.end() == 0
    history = (tmp_path / "xserv" / "chat_history").read_text()
    assert "+Once upon a time" in history


def test_the_bundled_model_adds() -> None:
    generator = random.Random(20)
    pairs = [(generator.randint(10, 99), generator.randint(10, 99)) for _ in range(30)]
    status, out, err = invoke("chat", stdin="".join(f"What is {a} plus {b}?\n" for a, b in pairs))
    assert (status, err) == (0, "")
    answers = out.splitlines()
    assert len(answers) == 30
    assert sum(str(a + b) in answer for (a, b), answer in zip(pairs, answers)) >= 28
