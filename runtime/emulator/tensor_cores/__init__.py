"""mma, wgmma, and the instructions that move matrices between shared memory and registers."""
