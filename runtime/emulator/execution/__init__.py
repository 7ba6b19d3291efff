"""A launch while it runs: blocks, warps, their state, scheduling, counters, faults."""
