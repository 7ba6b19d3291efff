"""Launches PTX texts on arrays, and the fragment layouts of the PTX ISA written as index formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
DTYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip


MakeBytes = Callable[[list[int]], bytes]


@dataclass
class InMemory:
    """An argument that is the address of 128 bytes in device memory, made from the arrays' addresses."""

    make: MakeBytes


def launch_text(
    text: str,
    arguments: Sequence[np.ndarray | int | bytes | MakeBytes | InMemory],
    *,
    threads: int = 32,
    blocks: int = 1,
    cluster: int = 1,
    shared_bytes: int = 0,
    checks: Checks = Checks.ALL,
    seed: int = 0,
    is_dependent: bool = False,
) -> list[np.ndarray]:
    """Runs the text's one kernel: arrays go to device memory and come back; ints are 64-bit parameters as they are. The
    memory of a read-only array is declared immutable.

    `bytes` are a parameter of their own, 64-byte aligned; a function makes them of the addresses of the arrays before.
    """
    program = load((HEADER if ".version" not in text else "") + text)
    machine = Machine(16 << 20)
    try:
        parameters, addresses = b"", []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                address = machine.allocate(argument.nbytes)
                machine.write(address, argument.tobytes())
                if not argument.flags.writeable:
                    machine.declare_immutable(address, argument.nbytes)
                addresses.append((address, argument))
                argument = address
            elif isinstance(argument, InMemory):
                data = argument.make([address for address, _ in addresses])
                argument = machine.allocate(len(data))
                machine.write(argument, data)
            elif callable(argument):
                argument = argument([address for address, _ in addresses])
            if isinstance(argument, bytes):
                parameters += b"\0" * (-len(parameters) % 64) + argument
            else:
                parameters += int(argument).to_bytes(8, "little", signed=int(argument) < 0)
        launch(
            program.kernel(next(iter(program.module.kernels))), machine, (blocks, 1, 1), (threads, 1, 1), shared_bytes,
            parameters, (cluster, 1, 1), checks=checks, variables=program.place(machine), seed=seed,
            is_dependent=is_dependent,
        )  # fmt: skip
        return [
            np.frombuffer(machine.read(address, array.nbytes), array.dtype).reshape(array.shape).copy()
            for address, array in addresses
        ]
    finally:
        machine.close()


def words_of(matrix: np.ndarray) -> np.ndarray:
    """Rows of elements → rows of 32-bit words."""
    return np.ascontiguousarray(matrix).view(np.uint32)


def a_fragment(a: np.ndarray) -> np.ndarray:
    """A [16, K] → uint32 [registers, 32]."""
    words, lane = words_of(a), np.arange(32)
    count = words.shape[1] // 2
    return np.stack([words[lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)] for r in range(count)])


def b_fragment(b: np.ndarray) -> np.ndarray:
    """B [K, 8] → uint32 [registers, 32]."""
    words, lane = words_of(b.T), np.arange(32)
    return np.stack([words[lane // 4, lane % 4 + 4 * r] for r in range(words.shape[1] // 4)])


def c_fragment(c: np.ndarray) -> np.ndarray:
    """C [16, N] of 32-bit elements, or of f16 → uint32 [registers, 32]; wgmma's accumulators too, for one warp."""
    lane, registers = np.arange(32), []
    for j in range(c.shape[1] // 8):
        for half in range(2):
            row, column = lane // 4 + 8 * half, 8 * j + 2 * (lane % 4)
            low, high = c[row, column], c[row, column + 1]
            if c.dtype == np.float16:
                registers.append(low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16)
            else:
                registers += [low.view(np.uint32), high.view(np.uint32)]
    return np.stack(registers)


def c_matrix(registers: np.ndarray, dtype: Any) -> np.ndarray:
    """The inverse of `c_fragment`."""
    per_block = 2 if np.dtype(dtype) == np.float16 else 4
    result = np.empty((16, registers.shape[0] // per_block * 8), dtype)
    lane = np.arange(32)
    for j in range(result.shape[1] // 8):
        for half in range(2):
            row, column = lane // 4 + 8 * half, 8 * j + 2 * (lane % 4)
            if per_block == 2:
                word = registers[2 * j + half]
                result[row, column] = word.astype(np.uint16).view(np.float16)
                result[row, column + 1] = (word >> 16).astype(np.uint16).view(np.float16)
            else:
                result[row, column] = registers[4 * j + 2 * half].view(dtype)
                result[row, column + 1] = registers[4 * j + 2 * half + 1].view(dtype)
    return result
