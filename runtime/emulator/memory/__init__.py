"""A device's memory with its shadow bytes; loads, stores and atomics with their checks."""
