"""PTX modules ready to run: parsed once, each kernel translated at its first use, or read from disk."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from runtime.collector import NO_COLLECTION
from runtime.emulator.async_copies.proxy import needs_proxy
from runtime.emulator.memory.device_memory import Machine
from runtime.emulator.races.clocks import granule_shift
from runtime.emulator.translation import object_cache
from runtime.emulator.translation.dispatch import translate
from runtime.emulator.translation.lowering import Lowering
from runtime.emulator.translation.object_cache import Entry
from runtime.emulator.translation.ptx import Instruction, Kernel, parse
from runtime.emulator.translation.symbols import (
    SharedLayout,
    local_offsets,
    parameter_offsets,
    place_variables,
    shared_layout,
    used_variables,
)
from runtime.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Translation:
    """A kernel's translation.

    Attributes:
        code: machine code; `code.address` is `run`.
        register_bytes: a warp's register file.
        chunks: first and last + 1 instruction of each counted stretch.
        reads_undefined: whether some register may be read before it is written.
    """

    code: object_cache.NativeCode
    register_bytes: int
    chunks: tuple[tuple[int, int], ...]
    reads_undefined: bool


class LoadedKernel:
    """A kernel of a program.

    Attributes:
        kernel: its text, parsed.
        module: its module.
        shared: where its shared variables lie.
        parameter_bytes: of all its parameters, each aligned to its size.
        variables: the .global and .const variables that it names, in the order of its symbol table.
        local_bytes: local memory of a thread.
        communicates: whether blocks of one launch may see each other's writes: then they share one OS thread.
        leaves_work: whether it starts asynchronous work, which has to be closed when warps and blocks end.
        needs_proxy, race_shift: for the checkers.
    """

    def __init__(self, program: Program, kernel: Kernel) -> None:
        self.program, self.kernel, self.module = program, kernel, program.module
        self.shared: SharedLayout = shared_layout(program.module, kernel)
        self.parameter_bytes = parameter_offsets(kernel)[1]
        self.local_bytes = local_offsets(kernel)[1]
        self.variables = used_variables(program.module, kernel)
        self.communicates = any(_communicates(instruction) for instruction in kernel.instructions)
        self.leaves_work = any(_leaves_work(instruction) for instruction in kernel.instructions)
        self.needs_proxy = needs_proxy(kernel)
        self.race_shift = granule_shift(kernel.instructions)

    @property
    def name(self) -> str:
        return self.kernel.name

    @functools.cached_property
    def translation(self) -> Translation:
        """Translated now, or read from disk.

        Raises:
            UnsupportedInstruction: an instruction that the emulator lacks.
        """
        folder = self.program.cache_folder
        key = object_cache.key_of(self.program.text, self.name, object_cache.sources_digest(), object_cache.describe())
        entry = object_cache.load(key, folder)
        if entry is None:
            with object_cache.making(key, folder):
                entry = object_cache.load(key, folder)  # by another process, which held the lock
                if entry is None:
                    self.program.num_translated += 1
                    entry = self._translate()
                    object_cache.store(key, entry, folder)
        header = entry.header
        return Translation(
            object_cache.NativeCode(entry.code, header["operations"]),
            header["register_bytes"],
            tuple((first, last) for first, last in header["chunks"]),
            header["reads_undefined"],
        )

    def _translate(self) -> Entry:
        with NO_COLLECTION:  # collecting garbage, of which there is none, takes a quarter of the time
            low = Lowering(self.module, self.kernel)
            translate(low)
            text = str(low.ir)
        header = {
            "operations": low.operations,
            "register_bytes": low.register_bytes,
            "chunks": low.chunks,
            "reads_undefined": bool(low.wgmma or (low.blocks and low.blocks[0].live_in)),
        }
        return Entry(header, object_cache.emit_object(text))


_SHARED_SPACES = {"shared", "shared::cta", "shared::cluster"}
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}


def _communicates(instruction: Instruction) -> bool:
    parts = set(instruction.parts)
    if instruction.parts[0] in ("atom", "red", "multimem"):
        return not parts & _SHARED_SPACES
    if instruction.parts[0] in ("ld", "st"):
        return bool(parts & _STRONG) and not parts & _SHARED_SPACES
    return instruction.opcode.startswith("cp.reduce.async.bulk")


def _leaves_work(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("cp.", "wgmma.", "st.async", "red.async"))


class Program:
    """A PTX module.

    Attributes:
        text, module: as given, and parsed.
        num_translated: kernels that were translated in this process, rather than read from disk.
    """

    def __init__(self, text: str, cache_folder: Path | None = None) -> None:
        self.text, self.module = text, parse(text)
        self.cache_folder = cache_folder
        self.num_translated = 0
        self._kernels: dict[str, LoadedKernel] = {}

    def kernel(self, name: str | None = None) -> LoadedKernel:
        """A kernel by its name, which may be left out where there is one alone. Raises InvalidArgumentError."""
        names = [kernel.name for kernel in self.module.kernels.values() if kernel.is_entry]
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise InvalidArgumentError(f"kernel {name!r} is not among {', '.join(names) or 'none'}", param="name")
        if name not in self._kernels:
            self._kernels[name] = LoadedKernel(self, self.module.kernels[name])
        return self._kernels[name]

    def static_shared_bytes(self, name: str) -> int:
        """Shared memory that a kernel's own variables take."""
        return self.kernel(name).shared.static_bytes

    def place(self, machine: Machine) -> dict[str, int]:
        """Allocates the .global and .const variables on a machine: name → address, to be handed to each launch."""
        return place_variables(machine, self.module)


def load(text: str, cache_folder: Path | None = None) -> Program:
    """Parses a PTX module. Raises PtxError with the line at fault."""
    return Program(text, cache_folder)
