"""What is wrong with a picture."""

from __future__ import annotations

from runtime.errors import XservError


class ImageError(XservError):
    """A picture that cannot be read or is beyond a limit. The message is one line that may be shown to whoever sent
    the picture."""
