"""The installed release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def release() -> str:
    """Its version; "0" in a checkout that is not installed."""
    try:
        return installed_version("xserv")
    except PackageNotFoundError:
        return "0"
