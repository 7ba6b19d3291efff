"""The emulated GPU: PTX text in, exact results out, with checkers that report errors which hardware hides.

| folder | contents |
|---|---|
| driver | the functions of `cuda.bindings.driver`: devices, memory, streams, graphs; queues of work |
| translation | PTX text → LLVM IR over vectors of 32 lanes → machine code, kept on disk |
| execution | a launch while it runs: the state of blocks and warps, scheduling, counters, faults |
| arithmetic | instructions that only compute, on a lane or between the lanes of a warp |
| tensor_cores | mma, wgmma, ldmatrix |
| memory | a device's memory with its shadow bytes; loads, stores and atomics with their checks |
| async_copies | cp.async, bulk copies and TMA, which land as late as they may |
| synchronisation | barriers, mbarriers, clusters, control flow |
| nccl | collectives of ranks in several processes, each compared among all |
| races | the order of accesses, between the warps of a launch and between streams |
"""
