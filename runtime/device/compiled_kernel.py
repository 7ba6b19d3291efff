"""A compiled kernel: its image and the facts that a launch needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from runtime.device.errors import CompileError

if TYPE_CHECKING:
    from numba_kernels.cuda.specialisation import Specialisation

# How `struct` packs an argument, by the name of its numba type. A pointer is an address.
_PACKED = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float32": "f", "float64": "d", "tensor_map": "128s",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel's image and the facts that a launch needs.

    Attributes:
        name: its entry in the image, the specialisation's name as an identifier.
        arch: "sm_90a".
        is_ptx: whether the image is a PTX text that ends in NUL (for an emulated device), not a cubin.
        argument_format: the code of `struct` for each argument, with spaces between them.
        waits_for_dependency: whether it executes ``griddepcontrol.wait``, as a dependent launch must.
        num_registers, spill_bytes, static_shared_bytes: by ptxas; 0 in a PTX.
        image: the bytes to load.
    """

    name: str
    arch: str
    is_ptx: bool
    argument_format: str
    waits_for_dependency: bool
    num_registers: int
    spill_bytes: int
    static_shared_bytes: int
    image: bytes


def facts_of(kernel: CompiledKernel) -> dict[str, Any]:
    """All fields but the image, for JSON."""
    return {name: value for name, value in asdict(kernel).items() if name != "image"}


def kernel_of(facts: Mapping[str, Any], image: bytes) -> CompiledKernel | None:
    """The kernel of `facts_of` and an image; None where a field is missing, unknown or of another type."""
    try:
        kernel = CompiledKernel(image=image, **facts)
    except TypeError:
        return None
    types = {"str": str, "bool": bool, "int": int, "bytes": bytes}
    is_whole = all(type(getattr(kernel, field.name)) is types[str(field.type)] for field in fields(kernel))
    return kernel if is_whole else None


def image_kind(is_ptx: bool) -> str:
    """ "ptx" or "cubin"."""
    return "ptx" if is_ptx else "cubin"


def argument_format(specialisation: Specialisation) -> str:
    """The code of `struct` for each argument, with spaces between them. Raises CompileError for a type that a launch
    cannot pass."""
    letters = []
    for number, kind in enumerate(map(str, specialisation.argument_types)):
        letter = "Q" if kind.endswith("*") else _PACKED.get(kind)
        if letter is None:
            raise CompileError(
                f"kernel {specialisation.name}: argument {number} is a {kind}, no number, pointer or tensor map"
            )
        letters.append(letter)
    return " ".join(letters)


def identifier(name: str) -> str:
    """A name with everything but letters, digits and _ replaced."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)
