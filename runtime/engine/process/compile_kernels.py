"""Compiles code ahead of time, in processes side by side that end afterwards, with the compilers' memory.

    python -m runtime.engine.process.compile_kernels WANTED NUMBERS

is such a process. Kernels are closures, which cannot be sent, so each process lists the tasks of WANTED itself. The
numbers of the tasks lie in the pipe NUMBERS, from which each takes the next one until it is empty. It writes a line of
JSON about each. No GPU is needed.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import llvmlite.binding as llvm
import msgspec

import numba_kernels.cpu
import tokenizer
from models.checkpoints.model_files import open_model
from numba_kernels.source_digests import sources_digest
from runtime.device.errors import CompileError
from runtime.device.kernel_cache import KernelCache, capability_of, is_meant_for
from runtime.device.kernel_key import tool_versions
from runtime.engine.config import EngineConfig
from runtime.engine.limits import available_memory_bytes
from runtime.engine.process.spawning import end_with_parent
from runtime.engine.process.wire import Problem, error_of, problem_of
from runtime.errors import XservError
from runtime.later import later
from runtime.own_packages import python_module
from runtime.progress import Show

_cpu_kernels = later("numba_kernels.cpu.running.ahead")
_loops = later("tokenizer.warm_up")
_model_kernels = later("runtime.engine.model_kernels")
_registry = later("numba_kernels.cuda.registry")

ROOT = Path(__file__).resolve().parents[3]
COMMAND = python_module("runtime.engine.process.compile_kernels")
"""The command line of each process, for Python."""

PROCESS_BYTES = 1 << 30
"""Free memory for each process: Numba and LLVM, or NVVM, take several hundred MB."""
MOST_PROCESSES = 16
MOST_TASKS = 1 << 11
NUMBER_BYTES = 2
"""Numbers of tasks that fit a pipe, and the bytes of one."""


class Found(msgspec.Struct, frozen=True, tag=True):
    """The number of tasks, for all processes together."""

    total: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A task is done. `is_new` means that its kernel was not on disk."""

    name: str = ""
    is_new: bool = True
    has_spills: bool = False


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process has failed."""

    problem: Problem


class Wanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kernels for an architecture of GPUs, `is_ptx` for an emulated device: those of a model's engine (`model`, a
    folder, and `config`), or all registered ones with `match` in their names."""

    arch: str
    is_ptx: bool
    model: str | None = None
    config: EngineConfig | None = None
    match: str = ""

    def find(self) -> list[Any]:
        """The `Specialisation`s, each once. Raises what `kernels_of_model` raises, and InvalidArgumentError for an
        unknown architecture."""
        if self.model is None:
            known = list(_registry.specialisations())
        else:
            known = _model_kernels.kernels_of_model(Path(self.model), self.arch, self.config or EngineConfig())
        return [each for each in known if self.match in each.name and is_meant_for(each, self.arch)]

    def tasks(self) -> list[Callable[[], Compiled]]:
        """One for each kernel."""
        cache = KernelCache()

        def compile_one(kernel: Any) -> Compiled:
            before = cache.num_compiled
            compiled = cache.get(kernel, self.arch, is_ptx=self.is_ptx)
            return Compiled(kernel.name, cache.num_compiled > before, compiled.spill_bytes > 0)

        return [partial(compile_one, each) for each in self.find()]

    def digest(self) -> str:
        """A digest of all that determines the kernels: the fields, the model's config, this project's sources and the
        compiler."""
        words = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, model=None)))
        if self.model is not None:
            words.update(msgspec.json.encode(open_model(self.model).config().values()))
        for room in ("models", "numba_kernels", "runtime"):
            for source in sorted((ROOT / room).rglob("*.py")):
                words.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes() + b"\0")
        words.update(tool_versions().encode())
        return words.hexdigest()[:24]

    def marker(self) -> Path:
        """The marker file of finished work."""
        return KernelCache().marker(self.digest())


class WantedOfCpu(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer's loops, and the CPU's kernels for a model: see `kernels_of`."""

    stored: str
    is_int8: bool
    block_size: int
    pages: str
    has_experts: bool
    formats: list[str] = []
    recurrence: str = ""
    states: str = "float32"
    has_latents: bool = False
    has_adapters: bool = False
    is_encoder: bool = False

    def tasks(self) -> Iterator[Callable[[], Compiled]]:
        """First the loops, which a process can start before it imports the kernels; then these, the slowest first."""
        yield from (partial(_done, each) for each in _loops.LOOPS)
        for factory, values in _cpu_kernels.kernels_of(
            self.stored,
            self.is_int8,
            self.block_size,
            self.formats,
            pages=self.pages,
            has_experts=self.has_experts,
            recurrence=self.recurrence,
            states=self.states,
            has_latents=self.has_latents,
            has_adapters=self.has_adapters,
            is_encoder=self.is_encoder,
        ):
            yield partial(_done, factory, *values)

    def marker(self) -> Path:
        """The marker file of finished work, for these sources and this processor."""
        loops = sources_digest(*Path(tokenizer.__file__).parent.rglob("*.py"))
        words = f"{self} {loops} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
        return numba_kernels.cpu.CODE_FOLDER / f"ahead-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def _done(factory: Callable[..., object], *values: object) -> Compiled:
    factory(*values)
    return Compiled()


@dataclass(slots=True)
class Progress:
    """The number of tasks (None until it is known), and the results so far."""

    total: int | None = None
    num_new: int = 0
    num_there: int = 0
    num_spilling: int = 0
    latest: str = ""

    @property
    def num_done(self) -> int:
        return self.num_new + self.num_there


def compile_kernels(wanted: Wanted | WantedOfCpu, show: Show, num_processes: int | None = None) -> Progress:
    """Compiles missing kernels, in so many processes (None for one a processor, if memory allows).

    `show` is called with the progress. Raises CompileError for the first kernel that does not compile or a process that
    crashes, and what `Wanted.find` raises. An unknown architecture is refused before any process starts, since finding
    all kernels takes seconds.
    """
    if isinstance(wanted, Wanted):
        capability_of(wanted.arch)
    numbers, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in range(MOST_TASKS)))
    os.close(writer)
    command = [*COMMAND, msgspec.json.encode(wanted).decode(), str(numbers)]
    progress, decoder = Progress(), msgspec.json.Decoder(Found | Compiled | Failed)
    try:
        with closing(lines_of([command] * (num_processes or count_processes()), pass_fds=(numbers,))) as lines:
            for line in lines:
                match decoder.decode(line):
                    case Found(total):
                        progress.total = total
                    case Compiled(name, is_new, has_spills):
                        progress.num_new += is_new
                        progress.num_there += not is_new
                        progress.num_spilling += has_spills
                        progress.latest = name
                    case Failed(problem):
                        raise error_of(problem)
                show(progress.num_done, progress.total, progress.latest)
    finally:
        os.close(numbers)
    return progress


def main(words: str, numbers: str) -> None:
    """One of the processes."""
    end_with_parent()

    def write(line: Found | Compiled | Failed) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        wanted: Wanted | WantedOfCpu = msgspec.json.decode(words, type=Wanted | WantedOfCpu)
        tasks: Iterable[Callable[[], Compiled]] = wanted.tasks()
        if isinstance(tasks, list):
            write(Found(len(tasks)))
        known, waiting = list[Callable[[], Compiled]](), iter(tasks)
        while taken := os.read(int(numbers), NUMBER_BYTES):
            number = int.from_bytes(taken, "little")
            known += islice(waiting, number + 1 - len(known))
            if number >= len(known):
                break
            write(known[number]())
        known += waiting
        if len(known) > MOST_TASKS:
            raise CompileError(f"{len(known)} kernels are wanted ahead, at most {MOST_TASKS} can be")
        write(Found(len(known)))
    except XservError as error:
        write(Failed(problem_of(error)))


def count_processes() -> int:
    """One for each processor, if memory allows."""
    cores, room = len(os.sched_getaffinity(0)), available_memory_bytes() // PROCESS_BYTES
    return max(1, min(cores, room, MOST_PROCESSES))


def lines_of(commands: Sequence[Sequence[str]], pass_fds: Sequence[int] = ()) -> Generator[bytes, None, None]:
    """Starts Python with each command's arguments and yields every line that a process writes, until all have ended.
    Closing the iterator ends them.

    Raises CompileError, with a process's stderr, if its exit status is not 0.
    """
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for words in commands:
            worker = stack.enter_context(_started([sys.executable, "-P", *words], pass_fds))
            selector.register(worker.lines, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                if line := worker.lines.readline():
                    yield line
                else:
                    selector.unregister(worker.lines)
                    worker.check_end()


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    lines: IO[bytes]
    said: IO[bytes]  # the process's stderr

    def check_end(self) -> None:
        status = self.process.wait()
        if status:
            self.said.seek(0)
            words = self.said.read().decode(errors="replace").strip()[-2000:]
            raise CompileError(f"a process that compiles kernels ended with status {status}: {words}")


@contextmanager
def _started(command: list[str], pass_fds: Sequence[int]) -> Iterator[_Worker]:
    """A worker, which ends with the block."""
    with tempfile.TemporaryFile() as said:
        # Unbuffered, so that the selector sees all pending output.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, bufsize=0, pass_fds=pass_fds
        )
        assert process.stdout is not None
        try:
            yield _Worker(process, process.stdout, said)
        finally:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:])
