"""A kernel's machine code, as nvdisasm shows it.

nvdisasm is not part of the compilers that the engine needs: NVIDIA's wheel nvidia-cuda-nvdisasm, which the extra "dev"
brings, the CUDA toolkit and Triton have it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

_LABEL = re.compile(r"^\s*(\.L_x_\d+|\.L_\d+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"`\((\.L_[\w]+)\)")
_WHEEL = "nvidia-cuda-nvdisasm"


class NoDisassemblerError(RuntimeError):
    """nvdisasm is not on this machine."""


@dataclass(frozen=True, slots=True)
class MachineInstruction:
    """One instruction: its opcode with modifiers, the index of its branch target (or None), and whether it is
    unconditional: it has no predicate, and is not a branch of diverged lanes (BRA.DIV)."""

    opcode: str
    target: int | None
    is_certain: bool = True


def find_nvdisasm(asked: str | None = None) -> str:
    """The program: `asked`, or on PATH, or its wheel's, or an installed Triton's. Raises NoDisassemblerError with the
    searched places."""
    if asked is not None:
        found = shutil.which(asked)
        if found is None:
            raise NoDisassemblerError(f"--nvdisasm {asked}: no such program")
        return found
    found = next(filter(None, (shutil.which(place) for place in ("nvdisasm", *map(str, _places())))), None)
    if found is None:
        raise NoDisassemblerError(
            f"nvdisasm is neither on PATH nor in an installed {_WHEEL} or triton: pip install {_WHEEL}, which the "
            'extra "dev" brings, or name the CUDA toolkit\'s by --nvdisasm'
        )
    return found


def nvdisasm_if_any() -> str | None:
    """The program, or None if it is not on this machine."""
    try:
        return find_nvdisasm()
    except NoDisassemblerError:
        return None


def _places() -> Iterator[Path]:
    """Its paths in installed packages."""
    with suppress(PackageNotFoundError):
        yield from (Path(file.locate()) for file in files(_WHEEL) or () if file.name == "nvdisasm")
    triton = find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        yield Path(triton.submodule_search_locations[0], "backends", "nvidia", "bin", "nvdisasm")


def disassemble(cubin: bytes, nvdisasm: str) -> list[MachineInstruction]:
    """The code of a cubin that holds one kernel. Raises RuntimeError with nvdisasm's message if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-c", str(file)], capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(listing: str) -> list[MachineInstruction]:
    """nvdisasm's text as instructions. Raises ValueError for a branch to an unknown label."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str | None, bool]] = []
    for line in listing.split("\n"):
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(line):
            opcode = instruction[2]
            target = _TARGET.search(instruction[3]) if opcode.split(".")[0] in ("BRA", "BRX", "JMP") else None
            is_certain = instruction[1] is None and not opcode.startswith("BRA.")
            found.append((opcode, target[1] if target else None, is_certain))
    missing = {target for _, target, _ in found if target is not None and target not in labels}
    if missing:
        raise ValueError(f"branches to {sorted(missing)}, which the listing does not have")
    return [
        MachineInstruction(opcode, None if target is None else labels[target], is_certain)
        for opcode, target, is_certain in found
    ]
