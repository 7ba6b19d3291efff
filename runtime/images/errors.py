"""The errors of pictures."""

from __future__ import annotations

from runtime.errors import XservError


class ImageError(XservError):
    """A picture that cannot be read or is beyond a limit. The message is one line, safe to show to the client."""
