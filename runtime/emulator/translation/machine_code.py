"""LLVM IR → machine code → a function's address.

Optimisation level 0 and no passes over the IR: a kernel's chunks are straight code that needs none, and level 1 takes
twice as long to compile for kernels that run no faster.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from runtime.emulator.translation.operations import compile_operations

_OPTIMISATION = 0


@functools.cache
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _target_machine() -> Any:
    _initialise()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=_OPTIMISATION, jit=True
    )


@functools.cache
def _features() -> str:
    return str(llvm.get_host_cpu_features().flatten())


def describe() -> str:
    """Inputs of the machine code besides the IR."""
    return f"{llvmlite.__version__} {llvm.get_host_cpu_name()} {_features()} O{_OPTIMISATION}"


def emit_object(text: str) -> bytes:
    """The object file of a module of LLVM IR."""
    _initialise()
    module = llvm.parse_assembly(text)
    return bytes(_target_machine().emit_object(module))


class NativeCode:
    """An object file in memory, linked against the operations that it names."""

    def __init__(self, code: bytes, operations: Iterable[str]) -> None:
        compile_operations(operations)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address = int(self._engine.get_function_address("run"))
        assert self.address
