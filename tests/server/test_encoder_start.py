"""What a warm start of `xserv serve` of an encoder imports before its first vector, in the server's process and in the
engine's: counted, since times depend on the machine. And an engine's process that waits for its first message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from models.checkpoints.model_files import ModelFolder
from runtime.engine.make_client import StartingClient
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import PoolingRequest
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.process.spawning import ENGINE, WaitingProcess
from server.serve import serve
from tests.models.encoder_cases import write_encoder
from tests.waiting import TIMEOUT_S

ROOT = Path(__file__).parents[2]
NOTES = """
import os, sys
notes = open(os.path.join(os.environ["IMPORTS"], str(os.getpid())), "w", buffering=1)

class Noting:
    def find_spec(self, name, path=None, target=None):
        notes.write(name + "\\n")

sys.meta_path.insert(0, Noting())
"""
"""Finds nothing, and notes what is looked for: every module when it is first imported."""
NEITHER = {
    "huggingface_hub", "llguidance", "rich", "prompt_toolkit", "pygments", "PIL", "httpcore", "ray", "opentelemetry",
    "jinja2", "pydantic", "torch", "transformers", "tokenizers", "cuda", "numba_cuda",
}  # fmt: skip
NOT_IN_THE_SERVER = {
    "numba", "llvmlite", "numba_kernels.cache", "numba_kernels.cpu", "runtime.ops", "runtime.backends",
    "runtime.engine.engine", "models.families",
}  # fmt: skip
NOT_IN_THE_ENGINE = {
    "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "typer", "server", "runtime.commands",
    "runtime.llm", "runtime.parallel", "numba_kernels.cuda.gemm", "runtime.emulator",
}  # fmt: skip
OURS = {"runtime", "models", "numba_kernels", "tokenizer", "server"}
MOST_MODULES = {"server": 320, "engine": 405}
"""Of this project. On 2026-12-01 the server imported 315 and the engine 401, one of them for recordings of towers."""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of the modules that were imported, by process."""
    notes, folder = tmp_path_factory.mktemp("notes"), write_encoder(tmp_path_factory.mktemp("model"), "bert")
    (notes / "sitecustomize.py").write_text(NOTES, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(notes), "IMPORTS": str(notes)}
    command = [sys.executable, "-m", "runtime.cli", "serve", str(folder), "--port", "0"]
    for _ in range(2):  # where nothing is compiled yet, the first one compiles, in processes of its own
        for each in notes.glob("[0-9]*"):
            each.unlink()
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        with child:
            assert child.stdout is not None
            url = child.stdout.readline().split(" at ")[1].strip()
            answer = httpx.post(f"{url}/embeddings", json={"input": "a text"}, timeout=TIMEOUT_S)
            assert answer.status_code == 200, answer.text
            found = {each.name: set(each.read_text(encoding="utf-8").split()) for each in notes.glob("[0-9]*")}
            child.terminate()
    server = found.pop(str(child.pid))
    (engine,) = found.values()
    return {"server": server, "engine": engine}


def within(modules: set[str], packages: set[str]) -> set[str]:
    return {name for name in modules if any(f"{name}.".startswith(f"{each}.") for each in packages)}


def test_only_what_a_vector_needs_is_imported(imports: dict[str, set[str]]) -> None:
    server, engine = imports["server"], imports["engine"]
    assert within(server, NEITHER | NOT_IN_THE_SERVER) == set()
    assert within(engine, NEITHER | NOT_IN_THE_ENGINE) == set()
    assert within(engine, {"models.families"}) <= {
        "models.families", "models.families.encoders", "models.families.encoders.bert",
        "models.families.llama",  # of drafters
    }  # fmt: skip


@pytest.mark.parametrize("process", ["server", "engine"])
def test_few_of_our_modules_are_imported(imports: dict[str, set[str]], process: str) -> None:
    number = len(within(imports[process], OURS))
    assert number <= MOST_MODULES[process], f"{number} modules"


def test_a_waiting_process_is_taken_by_the_first_engine_alone(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "bert")
    with WaitingProcess() as waiting:
        assert waiting._begun is not None
        pid = waiting._begun[1].pid
        client = StartingClient(folder, waiting=waiting, device="cpu").wait()
        assert isinstance(client, ProcessEngineClient)
        assert client.pid == pid
        assert client.embed(PoolingRequest([2, 77, 3])).result(TIMEOUT_S).shape == (48,)
        other = StartingClient(folder, waiting=waiting, device="cpu").wait()
        assert isinstance(other, ProcessEngineClient)
        assert other.pid not in (None, pid)
        other.close()
    assert client.state == "ready"  # it is no longer the caller's to end
    client.close()


def test_a_waiting_process_that_nobody_takes_is_ended() -> None:
    with WaitingProcess() as waiting:
        assert waiting._begun is not None
        process = waiting._begun[1]
        assert process.poll() is None
    assert process.poll() is not None
    assert waiting.take(ENGINE) is None


def test_a_waiting_process_is_ended_where_several_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(Exception):
        pass

    def with_fleet(waiting: WaitingProcess) -> None:
        StartingClient(folder, waiting=waiting, device="cpu", data_parallel_size=2).close()

    def with_name(waiting: WaitingProcess) -> None:
        with pytest.raises(Told):
            serve([f"one={folder}"], port=0, waiting=waiting)

    def tell(*_: object, **__: object) -> None:
        raise Told

    folder = write_encoder(tmp_path, "bert")
    monkeypatch.setattr("server.hosting.application.HostApplication", tell)
    for start in (with_fleet, with_name):
        with WaitingProcess() as waiting:
            assert waiting._begun is not None
            process = waiting._begun[1]
            start(waiting)
            assert process.poll() is not None


@pytest.mark.parametrize("arguments", [["nothing/at/all"], ["nothing/at/all", "--max-num-seqs", "0"], ["--in-process"]])
def test_a_start_that_fails_leaves_no_process(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "runtime.cli", "serve", *arguments, "--port", "0", "--api-key-file", "none.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert done.stderr.startswith("xserv: error: "), done.stderr
    assert len(done.stderr.splitlines()) == 1  # run waits for all who have its pipes, so for the waiting process, too


def test_an_encoders_engine_reads_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of a quarter of a million tokens takes as long as all else; the server reads it meanwhile."""
    read: list[Path] = []
    monkeypatch.setattr(ModelFolder, "tokenizer_files", lambda files: read.append(files.path))
    engine = build_engine(write_encoder(tmp_path, "bert"), device="cpu")
    engine.close()
    assert read == []
    assert engine.info.eos_token_ids == ()


def test_a_waiting_process_of_another_command_is_ended() -> None:
    with WaitingProcess() as waiting:
        assert waiting._begun is not None
        process = waiting._begun[1]
        assert waiting.take([*ENGINE, "--other"]) is None
        assert process.poll() is not None
