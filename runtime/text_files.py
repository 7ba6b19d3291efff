"""Text files that users name: UTF-8, and an error that names another encoding."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

from runtime.errors import InvalidArgumentError

_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_text_file(path: Path | str, param: str | None = None) -> str:
    """A file's text; "-" is stdin. A byte order mark before UTF-8 is dropped, with a note on stderr.

    Raises `OSError`, and `InvalidArgumentError` for another encoding.
    """
    name = str(path)
    content = sys.stdin.buffer.read() if name == "-" else Path(path).read_bytes()
    if content.startswith(codecs.BOM_UTF8):
        print(f"xserv: {name}: the byte order mark in front of the text is left out", file=sys.stderr)
        content = content[len(codecs.BOM_UTF8) :]
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            raise InvalidArgumentError(f"{name} is {encoding}, must be UTF-8: save it as UTF-8", param=param)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"{name} is not UTF-8: line {line} has the byte 0x{content[error.start]:02x}; save it as UTF-8"
        raise InvalidArgumentError(problem, param=param) from None
