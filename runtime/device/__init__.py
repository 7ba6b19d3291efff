"""Devices and what is bound to them: memory, streams, kernels, graphs."""
