"""The commands of `xserv` / `python -m runtime.cli`, one module each; `runtime.cli` combines them.

Every start of the program imports them all, for their flags. What a command runs (numpy, numba, the engine, the server)
is named at the module's top by `later`, and imported when the command first uses it.
"""

from runtime.later import later

__all__ = ["later"]
