"""Post-processors: the special ids around the ids of a text.

Supported: TemplateProcessing (its "single" template), BertProcessing, RobertaProcessing, ByteLevel (which
only concerns offsets), Sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizer.json_fields import Fields, shown

_TYPES = ("TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel", "Sequence")

Template = list[list[int] | None]
"""Special ids in order; None stands for the ids of the text."""


@dataclass(frozen=True, slots=True)
class PostProcessor:
    """Templates, applied one after the other."""

    templates: tuple[Template, ...] = ()

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


def build_post_processor(fields: Fields | None) -> PostProcessor:
    """The post-processor of a "post_processor" object.

    Raises `TokenizerFileError` for a type that is not supported.
    """
    return PostProcessor(tuple(_templates(fields)) if fields is not None else ())


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


def _read_template(fields: Fields) -> Template:
    special_tokens = fields.object("special_tokens")
    template: Template = []
    for piece in fields.objects("single"):
        if "Sequence" in piece.values:
            if piece.object("Sequence").string("id") != "A":
                piece.fail("Sequence", "a template for one text must use sequence A only")
            template.append(None)
            continue
        name = piece.object("SpecialToken").string("id")
        if name not in special_tokens.values:
            piece.fail("SpecialToken", f"{name!r} is not among special_tokens")
        ids = special_tokens.object(name).items("ids")
        if not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
            special_tokens.fail(name, f"expected token ids, found {shown(ids)}")
        template.append(ids)
    return template


def _read_pair(fields: Fields, name: str) -> int:
    pair = fields.items(name)
    if len(pair) != 2 or type(pair[1]) is not int or not 0 <= pair[1] < 1 << 32:
        fields.wrong(name, "a token and its id")
    return int(pair[1])
