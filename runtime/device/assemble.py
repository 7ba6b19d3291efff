"""PTX → cubin by nvJitLink, which is ptxas as a library. No GPU is needed.

nvJitLink assembles PTX to be linked with other code, and ptxas then ignores `setmaxnreg`, since other code might rely
on the registers. Only link-time IR is assembled as a whole. So PTX with `setmaxnreg` is
wrapped: an empty module of LLVM IR that has the text as its module-level assembly, which NVVM hands on as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from runtime.device.errors import CompileError

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_WHOLE = re.compile(r"\bsetmaxnreg\b")
_HEADER = re.compile(r"^\s*\.(version|target|address_size)\b.*$", re.MULTILINE)  # NVVM writes its own
_MODULE = """target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-\
f64:64:64-v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
target triple = "nvptx64-nvidia-cuda"
module asm "{}"
!nvvmir.version = !{{!0}}
!0 = !{{i32 2, i32 0, i32 3, i32 2}}
"""
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Assembled:
    """One kernel's machine code and ptxas's report.

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

    is_whole = _WHOLE.search(ptx) is not None
    image = _link_time_ir(ptx, arch) if is_whole else ptx.encode()
    kind = nvjitlink.InputType.LTOIR if is_whole else nvjitlink.InputType.PTX
    options = [f"-arch={arch}", "-verbose", "-Xptxas=-v", *["-lto"] * is_whole]
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, kind, image, len(image), "kernel")
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


def _link_time_ir(ptx: str, arch: str) -> bytes:
    """A text as the module-level assembly of an empty module."""
    from cuda.bindings import nvvm

    text = _HEADER.sub("", ptx)
    quoted = "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\{ord(c):02X}" for c in text)
    module = _MODULE.format(quoted).encode()
    options = [f"-arch={arch.replace('sm_', 'compute_')}", "-gen-lto"]
    program = nvvm.create_program()
    try:
        nvvm.add_module_to_program(program, module, len(module), "kernel")
        try:
            nvvm.compile_program(program, len(options), options)
        except nvvm.nvvmError as error:
            words = _log(nvvm.get_program_log_size, nvvm.get_program_log, program) or str(error)
            raise CompileError(f"NVVM refuses to wrap a kernel for {arch}: {words}") from None
        result = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, result)
    finally:
        nvvm.destroy_program(program)
    return bytes(result)


def _log(size_of: Any, read: Any, handle: int) -> str:
    size = size_of(handle)
    buffer = bytearray(size)
    if size:
        read(handle, buffer)
    return buffer.rstrip(b"\0 \n").decode(errors="replace")
