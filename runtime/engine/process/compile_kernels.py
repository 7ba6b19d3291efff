"""Compiles GPU kernels ahead of time, in several processes that end afterwards.

    python -m runtime.engine.process.compile_kernels WANTED SHARE NUM_SHARES

is such a process. Each determines the wanted kernels itself, since these are closures, which cannot be sent; it
compiles its share and writes a line of JSON about each. No GPU is needed.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from models.checkpoints.model_files import open_model
from runtime.engine.config import EngineConfig
from runtime.engine.process import compilers
from runtime.engine.process.parent import end_with_parent
from runtime.engine.process.wire import Problem
from runtime.engine.process.wire_errors import error_of, problem_of
from runtime.errors import XservError
from runtime.own_packages import python_module
from runtime.progress import Show

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

ROOT = Path(__file__).resolve().parents[3]
COMMAND = python_module("runtime.engine.process.compile_kernels")
"""The command line of each process, for Python."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels for an architecture, `is_ptx` for an emulated device: those of a model's engine (`model`, a folder, and
    `config`), or all registered ones with `match` in their names."""

    arch: str
    is_ptx: bool
    model: str | None = None
    config: EngineConfig | None = None
    match: str = ""

    def find(self) -> list[Specialisation]:
        """Each once. Raises what `kernels_of_model` raises, and InvalidArgumentError for an unknown architecture."""
        from numba_kernels.cuda.registry import specialisations
        from runtime.device.kernel_cache import is_meant_for
        from runtime.engine.model_kernels import kernels_of_model

        if self.model is None:
            known = list(specialisations())
        else:
            known = kernels_of_model(Path(self.model), self.arch, self.config or EngineConfig())
        return [each for each in known if self.match in each.name and is_meant_for(each, self.arch)]

    def digest(self) -> str:
        """A digest of all that determines the kernels: the fields, the model's config, this project's sources and the
        compiler."""
        from runtime.device.kernel_key import tool_versions

        words = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, model=None)))
        if self.model is not None:
            words.update(msgspec.json.encode(open_model(self.model).config().values()))
        for room in ("models", "numba_kernels", "runtime"):
            for source in sorted((ROOT / room).rglob("*.py")):
                words.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes() + b"\0")
        words.update(tool_versions().encode())
        return words.hexdigest()[:24]


class Found(msgspec.Struct, frozen=True, tag=True):
    """The number of wanted kernels, for all processes together."""

    total: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A kernel is compiled. `is_new` means that it was not on disk."""

    name: str
    is_new: bool
    has_spills: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process has failed."""

    problem: Problem


@dataclass(slots=True)
class Progress:
    """The number of wanted kernels (None until it is known), and the results so far."""

    total: int | None = None
    num_new: int = 0
    num_there: int = 0
    num_spilling: int = 0
    latest: str = ""

    @property
    def num_done(self) -> int:
        return self.num_new + self.num_there


def compile_kernels(wanted: Wanted, show: Show, num_processes: int | None = None) -> Progress:
    """Compiles missing kernels, in so many processes (None for one a processor, if memory allows).

    `show` is called with the progress. Raises CompileError for the first kernel that does not compile or a process that
    crashes, and what `Wanted.find` raises. An unknown architecture is refused before any process starts, since finding
    all kernels takes seconds.
    """
    from runtime.device.kernel_cache import capability_of

    capability_of(wanted.arch)
    shares = num_processes or compilers.num_processes()
    words = msgspec.json.encode(wanted).decode()
    commands = [[*COMMAND, words, str(share), str(shares)] for share in range(shares)]
    progress, decoder = Progress(), msgspec.json.Decoder(Found | Compiled | Failed)
    with closing(compilers.lines_of(commands)) as lines:
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
    return progress


def main(words: str, share: str, num_shares: str) -> None:
    end_with_parent()
    from runtime.device.kernel_cache import KernelCache

    def write(line: Found | Compiled | Failed) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        wanted = msgspec.json.decode(words, type=Wanted)
        found, cache = wanted.find(), KernelCache()
        write(Found(len(found)))
        for each in found[int(share) :: int(num_shares)]:
            before = cache.num_compiled
            kernel = cache.get(each, wanted.arch, is_ptx=wanted.is_ptx)
            write(Compiled(each.name, cache.num_compiled > before, kernel.spill_bytes > 0))
    except XservError as error:
        write(Failed(problem_of(error)))


if __name__ == "__main__":
    main(*sys.argv[1:])
