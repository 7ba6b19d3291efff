"""The emulated GPU: PTX text in, exact results out, with checkers that say what hardware would only do wrong.

`ptx.py` parses; `dispatch.py` and `lowering.py` translate a kernel to LLVM IR over vectors of 32 lanes, and
`instructions.py` names what is known; `program.py` keeps what was translated, in memory and on disk; `launch.py` runs
it over a grid, and `warp_scheduler.py` says which warp runs when. `memory.py` is a device's memory, `driver.py` the
CUDA driver over it all.
"""
