"""LaTeX as a tree of MathML Core, by latex2mathml: only allowed elements and attributes.

LaTeX from a model is untrusted: links, styles, classes, colours and macros (which can grow without end) are dropped. A
node is `[tag, attributes, children]`, a leaf's children are its text; the page makes elements."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.commands import FUNCTIONS, MATRICES
from latex2mathml.converter import convert_to_element

Tree = list[Any]
"""[tag, {attribute: value}, [child, …] or a leaf's text]"""

MAX_DEPTH = 100
"""Elements within each other."""

MAX_NODES = 20_000

LEAVES = frozenset({"mi", "mn", "mo", "mtext", "mspace"})
CONTAINERS = frozenset(
    {"math", "mrow", "mfrac", "msqrt", "mroot", "mstyle", "mpadded", "mphantom", "mtable", "mtr", "mtd"}
    | {"msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none"}
)
NUM_CHILDREN = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
WORDS = {
    "display": ("block", "inline"),
    "columnalign": ("left", "right"),
    **dict.fromkeys(
        ("stretchy", "fence", "largeop", "movablelimits", "accent", "accentunder", "displaystyle"), ("true", "false")
    ),
    "form": ("prefix", "infix", "postfix"),
    "scriptlevel": ("0", "1", "2"),
    "mathvariant": ("normal",),
}
"""Attributes that come through, with the values that they may have."""

LENGTHS = frozenset({"width", "height", "depth", "voffset", "lspace", "rspace", "minsize", "maxsize", "linethickness"})
MAX_EM = 4.0
"""A longer length, in either direction, is left out: an answer does not paint over what stands around it."""

NAMED_SPACES = {"negativethinmathspace": "-0.167em"}
CLASSES = {"box": "boxed", "updiagonalstrike": "struck", "downdiagonalstrike": "struck", "horizontalstrike": "struck"}
"""`menclose`, which MathML Core has not: an `mrow` with a class of the page's style sheet."""

ENVIRONMENTS: dict[str, str | None] = {
    "aligned": "align*",
    "align": "align*",
    "flalign": "align*",
    "flalign*": "align*",
    "eqnarray": "align*",
    "eqnarray*": "align*",
    "gather": "matrix",
    "gather*": "matrix",
    "gathered": "matrix",
    "multline": "matrix",
    "multline*": "matrix",
    "dcases": "cases",
    "equation": "",
    "equation*": "",
    "displaymath": "",
    "math": "",
}
"""Replacements of environments that the library does not know; "" keeps the content alone."""

KNOWN_ENVIRONMENTS = frozenset(name.removeprefix("\\") for name in MATRICES) | {"array", "cases"}
LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
NAMES_WITH_LIMITS = frozenset({"lim", "max", "min", "sup", "inf", "lim sup", "lim inf", "det", "gcd", "Pr", "argmax"})
NAMES_WITH_LIMITS |= {"argmin", "arg max", "arg min"}
VARIANTS = {
    "bold": "BOLD",
    "italic": "ITALIC",
    "bold-italic": "BOLD ITALIC",
    "double-struck": "DOUBLE-STRUCK",
    "script": "SCRIPT",
    "bold-script": "BOLD SCRIPT",
    "fraktur": "FRAKTUR",
    "bold-fraktur": "BOLD FRAKTUR",
    "sans-serif": "SANS-SERIF",
    "bold-sans-serif": "SANS-SERIF BOLD",
    "sans-serif-italic": "SANS-SERIF ITALIC",
    "sans-serif-bold-italic": "SANS-SERIF BOLD ITALIC",
    "monospace": "MONOSPACE",
}
"""A font of letters, as Unicode names them: MathML Core has no fonts but "normal"."""

_MACROS = re.compile(
    r"\\(?:(?:re|provide)?newcommand|(?:re)?newenvironment|[egx]?def|let|DeclareMathOperator)(?![a-zA-Z])"
)
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{([^{}]*)\}")
_LABELS = re.compile(r"\\(?:label|tag)\s*\{[^{}]*\}|\\(?:nonumber|notag)(?![a-zA-Z])")
_FUNCTION_NAMES = frozenset(name.removeprefix("\\") for name in FUNCTIONS)
_CODE_POINT = re.compile(r"&#x([0-9A-Fa-f]+);")
_ESCAPED = re.compile(r"\\([_%#$&{}])")
_LENGTH = re.compile(r"[+-]?\d{0,4}(?:\.\d{1,6})?(em|ex|px|pt|mu|cm|mm|in|pc)?")
_EMS = {
    "em": 1.0,
    "ex": 0.5,
    "px": 0.0625,
    "pt": 0.083,
    "mu": 0.0556,
    "cm": 2.4,
    "mm": 0.24,
    "in": 6.0,
    "pc": 1.0,
    "": 0.0,
}


class MathError(ValueError):
    """LaTeX that cannot be shown as a formula; the page shows its source."""


def math_tree(latex: str, *, is_display: bool) -> Tree:
    """The formula as a tree whose root is `math`. Raises `MathError`."""
    if _MACROS.search(latex):
        raise MathError("it defines macros")
    source = _with_known_environments(_LABELS.sub("", latex))
    try:
        root = convert_to_element(source, display="block" if is_display else "inline")
    except Exception as error:  # the library raises its parts' errors: IndexError, StopIteration, …
        raise MathError(type(error).__name__) from None
    return _Cleaner().clean(root)


def _with_known_environments(latex: str) -> str:
    if "\\\\" in latex and "\\begin" not in latex and "\\substack" not in latex:
        name = "aligned" if "&" in latex else "gathered"  # lines without an environment, as in answers
        latex = rf"\begin{{{name}}}{latex}\end{{{name}}}"

    def known(found: re.Match[str]) -> str:
        name = found[2].strip()
        name_of_ours = ENVIRONMENTS.get(name, name if name in KNOWN_ENVIRONMENTS else None)
        if name_of_ours is None:
            raise MathError(f"it has an environment {name[:40]!r}")
        return rf"\{found[1]}{{{name_of_ours}}}" if name_of_ours else ""

    return _ENVIRONMENT.sub(known, latex)


class _Cleaner:
    """Cleans one tree, element by element."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def clean(self, element: Element, depth: int = 0) -> Tree:
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise MathError("it is too large")
        tag = element.tag
        attributes = dict(_attributes(element))
        if tag in LEAVES:
            return _leaf(tag, attributes, element)
        if tag == "menclose":
            tag, attributes = "mrow", {"class": CLASSES.get(element.get("notation", ""), "boxed")}
        if tag not in CONTAINERS:
            raise MathError(f"it has an element {tag!r}")
        children = [child for child in element if child.tag != "mspace" or child.get("linebreak") is None]
        if element.text and element.text.strip():  # a box with words alone
            words = SubElement(Element("mrow"), "mtext")
            words.text = element.text
            children.insert(0, words)
        if len(children) != NUM_CHILDREN.get(tag, len(children)):
            raise MathError(f"its {tag} has {len(children)} parts")
        if tag in LIMITS and _has_limits(children):
            tag = LIMITS[tag]
            base: Element = children[0]
            base.set("movablelimits", "true")
            base.tag = "mo"
        if tag == "mtable":
            _rule(element)
            if element.get("columnspacing", "").startswith("0em"):
                attributes["class"] = "aligned"
        if tag in ("mrow", "mtd"):
            children = list(_with_thin_spaces(children))
        return [tag, attributes, [self.clean(child, depth + 1) for child in children]]


def _attributes(element: Element) -> Iterator[tuple[str, str]]:
    for name, given in element.attrib.items():
        value = NAMED_SPACES.get(given, given).replace(" ", "")
        if name in WORDS and value in WORDS[name]:
            yield name, value
        elif name in LENGTHS and (found := _LENGTH.fullmatch(value)):
            number = float(value.removesuffix(found[1] or "") or "0") if value.strip("+-") else 0.0
            if abs(number * _EMS[found[1] or ""]) <= MAX_EM:
                yield name, value
        elif name == "ours":
            yield "class", given


def _leaf(tag: str, attributes: dict[str, str], element: Element) -> Tree:
    if len(element):
        raise MathError(f"its {tag} holds elements")
    text = _CODE_POINT.sub(_character, element.text or "")
    if tag == "mtext":
        text = _ESCAPED.sub(r"\1", text)
    variant = VARIANTS.get(element.get("mathvariant", ""))
    if variant is not None:
        text = "".join(_in_font(letter, variant) for letter in text)
    if tag == "mi" and len(text) == 1 and unicodedata.category(text) in ("Sm", "Ps", "Pe") and text not in "∞∂∇":
        tag = "mo"
        if unicodedata.category(text) != "Sm":
            attributes.setdefault("stretchy", "false")
    return [tag, attributes, text]


def _character(found: re.Match[str]) -> str:
    number = int(found[1][:8], 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF or unicodedata.category(chr(number)) == "Cc":
        raise MathError("it names no character")
    return chr(number)


def _in_font(letter: str, font: str) -> str:
    try:
        name = unicodedata.name(letter)
        greek = "GREEK " if name.startswith("GREEK ") else "LATIN "
        kind = name.removeprefix(greek).replace("CAPITAL LETTER", "CAPITAL").replace("SMALL LETTER", "SMALL")
    except ValueError:
        return letter
    for prefix in ("MATHEMATICAL ", ""):  # ℝ, ℒ, ℌ have older names
        older = {"FRAKTUR": "BLACK-LETTER"}.get(font, font) if not prefix else font
        try:
            return unicodedata.lookup(f"{prefix}{older} {kind}")
        except KeyError:
            continue
    return letter


def _has_limits(children: list[Element]) -> bool:
    """Whether the operator before has its limits above and below in display style."""
    if not children or children[0].tag not in ("mo", "mi") or len(children[0]):
        return False
    text = _CODE_POINT.sub(_character, children[0].text or "").replace("\u2006", " ").replace("\u2009", " ")
    return text in NAMES_WITH_LIMITS or (len(text) == 1 and (text in "∏∐∑" or "⋀" <= text <= "⋃" or "⨀" <= text <= "⨆"))


def _with_thin_spaces(children: list[Element]) -> Iterator[Element]:
    """TeX's space between the name of a function and a letter or number beside it."""
    for before, child in zip([None, *children], children):
        if before is not None and (_is_function(before) or _is_function(child)):
            kinds = {_base(each).tag for each in (before, child) if not _is_function(each)}
            if kinds <= {"mi", "mn", "mrow", "mfrac", "msqrt", "mroot"}:
                yield Element("mspace", width="0.167em")
        yield child


def _base(element: Element) -> Element:
    """The base of the indices."""
    return element[0] if element.tag in LIMITS and len(element) else element


def _is_function(element: Element) -> bool:
    base = _base(element)
    return base.tag == "mi" and base.text in _FUNCTION_NAMES


def _rule(table: Element) -> None:
    """Lines between rows and columns, as classes of the cells: MathML Core has no attributes for them."""
    rows = table.get("rowlines", "").split()
    columns = table.get("columnlines", "").split()
    for at, row in enumerate(table):
        for column, cell in enumerate(row):
            has_line_above = at > 0 and at <= len(rows) and rows[at - 1] != "none"
            has_line_left = column > 0 and column <= len(columns) and columns[column - 1] != "none"
            names = [name for name, has_it in (("ruled", has_line_above), ("barred", has_line_left)) if has_it]
            if names:
                cell.set("ours", " ".join(names))
