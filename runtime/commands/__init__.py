"""The commands of `xserv` / `python -m runtime.cli`, one module each; `runtime.cli` combines them.

Every start of the program imports them all, for their flags. A module names what its command runs (numpy, numba, the
engine, the server) at its top by `later`; it is imported when the command first uses it.
"""

from runtime.later import later

__all__ = ["later"]
