"""PTX → cubin by nvJitLink, which is ptxas as a library. No GPU is needed.

nvJitLink assembles PTX to be linked with other code, and ptxas then ignores `setmaxnreg`, since other code might rely
on the registers. Only link-time IR is assembled as a whole. So PTX with `setmaxnreg` is
wrapped: an empty module of LLVM IR that has the text as its module-level assembly, which NVVM hands on as it is.

`require_compiler` loads the libraries that compile kernels, NVVM with its libdevice and nvJitLink, all of CUDA 13.
`cuda.pathfinder` looks for them in Python's packages, and below CUDA_PATH or CUDA_HOME. Where neither variable is set
and the packages lack NVVM, CUDA_HOME becomes the toolkit whose nvcc is on the PATH.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runtime.device.errors import CompileError

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BLOCKS = re.compile(r"\.minnctapersm\s+(\d+)")
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
    """Assembles a text that holds one kernel for an architecture, as "sm_90a". Where so many blocks of a multiprocessor
    as it asks for leave a thread too few registers, there are fewer.

    Raises CompileError with ptxas's own words.
    """
    made, asked = _assemble(ptx, arch), _BLOCKS.search(ptx)
    for count in range(int(asked[1]) - 1, 0, -1) if asked is not None and not _WHOLE.search(ptx) else ():
        if not made.spill_store_bytes + made.spill_load_bytes:
            break
        made = _assemble(_BLOCKS.sub(f".minnctapersm {count}", ptx), arch)
    return made


def _assemble(ptx: str, arch: str) -> Assembled:
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


_LIBRARIES = {"nvrtc": "nvidia-cuda-nvrtc", "nvvm": "nvidia-nvvm", "nvJitLink": "nvidia-nvjitlink"}
"""The libraries to load, and their packages."""
_VARIABLES = ("CUDA_PATH", "CUDA_HOME")


@functools.cache
def require_compiler() -> None:
    """Loads the libraries into this process. Raises CompileError with each missing one and its sources."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    home = toolkit()
    if home is not None and not _has_package("nvidia-nvvm") and not any(os.environ.get(each) for each in _VARIABLES):
        os.environ["CUDA_HOME"] = str(home)
    missing = []
    for library, package in _LIBRARIES.items():
        try:
            load_nvidia_dynamic_lib(library)
        except (DynamicLibNotFoundError, RuntimeError, OSError):  # by its version
            missing.append(f"lib{library} (pip install {package})")
    if missing:
        also = f"the CUDA toolkit {home}" if home is not None else "no CUDA toolkit, since nvcc is not on the PATH"
        raise CompileError(
            f"the kernels' compiler lacks {', '.join(missing)}; searched were Python's packages and {also}. CUDA_HOME "
            "names a toolkit of CUDA 13. A bundle of kernels in the cache (xserv kernels build --bundle, on a machine "
            "that has the compiler) needs none of this"
        )


def toolkit() -> Path | None:
    """The folder of the CUDA toolkit: CUDA_PATH, CUDA_HOME, or nvcc's; None where there is none."""
    for name in _VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name])
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    homes = (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda"))  # nvcc may be a script that calls another
    return next((home for home in homes if (home / "nvvm").is_dir()), None)


def toolkit_version() -> str:
    """The toolkit's folder and version, where kernels are compiled by it; "-" where Python's packages do it."""
    home = None if _has_package("nvidia-nvvm") else toolkit()
    if home is None:
        return "-"
    try:
        return f"{home} {(home / 'version.json').read_text(encoding='utf-8')}"
    except OSError:
        return str(home)


def _has_package(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
