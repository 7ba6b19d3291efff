"""GPU kernels that are compiled before a start: by processes side by side, once, and what is shown meanwhile."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import models.demo
from models.errors import ConfigError
from runtime.device import gpu
from runtime.device.errors import CompileError
from runtime.device.kernel_cache import KernelCache
from runtime.engine.config import EngineConfig
from runtime.engine.process import compile_ahead as ahead
from runtime.engine.process import compile_kernels as kernels
from runtime.engine.process.compile_kernels import Progress, Wanted, compile_kernels
from runtime.errors import InvalidArgumentError
from runtime.progress import SILENT

DEMO = str(Path(models.demo.__file__).parent)
FAMILY = Wanted(arch="sm_90a", is_ptx=True, match="add_embedding_f32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "_opened", {})  # devices that are opened now keep their kernels there
    return tmp_path / "xserv" / "kernels"


@pytest.mark.exhaustive  # `xserv kernels build` does it each time: tests/runtime/commands/test_kernels.py
def test_processes_share_the_work(folder: Path) -> None:
    seen: list[tuple[int | None, int]] = []
    progress = compile_kernels(FAMILY, lambda done, total, name="": seen.append((total, done)), num_processes=2)
    names = {each.name for each in FAMILY.find()}
    assert (progress.total, progress.num_new, progress.num_there) == (len(names), len(names), 0)
    assert seen[0] == (len(names), 0)
    assert seen[-1] == (len(names), len(names))
    assert {each.kernel.name for each in KernelCache(folder).entries() if each.kernel} == names
    again = compile_kernels(FAMILY, lambda *_: None, num_processes=1)
    assert (again.num_new, again.num_there) == (0, len(names))


def test_a_name_that_is_no_architecture_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COMMAND", ("-c", "import sys; sys.exit('started')"))
    with pytest.raises(InvalidArgumentError, match="'sm_9000' is not one such as"):
        compile_kernels(Wanted(arch="sm_9000", is_ptx=True), lambda *_: None)


@pytest.mark.usefixtures("folder")
@pytest.mark.exhaustive
def test_errors_of_the_processes_are_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        compile_kernels(Wanted(arch="sm_90a", is_ptx=True, model=str(tmp_path)), lambda *_: None, num_processes=1)
    monkeypatch.setattr(kernels, "COMMAND", ("-c", "import sys; sys.exit('gone')"))
    with pytest.raises(CompileError, match="ended with status 1: gone"):
        compile_kernels(FAMILY, lambda *_: None, num_processes=1)


@pytest.mark.usefixtures("folder")
def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "import runtime.device.kernel_cache as cache\n"
        "from runtime.device.errors import CompileError\n"
        "from runtime.engine.process.compile_kernels import main\n"
        "def refuse(specialisation):\n"
        "    raise CompileError(f'kernel {specialisation.name} does not compile: why')\n"
        "cache._front_end = refuse\n"
        "main(*sys.argv[1:])\n"
    )
    monkeypatch.setattr(kernels, "COMMAND", (str(program),))
    with pytest.raises(CompileError, match=r"kernel add_embedding_f32\S* does not compile: why"):
        compile_kernels(FAMILY, lambda *_: None, num_processes=1)


@pytest.mark.emulator
@pytest.mark.exhaustive  # compiles all of a model's kernels anew
def test_a_start_compiles_once_what_its_model_needs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Afterwards an engine compiles nothing, whatever it is asked for."""
    from runtime import LLM, SamplingParams

    caplog.set_level(logging.INFO, "xserv.engine")
    config = EngineConfig(device="emulated:sm_80", max_model_len=64, max_num_seqs=4)
    ahead.compile_ahead(None, config, SILENT)
    assert "kernels for sm_80" in caplog.text
    count = len(list(KernelCache(folder).entries()))
    assert count > 10
    with LLM(
        device="emulated:sm_80", max_model_len=64, max_num_seqs=4, kv_cache_bytes=1 << 22, compile_ahead=False
    ) as llm:
        for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}):
            llm.generate(["What is 17 plus 25?", "Hello"], SamplingParams(max_tokens=3, **options))  # type: ignore[arg-type]
    assert len(list(KernelCache(folder).entries())) == count
    ahead.compile_ahead(None, EngineConfig(device="emulated:sm_80", max_model_len=64, max_num_seqs=3), SILENT)
    assert "0 were compiled" in caplog.text
    assert KernelCache(folder).clear() == count
    assert not any(folder.iterdir())


def test_a_second_start_of_the_same_kind_looks_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Wanted] = []

    def note(wanted: Wanted, show: object) -> Progress:
        asked.append(wanted)
        return Progress(total=1, num_new=1)

    monkeypatch.setattr(ahead, "compile_kernels", note)
    config = EngineConfig(device="emulated:sm_80", exact=True)
    for _ in range(2):
        ahead.compile_ahead(DEMO, config, SILENT)
    assert asked == [Wanted(arch="sm_80", is_ptx=True, model=DEMO, config=config)]
    ahead.compile_ahead(DEMO, EngineConfig(device="emulated:sm_80"), SILENT)
    ahead.compile_ahead(DEMO, EngineConfig(device="emulated:sm_90a", exact=True), SILENT)
    assert len(asked) == 3
    assert KernelCache(folder).clear() == 0
    ahead.compile_ahead(DEMO, config, SILENT)
    assert len(asked) == 4


def test_what_is_not_known_is_compiled_later(monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: Any) -> None:
    def refuse(*_: Any) -> Progress:
        raise InvalidArgumentError("no such dtype", param="dtype")

    monkeypatch.setattr(ahead, "compile_kernels", refuse)
    for _ in range(2):
        caplog.clear()
        ahead.compile_ahead(None, EngineConfig(device="emulated:sm_80", dtype="int32"), SILENT)
        assert "compiled as they are met: no such dtype" in caplog.text

    def fail(*_: Any) -> Progress:
        raise CompileError("kernel gemv does not compile")

    monkeypatch.setattr(ahead, "compile_kernels", fail)
    with pytest.raises(CompileError, match="gemv"):
        ahead.compile_ahead(None, EngineConfig(device="emulated:sm_80"), SILENT)
