"""A machine with arrays on it, and kernels whose parameters are the arrays' addresses."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np
import pytest

from runtime.emulator.execution.counters import Counters
from runtime.emulator.execution.fault import EmulatorFault, FaultKind
from runtime.emulator.execution.launch import Checks, launch, load
from runtime.emulator.memory.device_memory import Machine

Dim3 = tuple[int, int, int]
HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def kernel_text(num_arrays: int, body: str, inside: str = "", outside: str = "") -> str:
    """An entry whose parameters p0, p1 … are in %a0, %a1 …; %tid, %block, %lane hold what they say. Free registers:
    %r0-63, %d0-31, %f0-31, %h0-7 (16 bits), %p0-9."""
    parameters = ", ".join(f".param .u64 p{index}" for index in range(num_arrays))
    loads = "\n".join(f"ld.param.u64 %a{index}, [p{index}];" for index in range(num_arrays))
    return f"""{HEADER}
{outside}
.visible .entry k({parameters})
{{
.reg .pred %p<10>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %d<32>;
.reg .b64 %a<8>; .reg .b32 %thread, %block, %lane;
{inside}
mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %lane, %laneid;
{loads}
{body}
done:
ret;
}}
"""


class Device:
    """A machine that is closed at the end of a `with`."""

    def __init__(self, size_bytes: int = 16 << 20) -> None:
        self.machine = Machine(size_bytes)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.machine.close()

    def put(self, array: np.ndarray) -> int:
        """The array's address on the machine."""
        address = self.machine.allocate(array.nbytes)
        self.machine.write(address, array.tobytes())
        return address

    def get(self, address: int, shape: Sequence[int] | int, dtype: object) -> np.ndarray:
        kind = np.dtype(dtype)  # type: ignore[call-overload]
        data = self.machine.read(address, int(np.prod(shape)) * kind.itemsize)
        return np.frombuffer(data, kind).reshape(shape)

    def run(
        self, text: str, *addresses: int, grid: Dim3 = (1, 1, 1), block: Dim3 = (32, 1, 1), shared_bytes: int = 0,
        cluster: Dim3 = (1, 1, 1), checks: Checks = Checks.ALL, seed: int = 0,
    ) -> Counters:  # fmt: skip
        program = load(text)
        return launch(
            program.kernel("k"), self.machine, grid, block, shared_bytes, np.array(addresses, np.uint64).tobytes(),
            cluster, checks=checks, variables=program.place(self.machine), seed=seed,
        )  # fmt: skip

    def fault(self, kind: FaultKind, text: str, *addresses: int, **options: object) -> EmulatorFault:
        """Runs what has to end with a fault of this kind."""
        with pytest.raises(EmulatorFault) as caught:
            self.run(text, *addresses, **options)  # type: ignore[arg-type]
        assert caught.value.kind == kind, str(caught.value)
        return caught.value
