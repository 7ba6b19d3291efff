"""What a rank does in `test_processes`: run as a process, `SCENARIO UNIQUE_ID RANK`, of two; it prints its error."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from runtime.device.errors import LaunchError
from runtime.device.nccl import NcclComm, NcclError, open_nccl
from runtime.dtype import float32
from tests.runtime.device.emulated import new_gpu

SIZE = 600_000


def main() -> None:
    scenario, unique_id, rank = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
    gpu = new_gpu(num_devices=1, memory_bytes=1 << 27)
    nccl = open_nccl(gpu.driver)
    comm = NcclComm(gpu, nccl, unique_id, rank, 2)
    window = comm.new_window(4 * SIZE)
    for _ in range(2):
        gpu.write(window.address, np.full(SIZE, rank + 1, np.float32))
        comm.all_reduce(window.address, window.address, SIZE, float32)
    found = np.empty(SIZE, np.float32)
    gpu.read(window.address, found)
    assert np.array_equal(found, np.full(SIZE, 3, np.float32))
    if rank == 1 and scenario == "ends":
        os._exit(0)
    if rank == 1 and scenario == "aborts":
        comm.abort()
        os._exit(0)
    begun = time.monotonic()
    comm.all_reduce(window.address, window.address, SIZE - rank, float32)
    try:
        gpu.synchronize()
        comm.check()
    except (LaunchError, NcclError) as error:
        print(f"{time.monotonic() - begun:.3f} {error}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
