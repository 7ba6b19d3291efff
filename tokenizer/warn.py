"""Warnings about a model's files, for its user: each is logged once."""

from __future__ import annotations

import functools
import logging

_logger = logging.getLogger("xserv.files")


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same."""
    _logger.warning("%s", message)
