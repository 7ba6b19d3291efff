"""Post-processors: the special ids around the ids of a text.

Supported: TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel (which
only concerns offsets), Sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenizer.json_fields import Fields, shown

_TYPES = ("TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel", "Sequence")

Template = list[list[int] | None]
"""Special ids in order; None stands for the ids of the text."""

PairTemplate = list[tuple[list[int] | Literal["A", "B"], int]]
"""Special ids or one of two texts, in order, each with its type."""


@dataclass(frozen=True, slots=True)
class PostProcessor:
    """Templates, applied one after the other."""

    templates: tuple[Template, ...] = ()
    pairs: tuple[PairTemplate, ...] = ()

    def process(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        """Put the special ids around `ids`; without them only the repetitions that a template asks for
        remain."""
        for template in self.templates:
            processed: list[int] = []
            for part in template:
                if part is None:
                    processed += ids
                elif add_special_tokens:
                    processed += part
            ids = processed
        return ids

    def process_pair(self, first: list[int], second: list[int]) -> tuple[list[int], int | None]:
        """Put the special ids around two texts; without a template they follow one another. Also the first id of type
        1, if those of type 0 all stand before it."""
        template: PairTemplate = self.pairs[-1] if self.pairs else [("A", 0), ("B", 0)]
        ids: list[int] = []
        types: list[int] = []
        for part, kind in template:
            own = {"A": first, "B": second}[part] if isinstance(part, str) else part
            ids += own
            types += [kind] * len(own)
        second_from = types.index(1) if 1 in types else None
        return ids, second_from


def build_post_processor(fields: Fields | None) -> PostProcessor:
    """The post-processor of a "post_processor" object.

    Raises `TokenizerFileError` for a type that is not supported.
    """
    if fields is None:
        return PostProcessor()
    return PostProcessor(tuple(_templates(fields)), tuple(_pairs(fields)))


def _templates(fields: Fields) -> list[Template]:
    kind = fields.one_of("post-processor", _TYPES)
    if kind == "Sequence":
        fields.known(["type", "processors"])
        return [template for part in fields.objects("processors") for template in _templates(part)]
    if kind == "ByteLevel":
        fields.known(["type", "add_prefix_space", "trim_offsets", "use_regex"])
        return []
    if kind == "TemplateProcessing":
        fields.known(["type", "single", "pair", "special_tokens"])
        return [_read_template(fields)]
    fields.known(["type", "sep", "cls", "trim_offsets", "add_prefix_space"])
    return [[[_read_pair(fields, "cls")], None, [_read_pair(fields, "sep")]]]


def _pairs(fields: Fields) -> list[PairTemplate]:
    kind = fields.one_of("post-processor", _TYPES)
    if kind == "Sequence":
        return [template for part in fields.objects("processors") for template in _pairs(part)]
    if kind == "ByteLevel":
        return []
    if kind == "TemplateProcessing":
        return [_read_pair_template(fields)] if fields.get("pair") else []
    cls, sep = ([_read_pair(fields, name)] for name in ("cls", "sep"))
    if kind == "BertProcessing":
        return [[(cls, 0), ("A", 0), (sep, 0), ("B", 1), (sep, 1)]]
    return [[(cls, 0), ("A", 0), (sep, 0), (sep, 0), ("B", 0), (sep, 0)]]


def _read_template(fields: Fields) -> Template:
    template: Template = []
    for piece in fields.objects("single"):
        if "Sequence" in piece.values:
            if piece.object("Sequence").string("id") != "A":
                piece.fail("Sequence", "a template for one text must use sequence A only")
            template.append(None)
            continue
        template.append(_special_ids(fields, piece))
    return template


def _read_pair_template(fields: Fields) -> PairTemplate:
    template: PairTemplate = []
    for piece in fields.objects("pair"):
        if "Sequence" in piece.values:
            inner = piece.object("Sequence")
            name: Literal["A", "B"] = "A" if inner.choice("id", ("A", "B")) == "A" else "B"
            template.append((name, inner.count("type_id", 0)))
            continue
        template.append((_special_ids(fields, piece), piece.object("SpecialToken").count("type_id", 0)))
    return template


def _special_ids(fields: Fields, piece: Fields) -> list[int]:
    """The ids of a template's special token."""
    special_tokens = fields.object("special_tokens")
    name = piece.object("SpecialToken").string("id")
    if name not in special_tokens.values:
        piece.fail("SpecialToken", f"{name!r} is not among special_tokens")
    ids = special_tokens.object(name).items("ids")
    if not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        special_tokens.fail(name, f"expected token ids, found {shown(ids)}")
    return ids


def _read_pair(fields: Fields, name: str) -> int:
    pair = fields.items(name)
    if len(pair) != 2 or type(pair[1]) is not int or not 0 <= pair[1] < 1 << 32:
        fields.wrong(name, "a token and its id")
    return int(pair[1])
