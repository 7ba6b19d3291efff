"""Translates patterns of JSON schemas, which are ECMAScript's, to the syntax of Rust's regex crate.

That syntax has no look-around. Some look-ahead at the start of a pattern can be expressed by separate patterns: that of
zod and pydantic for addresses and decimals.
"""

from __future__ import annotations

import re

_NOT_BUILT = re.compile(r"\\[bB1-9]|\\k<|\(\?<?[=!]")
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_IN_FRONT = re.compile(r"\^?\(\?([=!])((?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\\\[])*)\)")
_ONE = r"(\[\^?(?:\\.|[^\]\\])+\]|\\[^\w\s]|\\[dsw]|[^\\\[\](){}.*+?|^$])"
"""One character: a class, an escape or a plain character."""
_BEGINS = re.compile(f"{_ONE}")
_HOLDS = re.compile(rf"\.\*{_ONE}(?:\1)*")
_IS_ALL = re.compile(rf"\^?{_ONE}([*+])\$")
_ANY = "(?s:.*)"


def patterns_of(pattern: str) -> list[str]:
    """Patterns that a text matches together exactly if it matches the given one. Raises `ValueError`."""
    patterns, rest = [], pattern
    while (found := _IN_FRONT.match(rest)) is not None and pattern.startswith("^"):
        body = found[2]
        if found[1] == "=":
            patterns.append(f"^(?:{body})")
        elif is_all := _IS_ALL.fullmatch(body):
            other = _ANY + _other_than(is_all[1]) + _ANY
            patterns.append(f"^{other}$" if is_all[2] == "*" else f"^(?:{other})?$")
        elif _BEGINS.fullmatch(body):
            patterns.append(f"^(?:{_other_than(body)}{_ANY})?$")
        elif holds := _HOLDS.fullmatch(body):
            one, times = holds[1], (len(body) - 2) // len(holds[1]) - 1
            few = f"(?:{one}){{0,{times}}}"
            patterns.append(f"^(?:{few}{_other_than(one)})*{few}$")
        else:
            break
        rest = "^" + rest[found.end() :]
    return [*map(_translated, patterns), *([] if patterns and rest == "^" else [_translated(rest)])]


def _other_than(one: str) -> str:
    """A pattern of any character except this one, or those of this class."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"


def _translated(pattern: str) -> str:
    written: list[str] = []
    is_class, i = False, 0
    while i < len(pattern):
        piece = pattern[i : i + 2] if pattern[i] == "\\" else pattern[i]
        if not is_class and (wrong := _NOT_BUILT.match(pattern, i)):
            what = "a back-reference" if wrong[0][-1:].isdigit() or "k" in wrong[0] else "look-around"
            raise ValueError(f"{pattern!r:.200} has {what} ({wrong[0]}), which no grammar enforces; write it without")
        if is_class:
            is_class = piece != "]"
            piece = f"\\{piece}" if piece in "[&~" or (piece == "-" and pattern.startswith("--", i)) else piece
        elif pattern.startswith("[^]", i):
            piece, i = "(?s:.)", i + 2
        elif piece == "[":
            is_class = True
            if pattern.startswith("^", i + 1):
                piece, i = "[^", i + 1
        elif piece == "{" and not _QUANTIFIER.match(pattern, i) and written[-1:] not in ([r"\p"], [r"\P"], [r"\u"]):
            piece = r"\{"
        i += len(pattern[i : i + 2]) if piece.startswith("\\") and pattern[i] == "\\" else 1
        written.append(piece)
    return "".join(written)
