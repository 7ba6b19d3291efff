"""The driver's functions for modules, their kernels and the attributes of those. An image is PTX text.

A kernel is translated when it is first launched. ptxas's results are missing from its text: the number of registers is
an estimate (`basic_blocks.estimate_registers`), spills are zero.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from runtime.emulator.driver.architectures import (
    DEFAULT_SHARED_BYTES_PER_BLOCK,
    MAX_THREADS_PER_BLOCK,
    blocks_per_sm,
)
from runtime.emulator.driver.state import Context, DriverState, R, Refused, entry, handle_of
from runtime.emulator.execution.launch import Program, load
from runtime.emulator.translation.basic_blocks import estimate_registers
from runtime.emulator.translation.ptx import Kernel, PtxError
from runtime.emulator.translation.symbols import parameter_offsets
from runtime.errors import OutOfMemoryError

_A = cu.CUfunction_attribute
_TARGET = re.compile(rb"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
_ELF = b"\x7fELF"
_FATBIN = b"\x50\xed\x55\xba"


class Module:
    """A loaded image: its program, and where its variables lie.

    Attributes:
        variables: name → (address, size in bytes) of its .global and .const variables.
    """

    def __init__(self, handle: int, driver: ModuleFunctions, context: Context, program: Program) -> None:
        self.handle, self.driver, self.context, self.program = handle, driver, context, program
        self.functions: dict[str, Function] = {}
        self.variables = program.place(context.machine)

    def unload(self) -> None:
        machine = self.context.machine
        for address in self.variables.values():
            machine.free(address)
        for function in self.functions.values():
            self.driver.functions.pop(function.handle, None)
        self.context.modules.pop(self.handle, None)


class Function:
    """A kernel of a module, as the driver launches it.

    Attributes:
        offsets, sizes: of its parameters, in bytes; together `parameter_bytes` long.
        static_shared_bytes: shared memory of its own variables.
        max_threads: a block.
        required_block, required_cluster: fixed by its text, or None.
        max_dynamic_shared_bytes: the attribute, which a launch may not exceed.
        checked: launch configurations that have been found valid.
        waits_for_dependency, starts_next_early: whether it executes griddepcontrol.wait, and launch_dependents before.
    """

    def __init__(self, handle: int, module: Module, kernel: Kernel) -> None:
        self.handle, self.module, self.kernel = handle, module, kernel
        self.name = kernel.name
        self.label = f"kernel {kernel.name}"
        self.context = module.context
        places, self.parameter_bytes = parameter_offsets(kernel)
        self.offsets, self.sizes = [offset for offset, _ in places.values()], [size for _, size in places.values()]
        self.static_shared_bytes = module.program.static_shared_bytes(kernel.name)
        directives = kernel.directives
        self.required_block = _dims(directives["reqntid"]) if "reqntid" in directives else None
        self.required_cluster = _dims(directives["reqnctapercluster"]) if "reqnctapercluster" in directives else None
        most = math.prod(directives.get("maxntid") or self.required_block or (MAX_THREADS_PER_BLOCK,))
        self.max_threads = min(most, MAX_THREADS_PER_BLOCK)
        self.max_dynamic_shared_bytes = max(DEFAULT_SHARED_BYTES_PER_BLOCK - self.static_shared_bytes, 0)
        self.checked: set[Any] = set()
        self._registers = 0
        opcodes = {instruction.opcode for instruction in kernel.instructions}
        self.waits_for_dependency = "griddepcontrol.wait" in opcodes
        controls = [each.opcode for each in kernel.instructions if each.opcode.startswith("griddepcontrol.")]
        self.starts_next_early = controls[:1] == ["griddepcontrol.launch_dependents"]

    @property
    def registers(self) -> int:
        if not self._registers:
            self._registers = estimate_registers(self.kernel)
        return self._registers


def _dims(values: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _image_bytes(image: Any) -> bytes:
    """The image's text without its closing zero."""
    if isinstance(image, str):
        return image.encode()
    if isinstance(image, int):
        if image == 0:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, "a null image")
        return ctypes.string_at(image)
    return bytes(memoryview(image)).rstrip(b"\0")


class ModuleFunctions(DriverState):
    """cuModule…, cuFunc…"""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.functions: dict[int, Function] = {}

    # -- modules --------------------------------------------------------------------------------------------------

    @entry(1)
    def cuModuleLoadData(self, image: Any) -> Any:
        return self._load(image)

    def _load(self, image: Any) -> Any:
        context = self.context()
        self.refuse_unsafe("cuModuleLoadData")
        data = _image_bytes(image)
        if data.startswith((_ELF, _FATBIN)):
            raise Refused(R.CUDA_ERROR_NO_BINARY_FOR_GPU, "an emulated device runs PTX text, not machine code")
        model = context.device.model
        target = _TARGET.search(data)
        if target is None:
            raise Refused(R.CUDA_ERROR_INVALID_IMAGE, "the image is no PTX: it names no .target")
        if not model.runs(target[1].decode()):
            raise Refused(
                R.CUDA_ERROR_NO_BINARY_FOR_GPU, f"PTX for {target[1].decode()} does not run on {model.device_name}"
            )
        try:
            module = Module(self.new_handle(), self, context, load(data.decode()))
        except (PtxError, UnicodeDecodeError) as error:
            self.last_fault = error
            raise Refused(R.CUDA_ERROR_INVALID_PTX, str(error)) from None
        except OutOfMemoryError as error:
            raise Refused(R.CUDA_ERROR_OUT_OF_MEMORY, str(error)) from None
        context.modules[module.handle] = module
        return cu.CUmodule(module.handle)

    def _module(self, handle: Any) -> Module:
        for context in self.contexts.values():
            if isinstance(module := context.modules.get(handle_of(handle)), Module):
                return module
        raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"module {handle_of(handle):#x} does not exist")

    @entry(is_release=True)
    def cuModuleUnload(self, hmod: Any) -> None:
        module = self._module(hmod)
        self.refuse_unsafe("cuModuleUnload")
        self.scheduler.finish_all(module.context)
        self.raise_if_failed(module.context)
        module.unload()

    @entry(1)
    def cuModuleGetFunction(self, hmod: Any, name: Any) -> Any:
        module = self._module(hmod)
        wanted = _name(name)
        function = module.functions.get(wanted)
        if function is None:
            kernel = module.program.module.kernels.get(wanted)
            if kernel is None or not kernel.is_entry:
                names = ", ".join(module.program.module.kernels)
                raise Refused(R.CUDA_ERROR_NOT_FOUND, f"no kernel {wanted!r}: {names}")
            function = Function(self.new_handle(), module, kernel)
            module.functions[wanted] = function
            self.functions[function.handle] = function
        return cu.CUfunction(function.handle)

    # -- functions ------------------------------------------------------------------------------------------------

    def function(self, handle: Any) -> Function:
        function = self.functions.get(handle_of(handle))
        if function is None:
            raise Refused(R.CUDA_ERROR_INVALID_HANDLE, f"function {handle_of(handle):#x} does not exist")
        return function

    @entry()
    def cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: int) -> None:
        function, value = self.function(hfunc), int(value)
        if attrib == _A.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            limit = function.context.device.model.shared_bytes_per_block - function.static_shared_bytes
            if not 0 <= value <= limit:
                raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{value} bytes of dynamic shared memory: at most {limit}")
            function.max_dynamic_shared_bytes = value
        else:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{attrib!r} cannot be set on emulated kernels")
        function.checked.clear()

    def prepare(self, function: Function) -> Any:
        """The translated kernel."""
        return function.module.program.kernel(function.name)

    # -- occupancy ------------------------------------------------------------------------------------------------

    def blocks_per_sm_of(self, function: Function, threads: int, dynamic_bytes: int) -> int:
        """Resident blocks. Raises Refused for numbers that no launch has."""
        if threads < 1 or dynamic_bytes < 0:
            raise Refused(R.CUDA_ERROR_INVALID_VALUE, f"{threads} threads, {dynamic_bytes} bytes")
        if threads > function.max_threads or dynamic_bytes > function.max_dynamic_shared_bytes:
            return 0
        shared = function.static_shared_bytes + dynamic_bytes
        return blocks_per_sm(function.context.device.model, threads, function.registers, shared)


def _name(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
