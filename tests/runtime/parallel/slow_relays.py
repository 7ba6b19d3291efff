"""An engine whose relays last longer, by chance: it finds late that pages were sent."""

from __future__ import annotations

import random

from runtime.engine.process.main import main
from runtime.engine.transfer.sockets import SocketTransport

_HAS_SENT = SocketTransport.has_sent
_CHANCE = random.Random(1)


def _has_sent(transport: SocketTransport, lease: str) -> bool:
    return _CHANCE.random() < 0.3 and _HAS_SENT(transport, lease)


if __name__ == "__main__":
    SocketTransport.has_sent = _has_sent  # type: ignore[method-assign]
    main()
