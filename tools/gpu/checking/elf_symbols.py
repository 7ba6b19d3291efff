"""The symbols of a cubin, read from its ELF tables; undefined ones would need another module."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _DYNAMIC_SYMBOLS = 2, 11  # sh_type
_UNDEFINED = 0  # st_shndx
_RESERVED = ".nv.reservedSmem."
"""From sm_90 on ptxas names the shared memory that the driver keeps for itself so, in an empty kernel, too."""


def undefined_symbols(cubin: bytes) -> list[str]:
    """Names of undefined symbols, except those that every driver defines.

    Raises ValueError for a file that is not a 64-bit ELF.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file, so no cubin")
    undefined = [name for name, section in symbols(cubin) if section == _UNDEFINED and name]
    return [name for name in undefined if not name.startswith(_RESERVED)]


def symbols(cubin: bytes) -> Iterator[tuple[str, int]]:
    """Name and section of each symbol."""
    header = _HEADER.unpack_from(cubin)
    offset, size, count = header[6], header[11], header[12]
    sections = [_SECTION.unpack_from(cubin, offset + number * size) for number in range(count)]
    for _, kind, _, _, start, length, link, _, _, entry in sections:
        if kind in (_SYMBOLS, _DYNAMIC_SYMBOLS):
            names = sections[link][4]
            for place in range(start, start + length, entry):
                name, _, _, section, _, _ = _SYMBOL.unpack_from(cubin, place)
                yield cubin[names + name : cubin.index(b"\0", names + name)].decode(), section
