"""The command ``xserv``. No folder of the user's disturbs it, whatever its name and wherever Python looks first."""

from __future__ import annotations

from xserv._packages import own_packages


def main() -> None:
    """The entry point of the script."""
    own_packages().prefer_own()
    from runtime.cli import main as run

    run()
