"""A launch while it runs: blocks, warps, their state, who runs next, what is counted, what is reported."""
