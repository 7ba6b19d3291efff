"""Low-rank sums of adapters on products' launches; as a launch of their own: `numba_kernels.cuda.experts.low_rank`."""
