"""PTX → cubin by nvJitLink, which is ptxas as a library. No GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from runtime.device.errors import CompileError

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Assembled:
    """One kernel's machine code and what ptxas said of it.

    Attributes:
        cubin: the image that a driver loads.
        num_registers: of a thread.
        stack_bytes, spill_store_bytes, spill_load_bytes: of a thread, all 0 in a kernel that keeps to registers.
        static_shared_bytes: of a block, beside its dynamic shared memory.
        log: ptxas's text, with its warnings.
    """

    cubin: bytes
    num_registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    log: str


def assemble(ptx: str, arch: str) -> Assembled:
    """Assembles a text that holds one kernel for an architecture, as "sm_90a".

    Raises CompileError with ptxas's own words.
    """
    from cuda.bindings import nvjitlink

    image = ptx.encode()
    handle = nvjitlink.create(3, [f"-arch={arch}", "-verbose", "-Xptxas=-v"])
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, image, len(image), "kernel.ptx")
            nvjitlink.complete(handle)
            cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
            nvjitlink.get_linked_cubin(handle, cubin)
        except nvjitlink.nvJitLinkError as error:
            words = _log(nvjitlink.get_error_log_size, nvjitlink.get_error_log, handle) or str(error)
            raise CompileError(f"nvJitLink refuses a kernel for {arch}: {words}") from None
        log = _log(nvjitlink.get_info_log_size, nvjitlink.get_info_log, handle)
    finally:
        nvjitlink.destroy(handle)
    registers, spills, shared = (pattern.search(log) for pattern in (_REGISTERS, _SPILLS, _SHARED))
    if registers is None or spills is None:
        raise CompileError(f"nvJitLink's log for {arch} does not tell registers and spills: {log!r}")
    stack, stores, loads = (int(number) for number in spills.groups())
    return Assembled(
        bytes(cubin), int(registers[1]), stack, stores, loads, int(shared[1]) if shared is not None else 0, log
    )


def _log(size_of: Any, read: Any, handle: int) -> str:
    size = size_of(handle)
    buffer = bytearray(size)
    if size:
        read(handle, buffer)
    return buffer.rstrip(b"\0 \n").decode(errors="replace")
