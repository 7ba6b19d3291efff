"""The commands of `xserv` / `python -m runtime.cli`, one module each; `runtime.cli` combines them.

The modules are imported by every start of the program, so nothing heavy (numpy, numba, the engine, the
server) is imported at their top: a command imports what it needs when it runs.
"""
