"""The arguments of calls as models wrote them, to be rendered so when a client sends the calls back: a client that
parses them and writes them anew changes white space, escapes and the order of keys, and the prefix of the next turn
would end there. Only spelling is taken from memory: arguments that do not parse equal are rendered as they were sent.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

from tokenizer.templates.written_json import WrittenText, equal, written_object

_ENTRY_BYTES = 400
"""About what an entry takes beside its texts."""


class CallMemory:
    """The latest calls, by tenant and id. Any thread may use it.

    max_bytes  beyond it the least recently used are forgotten; 0: none is remembered
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._texts: OrderedDict[tuple[str | None, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def put(self, tenant: str | None, call_id: str, arguments: str) -> None:
        """Remembers a call's arguments, if they are a JSON object."""
        size = _size(call_id, arguments)
        if size > self.max_bytes:
            return
        try:
            written_object(arguments)
        except (ValueError, RecursionError):
            return
        key = (tenant, call_id)
        with self._lock:
            self._drop(key)
            self._texts[key] = arguments
            self.size_bytes += size
            while self.size_bytes > self.max_bytes:
                self._drop(next(iter(self._texts)))

    def spelled(self, tenant: str | None, call_id: str | None, arguments: str) -> WrittenText | None:
        """The remembered text of this call if it means the same as `arguments`."""
        if call_id is None or (text := self._texts.get((tenant, call_id))) is None:
            return None
        try:
            is_same = text == arguments or equal(json.loads(arguments), json.loads(text))
        except (ValueError, RecursionError):
            return None
        if not is_same:
            return None
        with self._lock:
            if (tenant, call_id) in self._texts:
                self._texts.move_to_end((tenant, call_id))
        return WrittenText(text)

    def _drop(self, key: tuple[str | None, str]) -> None:
        if (text := self._texts.pop(key, None)) is not None:
            self.size_bytes -= _size(key[1], text)


def _size(call_id: str, arguments: str) -> int:
    return _ENTRY_BYTES + 4 * (len(call_id) + len(arguments))
