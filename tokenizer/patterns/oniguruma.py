"""Oniguruma's regular expressions, as `tokenizer.json` writes them, in the syntax of the `regex` module.

Most of the syntax is shared; this module parses a pattern and rewrites the differences: line anchors,
`\\Z` and `\\z`, `\\h`, `{n,m}+` (a repeated interval, not a possessive one), POSIX brackets, `\\w`,
case-insensitive matching, and `.` under `(?m)`. Unsupported syntax is refused by name: backreferences,
named and conditional groups, absent operators, callouts.
"""

from __future__ import annotations

import re
from typing import NoReturn

from tokenizer.errors import TokenizerError

UNICODE_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}"
# Outside of classes Oniguruma's \w also matches these Latin-1 superscripts and fractions.
_WORD = UNICODE_WORD + r"\xb2\xb3\xb9\xbc-\xbe"
MOVED_LETTER = "\u0295"  # LATIN LETTER PHARYNGEAL VOICED FRICATIVE: Ll until Unicode 16, Lo since

_POSIX = {
    "alnum": r"\p{Alphabetic}\p{Nd}",
    "alpha": r"\p{Alphabetic}",
    "ascii": r"\x00-\x7f",
    "blank": r"\p{Zs}\t",
    "cntrl": r"\p{Cc}",
    "digit": r"\p{Nd}",
    "lower": r"\p{Lowercase}\u0295",
    "punct": r"\p{P}\p{S}",
    "space": r"\s",
    "upper": r"\p{Uppercase}",
    "word": UNICODE_WORD,
    "xdigit": r"0-9A-Fa-f",
}
_SIMPLE_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_CATEGORY_ALIASES = {"letter": "L", "lowercaseletter": "Ll", "otherletter": "Lo", "ll": "Ll", "lo": "Lo"}


# ASCII strings that single characters fold to: Oniguruma's (?i:ss) also matches "ß".
_FOLDED_CHARACTERS = ("ff", "fi", "fl", "ss", "st")


class PatternError(TokenizerError):
    """A pattern that is malformed or uses syntax that is not implemented."""


def translate(pattern: str, is_exact: bool) -> str:
    """`pattern` for `regex`. Raises `PatternError`. Groups are never captured.

    `is_exact` also puts U+0295 into its old category, which costs a look-ahead per character.
    """
    return _Translator(pattern, is_exact).translate()


class _Translator:
    """A recursive-descent reader of one pattern, which writes the same pattern for `regex`."""

    def __init__(self, pattern: str, is_exact: bool) -> None:
        self.pattern = pattern
        self.is_exact = is_exact
        self.position = 0
        self.ignore_case = False
        self.dot_all = False
        self.extended = False

    def translate(self) -> str:
        result = self.alternatives()
        if self.position < len(self.pattern):
            self.fail("unmatched )")
        return result

    def fail(self, problem: str) -> NoReturn:
        raise PatternError(f"pattern {self.pattern!r}, character {self.position}: {problem}")

    def peek(self, length: int = 1) -> str:
        return self.pattern[self.position : self.position + length]

    def take(self, length: int = 1) -> str:
        taken = self.peek(length)
        if len(taken) < length:
            self.fail("unexpected end")
        self.position += length
        return taken

    def alternatives(self) -> str:
        saved = self.ignore_case, self.dot_all, self.extended
        branches = [self.sequence()]
        while self.peek() == "|":
            self.take()
            branches.append(self.sequence())
        self.ignore_case, self.dot_all, self.extended = saved
        return "|".join(branches)

    def sequence(self) -> str:
        written: list[str] = []
        literal = ""  # the run of literal characters, watched for multi-character case folding
        while (character := self.peek()) and character not in "|)":
            if self.extended and (character in " \t\n\r" or character == "#"):
                self.skip_comment(character)
                continue
            is_literal = character not in "\\[(.^$"
            if is_literal and character in "*+?":
                self.fail("nothing to repeat")
            atom: str | None
            if is_literal:
                literal += character
                self.check_folding(literal)
                self.take()
                atom = self.literal(character)
            else:
                literal = ""
                atom = self.atom()
            if atom is None:  # "a(?i)b|c" means "a(?i:b|c)"
                return "".join(written) + "(?:" + self.alternatives() + ")"
            written.append(self.quantified(atom))
        return "".join(written)

    def skip_comment(self, character: str) -> None:
        if character == "#":
            end = self.pattern.find("\n", self.position)
            self.position = len(self.pattern) if end < 0 else end
        else:
            self.take()

    def check_folding(self, literal: str) -> None:
        if self.ignore_case and literal.casefold().endswith(_FOLDED_CHARACTERS):
            self.fail(f"case-insensitive {literal!r}, which also matches a single character, is not supported")

    def literal(self, character: str) -> str:
        written = re.escape(character)
        if not self.ignore_case or (character.lower() == character.upper() == character.casefold()):
            return written
        # regex also folds the dotted and the dotless i, Oniguruma does not.
        return "[iI]" if character in "iI" else f"(?i:{written})"

    def atom(self) -> str | None:
        character = self.take()
        if character == "\\":
            return self.escape()
        if character == "[":
            return self.character_class()
        if character == "(":
            return self.group()
        if character == ".":
            return r"(?s:.)" if self.dot_all else "."
        if character == "^":  # always an anchor of lines, but not after the last line feed
            return r"(?:\A|(?<=\n)(?!\Z))"
        return r"(?=\n|\Z)"  # "$"

    def group(self) -> str | None:
        if self.peek() != "?":
            if self.peek() == "*":
                self.fail("callouts (*...) are not supported")
            return self.closed("(?:")
        self.take()
        for opening in ("<=", "<!", ":", "=", "!", ">"):
            if self.peek(len(opening)) == opening:
                self.take(len(opening))
                return self.closed("(?" + opening)
        if self.peek() == "#":
            end = self.pattern.find(")", self.position)
            if end < 0:
                self.fail("unclosed comment")
            self.position = end + 1
            return ""
        return self.flags()

    def closed(self, opening: str) -> str:
        inner = self.alternatives()
        if self.peek() != ")":
            self.fail("missing )")
        self.take()
        return opening + inner + ")"

    def flags(self) -> str | None:
        saved = self.ignore_case, self.dot_all, self.extended
        value = True
        while (flag := self.take()) not in ":)":
            if flag == "-":
                value = False
            elif flag == "i":
                self.ignore_case = value
            elif flag == "m":
                self.dot_all = value
            elif flag == "x":
                self.extended = value
            else:
                self.fail(f"group (?{flag} is not supported")
        if flag == ")":
            return None
        result = self.closed("(?:")
        self.ignore_case, self.dot_all, self.extended = saved
        return result

    def escape(self) -> str:
        letter = self.take()
        if letter in "pP":
            body = self.property(letter)
            if body == UNICODE_WORD:
                return f"[{_WORD}]"
            return self.with_old_category(f"[{body}]", body)
        if letter in "wWbBhHRXAzZGdDsSK":
            return self.class_escape(letter)
        if letter.isdigit() and letter != "0":
            self.fail("backreferences are not supported")
        if letter == "k" or letter == "g":
            self.fail(f"\\{letter} is not supported")
        character = self.escaped_character(letter)
        return self.literal(character)

    def class_escape(self, letter: str) -> str:
        if letter in "KG":
            self.fail(f"\\{letter} is not supported")
        word, not_word = f"[{_WORD}]", f"[^{_WORD}]"
        boundary = f"(?<={word})(?!{word})|(?<!{word})(?={word})"
        written = {
            "w": word,
            "W": not_word,
            "b": f"(?:{boundary})",
            "B": f"(?!{boundary})",
            "h": "[0-9A-Fa-f]",
            "H": "[^0-9A-Fa-f]",
            "R": r"(?>\r\n|[\n\v\f\r\x85\u2028\u2029])",
            "z": r"\Z",
            "Z": r"(?=\n?\Z)",
        }
        return written.get(letter, "\\" + letter)

    def property(self, letter: str) -> str:
        """The class body of the property after \\p or \\P."""
        if self.peek() != "{":
            self.fail(f"\\{letter} needs braces")
        end = self.pattern.find("}", self.position)
        if end < 0:
            self.fail(f"\\{letter}{{ is not closed")
        name = self.pattern[self.position + 1 : end]
        self.position = end + 1
        negated = (letter == "P") != name.startswith("^")
        name = name.removeprefix("^")
        plain = name.lower().replace("_", "").replace(" ", "").replace("-", "")
        if plain in ("word", "graph", "print"):
            if plain != "word" or negated:
                self.fail(f"property {name!r} is not supported")
            return UNICODE_WORD
        name = {"punct": "P", "alnum": "Alnum", "any": "Any"}.get(plain, name)
        return f"\\{'P' if negated else 'p'}{{{name}}}"

    def with_old_category(self, written: str, body: str, negated: bool = False) -> str:
        """Puts U+0295 into the reference's category, independently of the `regex` module."""
        if not self.is_exact:
            return written
        properties = set(_properties(body))
        lower = bool(properties & {"\\p{Ll}", "\\P{Lo}"})
        other = bool(properties & {"\\p{Lo}", "\\P{Ll}"})
        if lower == other or "\\p{L}" in properties:
            return written
        return f"(?:{written}|{MOVED_LETTER})" if lower != negated else f"(?:(?!{MOVED_LETTER}){written})"

    def escaped_character(self, letter: str) -> str:
        if letter == "x":
            if self.peek() == "{":
                end = self.pattern.find("}", self.position)
                digits = self.pattern[self.position + 1 : end] if end > 0 else ""
                self.position = end + 1
            else:
                digits = ""
                while len(digits) < 2 and self.peek() and self.peek() in "0123456789abcdefABCDEF":
                    digits += self.take()
            return self.code_point(digits, 16)
        if letter == "u":
            return self.code_point(self.take(4), 16)
        if letter == "0":
            digits = "0"
            while len(digits) < 3 and self.peek() and self.peek() in "01234567":
                digits += self.take()
            return self.code_point(digits, 8)
        if letter in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[letter]
        if letter.isascii() and letter.isalnum():
            self.fail(f"escape \\{letter} is not supported")
        return letter

    def code_point(self, digits: str, base: int) -> str:
        try:
            return chr(int(digits, base))
        except (ValueError, OverflowError):
            self.fail(f"{digits!r} is not a code point")

    def quantified(self, atom: str) -> str:
        """`atom` with the quantifiers that follow it."""
        while True:
            character = self.peek()
            if character and character in "?*+":
                self.take()
                suffix = character
                if self.peek() and self.peek() in "?+":
                    suffix += self.take()
                atom = f"(?:{atom}){suffix}"
            elif character == "{" and (interval := self.interval()):
                suffix = interval
                if "," in interval and self.peek() == "?":  # "{n}?" is an optional "{n}", which the loop handles
                    suffix += self.take()
                atom = f"(?:{atom}){suffix}"
            else:
                return atom

    def interval(self) -> str:
        """`{n}`, `{n,}`, `{,m}` or `{n,m}` at the position, or "" when the brace is literal."""
        end = self.pattern.find("}", self.position)
        inside = self.pattern[self.position + 1 : end] if end > 0 else ""
        low, comma, high = inside.partition(",")
        if not (low + high).isdigit() or not (low + high).isascii():
            return ""
        self.position = end + 1
        return "{" + (low or "0") + comma + high + "}"

    def character_class(self) -> str:
        body, negated = self.class_body()
        written = f"[{'^' if negated else ''}{body}]"
        if self.ignore_case:
            if "\\p" in body or "\\P" in body:
                self.fail("a property inside a case-insensitive class is not supported")
            return f"(?:(?![\u0130\u0131])(?i:{written}))"
        return self.with_old_category(written, body, negated)

    def class_body(self) -> tuple[str, bool]:
        """The inside of a class up to its `]`, and whether it began with `^`."""
        negated = self.peek() == "^"
        if negated:
            self.take()
        written: list[str] = []
        first = True
        while True:
            character = self.take()
            if character == "]" and not first:
                return "".join(written), negated
            first = False
            if character == "[":
                written.append(self.nested_class())
            elif character == "&" and self.peek() == "&":
                self.take()
                written.append("&&")
            elif character == "\\" and self.peek() and self.peek() in "pPwWdDsShHR":
                written.append(self.class_member_escape(self.take()))
            else:
                low = self.class_character(character)
                if self.peek() == "-" and self.peek(2)[1:] not in ("]", ""):
                    self.take()
                    written.append(f"{_code(low)}-{_code(self.range_end(low))}")
                else:
                    written.append(_code(low))

    def range_end(self, low: str) -> str:
        character = self.take()
        if character == "[" or (character == "\\" and self.peek() and self.peek() in "pPwWdDsShHR"):
            self.fail("a range must end in a character")
        high = self.class_character(character)
        if high < low:
            self.fail("empty range")
        return high

    def class_character(self, character: str) -> str:
        if character != "\\":
            return character
        letter = self.take()
        return "\b" if letter == "b" else self.escaped_character(letter)

    def class_member_escape(self, letter: str) -> str:
        if letter in "pP":
            return self.property(letter)
        if letter == "w":
            return UNICODE_WORD
        if letter == "h":
            return "0-9A-Fa-f"
        if letter in "WHR":
            self.fail(f"\\{letter} inside a class is not supported")
        return "\\" + letter

    def nested_class(self) -> str:
        if self.peek() == ":":
            end = self.pattern.find(":]", self.position)
            name = self.pattern[self.position + 1 : end] if end > 0 else ""
            if name in _POSIX:
                self.position = end + 2
                return _POSIX[name]
            if name.startswith("^") and name[1:] in _POSIX:
                self.fail(f"[:{name}:] is not supported")
        body, negated = self.class_body()
        if negated or "&&" in body:
            self.fail("a negated or intersected class inside a class is not supported")
        return body


def _code(character: str) -> str:
    return f"\\U{ord(character):08X}"


def _properties(body: str) -> list[str]:
    """The properties in a class body, with aliases resolved."""
    found = re.findall(r"\\([pP])\{([^}]*)\}", body)
    return [f"\\{letter}{{{_CATEGORY_ALIASES.get(name.lower().replace('_', ''), name)}}}" for letter, name in found]
