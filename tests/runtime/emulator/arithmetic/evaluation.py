"""PTX statements on columns of operands: what the tables of instructions are checked with.

Many cases go into one kernel, since translation costs more than running. Each thread takes one row of every case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine

TARGET = "sm_100a"
THREADS = 1024
_TYPES = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}


@dataclass(frozen=True)
class Case:
    """A statement with {0}, {1} … for the operands and {d} for the result, whose dtype is `result`.

    Registers are as wide as their columns; %p and %q are predicates of the statement's own, %w %x 32-bit and %y 64-bit
    registers, %h 16-bit ones.
    """

    statement: str
    operands: Sequence[np.ndarray]
    result: object = np.uint32


def kernel_text(cases: Sequence[Case], rows: int) -> str:
    """The kernel `k` (inputs, results): columns lie one after another, each of `rows` rows of eight bytes."""
    lines = [
        f".version 9.2\n.target {TARGET}\n.address_size 64",
        ".visible .entry k(.param .u64 inputs, .param .u64 results)\n{",
        ".reg .b64 %in, %out, %row;\n.reg .b32 %thread;",
        "ld.param.u64 %in, [inputs];\nld.param.u64 %out, [results];",
        "mov.u32 %thread, %tid.x;\nmul.wide.u32 %row, %thread, 8;\nadd.u64 %in, %in, %row;\nadd.u64 %out, %out, %row;",
    ]
    column = 0
    for index, case in enumerate(cases):
        lines.append("{\n.reg .pred %p, %q;\n.reg .b16 %h<4>;\n.reg .b32 %w, %x;\n.reg .b64 %y;")
        names = {}
        for number, operand in enumerate(case.operands):
            kind = _TYPES[operand.dtype.itemsize]
            lines.append(f".reg .{kind} %a{number};\nld.global.{kind} %a{number}, [%in+{8 * rows * column}];")
            names[str(number)] = f"%a{number}"
            column += 1
        kind = _TYPES[np.dtype(case.result).itemsize]
        lines.append(f".reg .{kind} %d;")
        statement = case.statement.replace("{d}", "%d")
        for number, name in names.items():
            statement = statement.replace("{" + number + "}", name)
        lines.append(f"{statement}\nst.global.{kind} [%out+{8 * rows * index}], %d;\n}}")
    return "\n".join([*lines, "ret;\n}\n"])


def evaluate(cases: Sequence[Case]) -> list[np.ndarray]:
    """Runs every case; the results in the cases' order, each as long as its columns."""
    counts = [max((len(operand) for operand in case.operands), default=1) for case in cases]
    rows = max(counts)
    assert 0 < rows <= THREADS
    columns = []
    for case in cases:
        for operand in case.operands:
            column = np.zeros((rows, 8), np.uint8)
            column[: len(operand), : operand.dtype.itemsize] = (
                np.ascontiguousarray(operand).view(np.uint8).reshape(len(operand), -1)
            )
            columns.append(column)
    inputs = np.concatenate(columns) if columns else np.zeros((1, 8), np.uint8)
    raw = run(kernel_text(cases, rows), inputs.tobytes(), 8 * rows * len(cases), rows)
    table = np.frombuffer(raw, np.uint8).reshape(len(cases), rows, 8)
    found = []
    for case, count, block in zip(cases, counts, table):
        dtype = np.dtype(case.result)
        found.append(np.ascontiguousarray(block[:count, : dtype.itemsize]).view(dtype)[:, 0])
    return found


def check(cases: Sequence[Case], expected: Sequence[list[int]]) -> None:
    assert len(cases) == len(expected)
    for case, found, wanted in zip(cases, evaluate(cases), expected):
        assert found.tolist() == wanted, case.statement


def run(text: str, inputs: bytes, result_bytes: int, threads: int) -> bytes:
    """Launches `k` with one block on a device of its own and reads the results back."""
    machine = Machine(64 << 20, TARGET)
    source, target = machine.allocate(len(inputs)), machine.allocate(result_bytes)
    machine.write(source, inputs)
    machine.fill(target, 0, result_bytes)
    parameters = np.array([source, target], np.uint64).tobytes()
    launch(load(text).kernel("k"), machine, (1, 1, 1), (threads, 1, 1), 0, parameters, checks=Checks.ALL)
    return bytes(machine.read(target, result_bytes))
