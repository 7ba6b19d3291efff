"""The command ``xserv``. No folder of the user's disturbs it, whatever its name and wherever Python looks first."""

from __future__ import annotations

import signal

from xserv._packages import own_packages


def main() -> None:
    """The entry point. While modules are imported, Ctrl-C ends the process without a traceback."""
    own_packages().prefer_own()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from runtime.cli import main as run

    run()
