"""Implementations of `runtime.ops`: the same operations on each kind of device, with their checks."""
