"""Small PTX kernels run on a device of their own: one 32-bit result a thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runtime.emulator.execution.counters import Counters
from runtime.emulator.execution.launch import Checks, LoadedKernel, launch, load
from runtime.emulator.memory.device_memory import Machine

Dim3 = tuple[int, int, int]


def kernel_text(body: str, variables: str = "", name: str = "k", inside: str = "") -> str:
    """An entry (out, in) that stores %r0 of each thread. On entry %r1 is the thread's index, %r2 the block's, %r3 the
    lane; %d1 the address of `in`; free are %r4-39, %p0-9, %d2-9, %f0-9."""
    return f"""
{variables}
.visible .entry {name}(.param .u64 out, .param .u64 in)
{{
.reg .pred %p<10>; .reg .b32 %r<40>; .reg .f32 %f<10>; .reg .b64 %d<10>; .reg .b32 %place;
.reg .b64 %out, %wide; {inside}
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %laneid;
mov.u32 %r0, 0;
ld.param.u64 %d1, [in];
{body}
mov.u32 %place, %ntid.x;
mad.lo.u32 %place, %place, %r2, %r1;
mul.wide.u32 %wide, %place, 4;
ld.param.u64 %out, [out];
add.u64 %out, %out, %wide;
st.global.u32 [%out], %r0;
ret;
}}
"""


HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def entry(body: str, variables: str = "", *, inside: str = "", cache: Path | None = None) -> LoadedKernel:
    """The kernel of `kernel_text`, loaded."""
    return load(HEADER + kernel_text(body, variables, inside=inside), cache).kernel("k")


def run(kernel: LoadedKernel | str, *arguments: Any, **options: Any) -> np.ndarray:
    """What each thread stored: uint32 [blocks, threads]. Arguments are `run_counted`'s."""
    return run_counted(kernel, *arguments, **options)[0]


def run_counted(
    kernel: LoadedKernel | str,
    threads: int = 32,
    blocks: int = 1,
    inputs: np.ndarray | None = None,
    *,
    cluster: int = 1,
    shared_bytes: int = 0,
    checks: Checks = Checks.ALL,
    seed: int = 0,
    num_threads: int = 2,
) -> tuple[np.ndarray, Counters]:
    """What each thread stored, uint32 [blocks, threads], and the launch's counters. `inputs` is what `in` points at, by
    default 4 KiB of zeros."""
    loaded = entry(kernel) if isinstance(kernel, str) else kernel
    machine = Machine(16 << 20)
    try:
        given = np.zeros(1024, np.uint32) if inputs is None else np.ascontiguousarray(inputs)
        source, target = machine.allocate(max(given.nbytes, 4)), machine.allocate(4 * threads * blocks)
        machine.write(source, given.tobytes())
        counters = launch(
            loaded, machine, (blocks, 1, 1), (threads, 1, 1), shared_bytes,
            np.array([target, source], np.uint64).tobytes(), (cluster, 1, 1),
            checks=checks, variables=loaded.program.place(machine), seed=seed, num_threads=num_threads,
        )  # fmt: skip
        data = np.frombuffer(machine.read(target, 4 * threads * blocks), np.uint32)
        return data.reshape(blocks, threads).copy(), counters
    finally:
        machine.close()
