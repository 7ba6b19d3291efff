"""How families of models write tool calls: the table of notations, one entry a family, of which the first that a chat
template shows is the model's; and the parser that reads any notation from an answer's text incrementally.

A call begins once its name is known and its arguments begin; from then on they are handed out as they come, unchanged
even if they are not JSON. A call without a name stays content. White space around calls is their layout. Notations are
described in their readers. A new one is an entry here, and a reader if none of the existing ones fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.text.parts import Part
from runtime.text.tools.forms import (
    CALL_ID,
    CALL_NUMBER,
    MARKER,
    NAME,
    CallForm,
    Listed,
    Tagged,
    is_marker,
    pieces,
)  # fmt: skip
from runtime.text.tools.gemma_calls import gemma_calls
from runtime.text.tools.json_calls import (
    ARGUMENT_KEYS,
    DEEPSEEK_MARKERS,
    bare_json_objects,
    fenced_objects,
    framed_objects,
    json_objects,
    json_or_python,
    lines_of_names,
    named_objects,
)
from runtime.text.tools.literals import python_calls
from runtime.text.tools.reader import WHITE_SPACE, AnswerReader, Reader
from runtime.text.tools.tagged_calls import tagged_calls


@dataclass(frozen=True, slots=True)
class Notation:
    """
    name       ours; names: the equivalent values of vLLM's `--tool-call-parser`
    read       finds the calls in an answer, or None if the format has a parser of its own (harmony)
    form       of a forced call
    markers    texts that count only if sampled as special tokens, in models that have them as such
    is_in      detects it in the text of a chat template that does not show its calls
    short_ids  calls have ids of nine letters and digits
    ends       tokens that end an answer, since what follows them is not the model's
    has_own_reader  its reader does not follow from its form: it reads other writings of its family, too
    """

    name: str
    read: Reader | None = field(repr=False)
    form: CallForm = field(repr=False)
    markers: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    is_in: Callable[[str], bool] = field(default=lambda template: False, repr=False)
    short_ids: bool = False
    ends: tuple[str, ...] = ()
    has_own_reader: bool = True


@dataclass(frozen=True, slots=True)
class ToolReading:
    """Settings for parsing the calls of one answer.

    functions  the parameters' JSON schemas of the permitted functions
    is_closed  True: a call of any other function is content
    parallel   False: only the first call is kept
    """

    notation: Notation
    functions: Mapping[str, Any] = field(default_factory=dict)
    is_closed: bool = False
    parallel: bool = True

    @classmethod
    def of(
        cls, notation: Notation, tools: Sequence[Mapping[str, Any]], *, is_closed: bool = False, parallel: bool = True
    ) -> ToolReading:
        """`tools`: checked, in OpenAI's form."""
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        return cls(notation, functions, is_closed, parallel)


class ToolCallParser:
    """Parts of an answer: "content", "call" and "layout".

    special_markers  the notation's markers that are special tokens of the model
    """

    def __init__(self, reading: ToolReading, special_markers: frozenset[str] = frozenset()) -> None:
        assert reading.notation.read is not None, f"{reading.notation.name} has a parser of its own"
        self._reader = AnswerReader(
            dict(reading.functions),
            special_markers,
            frozenset(reading.functions) if reading.is_closed else None,
            parallel=reading.parallel,
            short_ids=reading.notation.short_ids,
        )
        self._reading = reading.notation.read(self._reader)
        self._is_over = False
        self._go_on()

    def push(self, text: str, places: Sequence[int] = ()) -> list[Part]:
        """The parts that are certain now. `places`: indices of special tokens in this text."""
        if places or not self._reader.add_plain(text):
            self._reader.add(text, places)
            self._go_on()
        return self._taken()

    def finish(self) -> list[Part]:
        reader = self._reader
        reader.has_ended = True
        self._go_on()
        self._end()
        return self._taken()

    def _go_on(self) -> None:
        if not self._is_over:
            self._is_over = next(self._reading, self) is self
        if self._is_over and not self._reader.has_ended:
            self._reader.content(len(self._reader.held))

    def _end(self) -> None:
        reader = self._reader
        is_layout = reader.has_begun or (reader.is_behind_call and not reader.held.strip(WHITE_SPACE))
        reader.at = len(reader.held)
        if is_layout:
            reader.layout()
        else:
            reader.content(reader.at)

    def _taken(self) -> list[Part]:
        parts, self._reader.parts = self._reader.parts, []
        return parts


def _has(*signs: str, but: str | None = None) -> Callable[[str], bool]:
    return lambda template: any(sign in template for sign in signs) and (but is None or but not in template)


PYTHON = Listed("=", ", ")
_OBJECT = '{"name": "NAME", "arguments": '


def of_form(name: str, form: CallForm, **fields: Any) -> Notation:
    """A notation whose reader and markers follow from its form. Raises ``ValueError`` if nothing marks its calls."""
    markers = form.markers
    if not any(is_marker(piece) for piece in pieces(form.before_name)):
        raise ValueError("nothing marks where a call begins")
    if isinstance(form.arguments, Tagged):
        read = tagged_calls(form)
    elif isinstance(form.arguments, Listed):
        raise ValueError("its arguments are neither JSON nor between tags")
    elif (name_key := _name_key(form)) is not None:
        openings = tuple(MARKER.findall(form.before_name))
        closings = tuple(MARKER.findall(form.closing))
        read = json_objects(openings, closings, name_key) if len(openings) == 1 else framed_objects(form)
    else:
        read = framed_objects(form)
    return Notation(name, read, form, markers=markers, has_own_reader=False, **fields)


def _name_key(form: CallForm) -> str | None:
    """The key of the name in the object that holds it and the arguments; None if it is in no such object."""
    head = form.head.replace(CALL_ID, "0").replace(CALL_NUMBER, "0")
    try:
        found = json.loads(f"{head[head.index('{') :]}{{}}}}")
    except ValueError:
        return None
    keys = [key for key, value in found.items() if value == NAME]
    return keys[0] if keys and any(found.get(key) == {} for key in ARGUMENT_KEYS) else None


HERMES = of_form(
    "hermes", CallForm(f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", between="\n"), is_in=_has("<tool_call>")
)
"""Hermes, Qwen2.5, Qwen3, Granite 4 and many others."""

QWEN3_CODER = of_form(
    "qwen3_coder",
    CallForm(
        "<tool_call>\n<function=NAME>\n",
        "</function>\n</tool_call>",
        between="\n",
        arguments=Tagged("<parameter=KEY>\n", "\n</parameter>", "\n"),
    ),
    names=("qwen3_xml",),
    is_in=_has("<function="),
)

GLM45 = of_form(
    "glm45",
    CallForm(
        "<tool_call>NAME\n",
        "</tool_call>",
        between="\n",
        arguments=Tagged("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    ),
    is_in=_has("<arg_key>"),
)

GLM47 = of_form(
    "glm47",
    CallForm("<tool_call>NAME", "</tool_call>", arguments=Tagged("<arg_key>KEY</arg_key><arg_value>", "</arg_value>")),
    is_in=_has("</arg_key><arg_value>"),
)
"""The same without line ends. Either reads what the other writes, too."""

GLM4 = Notation(
    "glm4",
    lines_of_names,
    CallForm("NAME\n", "", between="\n"),
    is_in=lambda template: "<|observation|>" in template and "<arg_key>" not in template,
)
"""GLM-4 before 4.5."""

_MISTRAL_READER = named_objects("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_MISTRAL_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

MISTRAL = Notation(
    "mistral",
    _MISTRAL_READER,
    CallForm(_OBJECT, "}", before="[TOOL_CALLS][", between=", ", after="]"),
    markers=_MISTRAL_MARKERS,
    is_in=_has("[TOOL_CALLS]"),
    short_ids=True,
)
"""Mistral's tokenizers v3 to v7. Either reads what the other writes, too."""

MISTRAL_V11 = Notation(
    "mistral_v11",
    _MISTRAL_READER,
    CallForm("[TOOL_CALLS]NAME[ARGS]", ""),
    markers=_MISTRAL_MARKERS,
    is_in=_has("[ARGS]"),
    short_ids=True,
)
"""v11 and later."""

LLAMA3 = Notation(
    "llama3_json",
    bare_json_objects(("<|python_tag|>",), has_methods=True),
    CallForm('{"name": "NAME", "parameters": ', "}", between="; "),
    markers=("<|python_tag|>",),
    names=("llama4_json",),
    is_in=_has("<|python_tag|>", '"parameters": dictionary of argument name'),
)

GRANITE = Notation(
    "granite",
    json_objects(("<|tool_call|>", "<tool_call>")),
    CallForm(_OBJECT, "}", before="<|tool_call|>[", between=", ", after="]"),
    markers=("<|tool_call|>",),
    is_in=_has("<|tool_call|>", but="<|/tool_call|>"),
)
"""Granite 3."""

PHI4 = Notation(
    "phi4_mini_json",
    json_objects(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
    CallForm(_OBJECT, "}", before="<|tool_call|>[", between=", ", after="]<|/tool_call|>"),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    is_in=_has("<|/tool_call|>", "functools[", "<|tool|>"),
)

DEEPSEEK_V3 = Notation(
    "deepseek_v3",
    fenced_objects,
    CallForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    markers=DEEPSEEK_MARKERS,
    is_in=lambda template: "<｜tool▁sep｜>" in template and "```json" in template,
)
"""DeepSeek V3 and R1. Either reads what the other writes, too."""

DEEPSEEK_V31 = Notation(
    "deepseek_v31",
    fenced_objects,
    CallForm(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    markers=DEEPSEEK_MARKERS,
    is_in=_has("<｜tool▁sep｜>"),
)

PYTHONIC = Notation(
    "pythonic",
    python_calls(("<|python_start|>", "```tool_code"), ("<|python_end|>", "```")),
    CallForm("NAME(", ")", before="[", between=", ", after="]", arguments=PYTHON),
    markers=("<|python_start|>", "<|python_end|>"),
    names=("llama4_pythonic",),
    is_in=_has("func_name1(", "```tool_code", "<|python_start|>"),
)
"""Gemma 3's and Llama 4's."""

LFM2 = Notation(
    "lfm2",
    json_or_python(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    CallForm("NAME(", ")", before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>", arguments=PYTHON),
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    is_in=_has("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
)
"""LFM2 and LFM2.5, whose templates may show only how the tools are listed."""

NEMOTRON = of_form(
    "nemotron_json",
    CallForm(_OBJECT, "}", before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    is_in=_has("<TOOLCALL>"),
)
"""Nemotron before 3; Nemotron 3 writes Qwen3-Coder's."""

GEMMA4 = Notation(
    "gemma4",
    gemma_calls("<|tool_call>", "<tool_call|>", '<|"|>'),
    CallForm("<|tool_call>call:NAME{", "}<tool_call|>", arguments=Listed(":", ",", '<|"|>')),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    is_in=_has("<|tool_call>"),
    ends=("<|tool_response>",),
)

JSON = Notation(
    "json",
    bare_json_objects(),
    CallForm(_OBJECT, "}", between="\n"),
)
"""Plain objects: for a call that is forced on a model with an unknown notation."""

NOTATIONS = (
    GLM47,
    GLM45,
    QWEN3_CODER,
    MISTRAL_V11,
    MISTRAL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    PHI4,
    GRANITE,
    LLAMA3,
    LFM2,
    NEMOTRON,
    PYTHONIC,
    HERMES,
    GLM4,
    JSON,
)
"""In the order in which they are looked for in a template."""

BY_NAME = {name: notation for notation in NOTATIONS for name in (notation.name, *notation.names)}


def notation_in(templates: Iterable[str]) -> Notation | None:
    """The notation that the templates show."""
    texts = list(templates)
    return next((each for each in NOTATIONS if any(map(each.is_in, texts))), None)
