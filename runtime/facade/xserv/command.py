"""The command ``xserv``. No folder of the user's disturbs it, whatever its name and wherever Python looks first."""

from __future__ import annotations


def main() -> None:
    """The entry point of the script."""
    from xserv._packages import own_packages

    own_packages().prefer_own()
    from runtime.cli import main as run

    run()
