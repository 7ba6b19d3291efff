"""Code that is compiled before an engine is loaded, in a process that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import numba_kernels.cpu
from runtime.engine.config import EngineConfig
from runtime.engine.process import compile_ahead as ahead
from runtime.engine.process import compile_kernels as kernels
from runtime.engine.process.compile_kernels import WantedOfCpu
from runtime.progress import SILENT

ROOT = Path(__file__).parents[4]
MODELS = ROOT.parent / "shared" / "data" / "models"


def test_it_is_done_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process that does it leaves a mark; without one it is asked for, and what it says is told."""
    commands: list[list[str]] = []

    def noted(command: list[str], **options: object) -> object:
        commands.append(command)
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.exit('no compiler')"], **options)  # type: ignore[call-overload]

    stand_in = SimpleNamespace(Popen=noted, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(kernels, "subprocess", stand_in)
    monkeypatch.setattr(kernels, "count_processes", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba_kernels.cpu, "CODE_FOLDER", tmp_path / "xserv" / "numba" / "code")
    ahead.compile_ahead(None, EngineConfig(device="cpu", dtype="bfloat16", quantization="int8"), SILENT)
    wanted = WantedOfCpu("uint16", is_int8=True, block_size=16, pages="uint16", has_experts=False)
    assert [command[2:-1] for command in commands] == [[*kernels.COMMAND, msgspec.json.encode(wanted).decode()]]
    assert "the others are compiled at first use: a process that compiles kernels ended with status 1: no compiler" in (
        caplog.text
    )
    refused = EngineConfig(device="cpu", dtype="int32")  # when the model is loaded
    ahead.compile_ahead(None, refused, SILENT)
    monkeypatch.setattr(WantedOfCpu, "marker", lambda wanted: tmp_path)
    ahead.compile_ahead(None, EngineConfig(device="cpu", dtype="bfloat16"), SILENT)
    assert len(commands) == 1


def test_each_task_is_one_processs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three processes draw numbers from one pipe; each task is done once, and the mark is set when all are over."""
    script = (
        "import os, sys\n"
        "while number := int.from_bytes(os.read(int(sys.argv[-1]), 2) or b'\\xff', 'little') + 1:\n"
        "    if number > 40: break\n"
        "    print('{\"type\": \"Compiled\"}', flush=True); print(number - 1, file=open(sys.argv[1], 'a'))\n"
        'print(\'{"type": "Found", "total": 40}\', flush=True)'
    )
    tasks = tmp_path / "tasks"
    shown: list[tuple[int, int | None]] = []
    monkeypatch.setattr(kernels, "COMMAND", ("-c", script, str(tasks)))
    wanted = WantedOfCpu("float32", is_int8=False, block_size=16, pages="float32", has_experts=False)
    kernels.compile_kernels(wanted, lambda done, total, name="": shown.append((done, total)), num_processes=3)
    assert sorted(map(int, tasks.read_text().split())) == list(range(40))
    assert shown[-1] == (40, 40)


def test_the_process_ends_with_its_parent() -> None:
    code = "import time; from runtime.engine.process.spawning import end_with_parent; end_with_parent(); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 1


_USES = """
import sys
from numba.core import event
from runtime import LLM, SamplingParams
from runtime.text.load import load_tokenizer
with event.install_recorder("numba:run_pass") as passes:
    with LLM(device="cpu", dtype="float32", kv_cache_bytes=1 << 22) as llm:
        llm.generate("What is 17 plus 25?", SamplingParams(max_tokens=4, logprobs=1))
    if len(sys.argv) > 1:
        load_tokenizer(sys.argv[1]).encode("Once upon a time")
    print(len(passes.buffer))
"""


@pytest.mark.exhaustive
def test_from_an_empty_cache(tmp_path: Path) -> None:
    """As an engine's process does it; afterwards nothing is left to compile, for either kind of tokenizer."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def python(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ahead_of = (
        "from runtime.engine.process.compile_ahead import compile_ahead\n"
        "from runtime.engine.process.compile_kernels import WantedOfCpu\n"
        "from runtime.engine.config import EngineConfig\n"
        "from runtime.progress import SILENT\n"
        "compile_ahead(None, EngineConfig(device='cpu', dtype='float32'), SILENT)\n"
        "print(WantedOfCpu('float32', False, 16, 'float32', False).marker().exists())"
    )
    assert python(ahead_of) == "True\n"
    tokenizers = [str(MODELS / "stories260K")] if MODELS.is_dir() else []
    assert python(_USES, *tokenizers) == "0\n"
