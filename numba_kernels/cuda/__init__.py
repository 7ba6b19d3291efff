"""The GPU kernels: `@cuda.jit` functions, one file a family, each with its `plan`. Needs numba-cuda, but no GPU."""
